"""Trains many recipes for a few steps on one GPU, each in its own process, and appends the results to one file.

The processes are forked after NeMo has been imported, which takes up to a minute. A run can be interrupted: cases whose
result is in the file are not trained again, unless the recipe or the installed versions have changed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.common.json_files import append_line, read_json, read_lines
from superpod.rehearsal.on_gpu.case import RESULT, Case
from superpod.rehearsal.on_gpu.case import main as train_case
from superpod.requests import subject
from superpod.runtime.processes import forked
from superpod.runtime.processes.attempt_processes import kill_group
from superpod.runtime.runs import versions

CASE_MODULE = "superpod.rehearsal.on_gpu.case"
CASE_LIMIT_S = 600.0
"""Seconds after which a case counts as hung, including the time for which an exclusive case waits for its turn."""


@dataclass(frozen=True)
class Running:
    """The process of a case that is being trained."""

    case: Case
    folder: Path
    started: float
    """Time of the monotonic clock in seconds."""


def identify(case: Case) -> dict[str, Any]:
    """Return the inputs of a case's result: {"case": ..., "facts": digest of the recipe, "versions": ...}."""
    facts = ""
    if subject.subject_kind(case.recipe) == "recipe" and case.recipe in registry.recipes():
        recipe = registry.find(case.recipe)
        facts = proof_level.facts(recipe, case.nodes or recipe.nodes[0])
    fields = dataclasses.asdict(case) | {"overrides": list(case.overrides)}
    return {"case": fields, "facts": facts, "versions": versions.versions()}


def run_cases(
    cases: Iterable[Case],
    folder: Path,
    *,
    workers: int = 1,
    limit_s: float = math.inf,
    needed_gib: Callable[[Case], float] = lambda _: 0.0,
    total_gib: float = math.inf,
    note: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Train the cases that have no result yet in `folder/results.jsonl`; return the results of all cases that have one.

    Args:
        cases: the cases, the most informative ones first.
        folder: folder for results, logs and temporary files.
        workers: maximum number of processes; exclusive cases prepare in parallel, but train one after the other.
        limit_s: seconds after which no further case is started; running cases may take up to `CASE_LIMIT_S`.
        needed_gib: function that returns the GPU memory in GiB that a case needs.
        total_gib: GPU memory in GiB for all running cases together; a case that needs more runs alone.
        note: called with each new result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    case_ids = {case: identify(case) for case in cases}
    known_lines = read_lines(file)
    results: dict[Case, dict[str, Any]] = {}
    for case, inputs in case_ids.items():
        for result in known_lines:
            if all(result.get(name) == value for name, value in inputs.items()):
                results[case] = result
    waiting_cases = [case for case in case_ids if case not in results]
    deadline = time.monotonic() + limit_s
    fork = bool(waiting_cases) and import_nemo_and_te()
    running: dict[int, Running] = {}
    try:
        while running or (waiting_cases and time.monotonic() < deadline):
            while waiting_cases and len(running) < workers and time.monotonic() < deadline:
                used_gib = sum(needed_gib(process.case) for process in running.values())
                fitting_cases = [
                    case for case in waiting_cases if not running or used_gib + needed_gib(case) <= total_gib
                ]
                if not fitting_cases:
                    break
                process = Running(fitting_cases[0], folder / fitting_cases[0].folder, time.monotonic())
                waiting_cases.remove(process.case)
                running[_start(process, fork=fork)] = process
            for pid, error in _find_ended(running):
                process = running.pop(pid)
                result = case_ids[process.case] | _collect(process, error)
                append_line(file, result)
                results[process.case] = result
                note(result)
            time.sleep(0.05)
    finally:
        for pid in running:
            _kill(pid)
    return [results[case] for case in case_ids if case in results]


def import_nemo_and_te() -> bool:
    """Import NeMo and Transformer Engine in this process; return whether forked processes can use the GPU afterwards.

    They cannot if CUDA is initialized here. Importing Transformer Engine 2.9 would initialize CUDA to read the compute
    capability (dot_product_attention/backends.py:83), which is read through NVML instead.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    if not torch.cuda.is_available():
        import superpod.rehearsal.entry  # noqa: F401 - applies the patches, before NeMo is imported

        _import_modules()
        return True
    # Imported before the functions are replaced: torch.compile would keep references to the replacements.
    import torch._dynamo.device_interface

    properties = _device_properties()
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        import transformer_engine.pytorch  # type: ignore[reportMissingImports]  # noqa: F401
    _import_modules()
    if torch.cuda.is_initialized():
        return False
    _, status = os.waitpid(forked.fork(_use_gpu), 0)
    return status == 0


def _import_modules() -> None:
    import nemo.collections.llm  # noqa: F401

    import superpod.nemo2.build.partial
    import superpod.nemo2.validation
    import superpod.requests.resolve  # noqa: F401


def _device_properties() -> SimpleNamespace:
    """Return the compute capability of GPU 0 (`major`, `minor`), without initializing CUDA."""
    import pynvml  # type: ignore[reportMissingImports] - nvidia-ml-py, which torch requires on GPUs

    pynvml.nvmlInit()
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    return SimpleNamespace(major=major, minor=minor)


def _use_gpu() -> None:
    import torch

    torch.zeros(1, device="cuda")


def _start(process: Running, *, fork: bool) -> int:
    """Start a process that trains the case: a fork of this one, or a new Python process. Return its process ID."""
    shutil.rmtree(process.folder, ignore_errors=True)  # files of an interrupted run
    process.folder.mkdir(parents=True)
    arguments = [process.case.key, str(process.folder)]
    log = process.folder / "output.log"
    if fork:
        return forked.fork(functools.partial(_train_in_session, arguments, log))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    outputs = [(os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644), (os.POSIX_SPAWN_DUP2, 1, 2)]
    command = [sys.executable, "-m", CASE_MODULE, *arguments]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=outputs, setsid=True)


def _train_in_session(arguments: list[str], log: Path) -> None:
    os.setsid()
    forked.redirect_output(log)
    train_case(arguments)


def _find_ended(running: dict[int, Running]) -> list[tuple[int, str]]:
    """Return (process ID, error) of the processes that have ended or hang; the error is "" after exit code 0."""
    ended_processes = []
    for pid, process in running.items():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done and os.WIFSIGNALED(status):
            ended_processes.append((pid, f"killed by signal {os.WTERMSIG(status)}"))
        elif done:
            code = os.waitstatus_to_exitcode(status)
            ended_processes.append((pid, f"exited with code {code} without a result" if code else ""))
        elif time.monotonic() - process.started > CASE_LIMIT_S:
            _kill(pid)
            ended_processes.append((pid, f"hung: no result after {CASE_LIMIT_S:.0f} s"))
    return ended_processes


def _kill(pid: int) -> None:
    """Kill the process of a case, and the processes that it has started, for example by torch.compile."""
    kill_group(pid)
    os.kill(pid, signal.SIGKILL)  # in case it has not called setsid() yet
    os.waitpid(pid, 0)


def _collect(process: Running, error: str) -> dict[str, Any]:
    """Return the result that a process has written, with its duration and, if it is not "", the error."""
    result = read_json(process.folder / RESULT) or {"error": "the process wrote no result"}
    if error:
        result["error"] = error
    return result | {"process_s": time.monotonic() - process.started}
