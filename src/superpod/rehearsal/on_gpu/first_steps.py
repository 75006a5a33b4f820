"""Trains many recipes for a few steps on one GPU, each in a process of its own, and keeps the results in one file.

The processes are forked after NeMo has been imported, which takes up to a minute. A run can be interrupted: cases whose
result is in the file are not trained again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from superpod.rehearsal.on_gpu import case as cases_module
from superpod.rehearsal.on_gpu.case import RESULT, Case

CASE_LIMIT_S = 300.0
"""Seconds after which a case counts as hung."""


@dataclass(frozen=True)
class Running:
    """A case that is being trained."""

    case: Case
    folder: Path
    started: float


@dataclass(frozen=True)
class Results:
    """The results of cases in a JSON-lines file."""

    path: Path

    def read(self) -> list[dict[str, Any]]:
        """Return the results so far; a line that was cut off when the process was killed is ignored."""
        if not self.path.is_file():
            return []
        results = []
        for line in self.path.read_text().splitlines():
            try:
                results.append(json.loads(line))
            except ValueError:
                continue
        return results

    def add(self, result: dict[str, Any]) -> None:
        """Append a result."""
        with self.path.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def missing(self, cases: Iterable[Case]) -> list[Case]:
        """Return the cases without a result."""
        known = {json.dumps(result["case"], sort_keys=True) for result in self.read()}
        return [case for case in cases if _key(case) not in known]


def _key(case: Case) -> str:
    return json.dumps(dataclasses.asdict(case), sort_keys=True)


def run_cases(
    cases: Iterable[Case],
    folder: Path,
    *,
    workers: int = 1,
    limit_s: float = 3600.0,
    needed_gib: Callable[[Case], float] = lambda _: 0.0,
    total_gib: float = math.inf,
    note: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Train the cases that have no result yet in `folder/results.jsonl`; return all results.

    Args:
        cases: the cases, the most informative ones first.
        folder: for results, logs and temporary files.
        workers: processes at a time; those of cases with a `lock` train one after the other.
        limit_s: seconds after which no further case is started; running ones get as long as `CASE_LIMIT_S`.
        needed_gib: memory that a case needs on the GPU.
        total_gib: memory that all running cases may need together; a case that needs more runs alone.
        note: called with each new result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(folder / "results.jsonl")
    waiting = results.missing(cases)
    deadline = time.monotonic() + limit_s
    fork = import_stack()
    running: dict[int, Running] = {}
    try:
        while running or (waiting and time.monotonic() < deadline):
            while waiting and len(running) < workers and time.monotonic() < deadline:
                used = sum(needed_gib(one.case) for one in running.values())
                fitting = [case for case in waiting if not running or used + needed_gib(case) <= total_gib]
                if not fitting:
                    break
                case = fitting[0]
                waiting.remove(case)
                started = Running(case, folder / case.name, time.monotonic())
                running[_start(started, fork=fork)] = started
            for pid, ended, error in _ended(running):
                result = _collect(ended, error)
                del running[pid]
                results.add(result)
                note(result)
            time.sleep(0.05)
    finally:
        for pid in running:
            _kill(pid)
    return results.read()


def import_stack() -> bool:
    """Import NeMo and Transformer Engine in this process; return whether forked processes can use the GPU afterwards.

    Forks cannot use CUDA if it was initialized here, as Transformer Engine 2.9 does when it is imported, to read the
    compute capability (dot_product_attention/backends.py:83). It is read through NVML instead.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    if not torch.cuda.is_available():
        import superpod.rehearsal.entry  # noqa: F401 - applies the patches, before NeMo is imported

        _import_modules()
        return True
    import torch._dynamo.device_interface

    properties = _device_properties()
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        import transformer_engine.pytorch  # type: ignore[reportMissingImports]  # noqa: F401
    _import_modules()
    return not torch.cuda.is_initialized() and _fork_can_use_gpu()


def _import_modules() -> None:
    import nemo.collections.llm  # noqa: F401

    import superpod.nemo2.build.partial
    import superpod.nemo2.validation
    import superpod.requests.resolve  # noqa: F401


def _device_properties() -> SimpleNamespace:
    import pynvml  # type: ignore[reportMissingImports] - nvidia-ml-py, which torch requires on GPUs

    pynvml.nvmlInit()
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    return SimpleNamespace(major=major, minor=minor)


def _fork_can_use_gpu() -> bool:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            import torch

            torch.zeros(1, device="cuda")
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return status == 0


def _start(running: Running, *, fork: bool) -> int:
    """Start a process that trains the case, with its output in `folder/output.log`; return its process ID."""
    running.folder.mkdir(parents=True, exist_ok=True)
    arguments = [_key(running.case), str(running.folder)]
    with (running.folder / "output.log").open("w") as log:
        if not fork:
            command = [sys.executable, "-m", cases_module.__name__, *arguments]
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True).pid
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            cases_module.main(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)  # without the exit handlers of the parent; the result file has the error


def _ended(running: dict[int, Running]) -> list[tuple[int, Running, str]]:
    """Return the cases that have ended, with an error if the process was killed or hung."""
    ended = []
    for pid, one in running.items():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            signaled = os.WIFSIGNALED(status)
            ended.append((pid, one, f"killed by signal {os.WTERMSIG(status)}" if signaled else ""))
        elif time.monotonic() - one.started > CASE_LIMIT_S:
            _kill(pid)
            ended.append((pid, one, f"hung: no result after {CASE_LIMIT_S:.0f} s"))
    return ended


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _collect(ended: Running, error: str) -> dict[str, Any]:
    file = ended.folder / RESULT
    result = json.loads(file.read_text()) if file.is_file() else {}
    result["case"] = dataclasses.asdict(ended.case)
    if error:
        result["error"] = error
    result["process_s"] = time.monotonic() - ended.started
    return result
