"""Runs of a recipe on ranks that are forked from this process: NeMo is imported once for all of them.

A rank gets the recipe as nemo_run writes it for a torchrun child, reads it, builds it and calls it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superpod.node import stall
from superpod.node.run_folder import Attempt
from superpod.rehearsal.adapters import start_alike

LIMIT_S = 300.0
"""A run that takes longer than this hangs; so does a rank that has not begun to train by then."""
QUIET_S = 180.0
"""A rank that has come to no new step for so long hangs."""
RANK_GIB = 0.4
"""What a forked rank takes of its own: it shares what NeMo's import left in this process."""


def available_gib() -> float:
    """Memory that is free on this machine, GiB."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 2**20


@dataclass
class FinishedRun:
    """One run, ended."""

    name: str
    seconds: float
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """What each rank's `Witness` wrote, by rank; empty unless `error` is."""
    error: str = ""
    """The first rank that failed and why, or which hung first."""
    began: float = 0.0
    """Unix time."""

    @property
    def losses(self) -> list[float]:
        """Of every step, as rank 0 has them."""
        return self.ranks[0]["losses"] if self.ranks else []

    @property
    def grad_norms(self) -> list[float]:
        """Of every step, before clipping."""
        return self.ranks[0]["grad_norms"] if self.ranks else []


def run(
    name: str, partial: Any, folder: Path, ranks: int, limit_s: float = LIMIT_S, quiet_s: float = QUIET_S
) -> FinishedRun:
    """Run `partial`, a rehearsal with a `Witness` that writes to `folder`, on so many forked ranks."""
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    folder.mkdir(parents=True, exist_ok=True)
    text = ZlibJSONSerializer().serialize(partial)
    started = time.time()
    pids = {_fork(rank, ranks, text, folder): rank for rank in range(ranks)}
    try:
        error = _wait(dict(pids), folder, started, limit_s, quiet_s)
    finally:
        for pid in pids:
            _end_session(pid)
    seconds = time.time() - started
    if not error:
        files = [folder / f"{rank}.json" for rank in range(ranks)]
        missing = [rank for rank, file in enumerate(files) if not file.is_file()]
        error = f"rank {missing[0]} ended without a word" if missing else ""
    seen = [] if error else [json.loads(file.read_text()) for file in files]
    return FinishedRun(name, seconds, seen, error, started)


def _fork(rank: int, ranks: int, text: str, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    code = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(log, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(_environment(rank, ranks))
        _train(text, folder, ranks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(text: str, folder: Path, ranks: int) -> None:
    import fiddle as fdl
    import torch
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer
    from torch.distributed import FileStore  # type: ignore[reportPrivateImportUsage]

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _report_writes_here()
    start_alike()
    call = fdl.build(ZlibJSONSerializer().deserialize(text))
    # A file, because a port that was free may be taken by the time rank 0 listens on it.
    call.keywords["trainer"].strategy.store = FileStore(str(folder / "store"), ranks)
    # TorchScript rounds the gradient of GELU otherwise after its first call: a resumed run would not be the same.
    with torch.jit.optimized_execution(False):
        call()


def _report_writes_here() -> None:
    """Megatron starts a process to collect what its checkpoint writers report, which imports torch: seconds a rank.

    Where the saving is not asynchronous, as in a rehearsal, the reports never leave this process.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    getattr(filesystem_async, "_results_queue")  # noqa: B009 - fails where a later Megatron has it no more
    filesystem_async._results_queue = queue.Queue()


def _environment(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait(running: dict[int, int], folder: Path, began: float, limit_s: float, quiet_s: float) -> str:
    """Until all ranks have ended, one has failed, or one is silent; what went wrong."""
    asked = began
    while running:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            rank = running.pop(pid)
            if status and os.WIFSIGNALED(status):
                return f"rank {rank} was killed by signal {os.WTERMSIG(status)}"
            if status:
                return f"rank {rank} failed: {_last_words(folder / f'{rank}.log')}"
        if time.time() > asked + 1:
            asked = time.time()
            if silent := stall.first_silent(Attempt(folder), quiet_s, began, other_s=limit_s):
                return silent
            if asked > began + 2 * limit_s:
                return f"ranks {', '.join(map(str, sorted(running.values())))} hang: no end in time"
        time.sleep(0.02)
    return ""


def _last_words(log: Path) -> str:
    """The exception at the end of a rank's log."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ends = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
    after = [line for line in lines[ends[-1] + 1 :] if not line.startswith(" ")] if ends else lines[-1:]
    return (after[0] if after else "no words")[:500]


def _end_session(pid: int) -> None:
    """End a rank and what it has left behind: Megatron's checkpoint writers would wait for ever."""
    for kill in (os.killpg, os.kill):  # it may not lead its session yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
