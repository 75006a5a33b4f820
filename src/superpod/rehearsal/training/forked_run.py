"""Runs a recipe on ranks that are forked from this process, so that NeMo is imported only once.

Each rank deserializes the recipe as a torchrun child process of nemo_run does, then builds and calls it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common import cpu_threads
from superpod.common.units import format_ranks
from superpod.rehearsal.patches.adapters import initialize_independently_of_layout
from superpod.rehearsal.training.rank_record import RankRecord
from superpod.runtime.heartbeat import stall
from superpod.runtime.processes import watchdog
from superpod.runtime.processes.attempt_processes import kill_group, send
from superpod.runtime.processes.forked import fork, redirect_output
from superpod.runtime.rank import rank_monitor
from superpod.runtime.runs.run_folder import Attempt

if TYPE_CHECKING:
    from nemo_run import Partial

LIMIT_S = 300.0
"""Seconds after which a rank that has not started to train counts as hung. A run has twice as long to end."""
QUIET_S = 180.0
"""Seconds without a completed step after which a rank counts as hung."""
RANK_GIB = 0.4
"""Memory of a forked rank in GiB, excluding imported modules, which it shares with its parent."""


def available_gib() -> float:
    """Return the available memory of this machine in GiB."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 2**20


@dataclass
class FinishedRun:
    """A run of a rehearsal that has ended, with or without an error."""

    name: str
    seconds: float
    """Duration of the run."""
    ranks: list[RankRecord] = field(default_factory=list)
    """The record that each rank's `Recorder` wrote; empty if there was an error."""
    error: str = ""
    """The first rank that failed or hung, with the reason; "" if there was none."""
    began: float = 0.0
    """Unix time of the start in seconds."""

    @property
    def losses(self) -> list[float]:
        """The loss of every step, from rank 0."""
        return self.ranks[0]["losses"] if self.ranks else []

    @property
    def grad_norms(self) -> list[float]:
        """The gradient norm of every step before clipping, from rank 0."""
        return self.ranks[0]["grad_norms"] if self.ranks else []


def run(
    name: str, partial: Partial, folder: Path, ranks: int, limit_s: float = LIMIT_S, quiet_s: float = QUIET_S
) -> FinishedRun:
    """Train a recipe on forked ranks, and return their records or the first error.

    Args:
        name: name of the run.
        partial: the recipe from `rehearse`, with a `Recorder` that writes to `folder`.
        folder: folder for logs, records and heartbeats.
        ranks: number of processes.
        limit_s: seconds without the start of training after which a rank counts as hung (`LIMIT_S`).
        quiet_s: seconds without a completed step after which a rank counts as hung (`QUIET_S`).
    """
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    folder.mkdir(parents=True, exist_ok=True)
    text = ZlibJSONSerializer().serialize(partial)
    began = time.time()
    pids: dict[int, int] = {}
    with watchdog.run_watchdog() as watching:
        try:
            for rank in range(ranks):
                pid = fork(functools.partial(_run_rank, rank, ranks, text, folder))
                pids[pid] = rank
                watching.add_group(pid)
            error = _wait(dict(pids), folder, began, limit_s, quiet_s)
        finally:
            for pid in pids:
                _end_session(pid)
    seconds = time.time() - began
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    missing_ranks = [rank for rank, file in enumerate(files) if not file.is_file()]
    if missing_ranks and not error:
        error = f"rank {missing_ranks[0]} exited without a record"
    records = [] if error else [json.loads(file.read_text()) for file in files]
    return FinishedRun(name, seconds, records, error, began)


def _run_rank(rank: int, ranks: int, text: str, folder: Path) -> None:
    become_rank(rank, ranks, folder)
    _train(text, folder, ranks)


def become_rank(rank: int, ranks: int, folder: Path) -> None:
    """Give this process its own session, a log `{folder}/{rank}.log`, and torchrun's variables for `rank`."""
    os.setsid()  # so that the processes that the rank starts can be killed with it (`_end_session`)
    redirect_output(folder / f"{rank}.log")
    os.environ.update(_torchrun_environment(rank, ranks))


def _train(text: str, folder: Path, ranks: int) -> None:
    """Deserialize the recipe in `text` (nemo_run's ZlibJSON), build it and train."""
    import fiddle as fdl
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer
    from torch.distributed import FileStore  # type: ignore[reportPrivateImportUsage]
    from torch.jit._fuser import optimized_execution

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _avoid_manager_process()
    initialize_independently_of_layout()
    recipe = ZlibJSONSerializer().deserialize(text)
    is_monitored = rank_monitor.prepare(getattr(getattr(recipe, "trainer", None), "callbacks", None) or [], folder)
    call = fdl.build(recipe)
    # The ranks rendezvous with a file: a free port could be taken before rank 0 listens on it.
    call.keywords["trainer"].strategy.store = FileStore(str(folder / "store"), ranks)
    # From the second call on, TorchScript rounds the gradient of GELU differently, so that a resumed run would differ
    # from the uninterrupted one.
    with optimized_execution(False), rank_monitor.run_monitor(folder) if is_monitored else contextlib.nullcontext():
        call()


def _avoid_manager_process() -> None:
    """Collect the results of Megatron's checkpoint writers in this process.

    Megatron (dist_checkpointing/strategies/filesystem_async.py) starts a process for them that imports torch, which
    takes seconds per rank. A rehearsal saves synchronously, so a queue in this process is sufficient.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    getattr(filesystem_async, "_results_queue")  # noqa: B009 - fails if a later Megatron renames it
    filesystem_async._results_queue = queue.Queue()


def _torchrun_environment(rank: int, ranks: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank, and its number of threads."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        cpu_threads.THREADS: "1",  # a shrunk model's GEMMs are too small to be divided among threads
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait(running_ranks: dict[int, int], folder: Path, start: float, limit_s: float, quiet_s: float) -> str:
    """Wait until all ranks ({process ID: rank}) have ended, or one fails or hangs; return the error, or ""."""
    next_check = start + 1
    while running_ranks:
        failure = _remove_ended(running_ranks, folder)
        if failure:
            return failure
        now = time.time()
        if now > next_check:
            next_check = now + 1
            silent = stall.silent_rank(Attempt(folder).heartbeats(), [], quiet_s, now - start, now, limit_s)
            if silent:
                return silent
            if now > start + 2 * limit_s:
                ranks = format_ranks(sorted(running_ranks.values()))
                return f"{ranks} did not end within {2 * limit_s:.0f} s"
        time.sleep(0.02)
    return ""


def _remove_ended(ranks: dict[int, int], folder: Path) -> str:
    """Remove the processes that have ended from `ranks` ({process ID: rank}); return the first error, or ""."""
    for pid in list(ranks):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        rank = ranks.pop(pid)
        if status and os.WIFSIGNALED(status):
            return f"rank {rank} was killed by signal {os.WTERMSIG(status)}"
        if status:
            return f"rank {rank} failed: {_last_error(folder / f'{rank}.log')}"
    return ""


def _last_error(log: Path) -> str:
    """Return the exception at the end of a rank's log, or the last line if there is no traceback."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        return "its log is empty"
    tracebacks = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
    if tracebacks:
        lines = [line for line in lines[tracebacks[-1] + 1 :] if not line.startswith(" ")] or lines[-1:]
        return lines[0][:500]
    return lines[-1][:500]


def _end_session(pid: int) -> None:
    """Kill a rank and the processes that it started; Megatron's checkpoint writers would otherwise wait forever."""
    kill_group(pid)
    send([pid], signal.SIGKILL)  # in case the rank has not called setsid() yet
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
