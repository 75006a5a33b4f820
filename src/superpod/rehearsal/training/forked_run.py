"""Runs of a recipe on ranks that are forked from this process: NeMo is imported once for all of them.

Each rank reads the recipe as nemo_run serializes it for a torchrun child, then builds and calls it.
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
from typing import TYPE_CHECKING

from superpod.common import cpu_threads
from superpod.rehearsal.patches.adapters import start_alike
from superpod.rehearsal.training.rank_record import RankRecord
from superpod.runtime.heartbeat import stall
from superpod.runtime.processes import watchdog
from superpod.runtime.processes.attempt_processes import kill_group, send
from superpod.runtime.rank import rank_monitor
from superpod.runtime.runs.run_folder import Attempt

if TYPE_CHECKING:
    from nemo_run import Partial

LIMIT_S = 300.0
"""A rank that has not begun to train after this time hangs; a run that takes twice as long does too."""
QUIET_S = 180.0
"""A rank that finishes no step for so long hangs."""
RANK_GIB = 0.4
"""Memory of a forked rank; it shares with its parent what NeMo's import left there."""


def available_gib() -> float:
    """Free memory of this machine, GiB."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 2**20


@dataclass
class FinishedRun:
    """A run that has ended, well or not."""

    name: str
    seconds: float
    ranks: list[RankRecord] = field(default_factory=list)
    """What each rank's `Recorder` wrote, by rank; empty if there was an error."""
    error: str = ""
    """The first rank that failed or hung, and why."""
    began: float = 0.0
    """Unix time."""

    @property
    def losses(self) -> list[float]:
        """The loss of every step, from rank 0."""
        return self.ranks[0]["losses"] if self.ranks else []

    @property
    def grad_norms(self) -> list[float]:
        """The gradients' norm of every step, before clipping, from rank 0."""
        return self.ranks[0]["grad_norms"] if self.ranks else []


def run(
    name: str, partial: Partial, folder: Path, ranks: int, limit_s: float = LIMIT_S, quiet_s: float = QUIET_S
) -> FinishedRun:
    """Run `partial`, a rehearsal with a `Recorder` that writes to `folder`, on so many forked ranks."""
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    folder.mkdir(parents=True, exist_ok=True)
    text = ZlibJSONSerializer().serialize(partial)
    began = time.time()
    pids: dict[int, int] = {}
    with watchdog.watching() as watching:
        try:
            for rank in range(ranks):
                pids[_fork(rank, ranks, text, folder)] = rank
                watching.add_group([*pids][-1])
            error = _wait(dict(pids), folder, began, limit_s, quiet_s)
        finally:
            for pid in pids:
                _end_session(pid)
    seconds = time.time() - began
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    missing = [rank for rank, file in enumerate(files) if not file.is_file()]
    if missing and not error:
        error = f"rank {missing[0]} ended and recorded nothing"
    records = [] if error else [json.loads(file.read_text()) for file in files]
    return FinishedRun(name, seconds, records, error, began)


def _fork(rank: int, ranks: int, text: str, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        become_rank(rank, ranks, folder)
        _train(text, folder, ranks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # neither the parent's exit handlers nor its stack may run in a fork


def become_rank(rank: int, ranks: int, folder: Path) -> None:
    """Make this fork a rank as torchrun starts one: its own session, its log `{folder}/{rank}.log`, its environment."""
    os.setsid()
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for output in (1, 2):
        os.dup2(log, output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(_torchrun_environment(rank, ranks))


def _train(text: str, folder: Path, ranks: int) -> None:
    import fiddle as fdl
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer
    from torch.distributed import FileStore  # type: ignore[reportPrivateImportUsage]
    from torch.jit._fuser import optimized_execution

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _report_writes_here()
    start_alike()
    recipe = ZlibJSONSerializer().deserialize(text)
    monitored = rank_monitor.prepare(getattr(getattr(recipe, "trainer", None), "callbacks", None) or [], folder)
    call = fdl.build(recipe)
    # The ranks meet at a file: a free port may be taken before rank 0 listens on it.
    call.keywords["trainer"].strategy.store = FileStore(str(folder / "store"), ranks)
    # From its second call on, TorchScript rounds the gradient of GELU differently: a resumed run would
    # then differ from the uninterrupted one.
    with optimized_execution(False), rank_monitor.within(folder) if monitored else contextlib.nullcontext():
        call()


def _report_writes_here() -> None:
    """Collect the reports of Megatron's checkpoint writers in this process.

    Megatron (dist_checkpointing/strategies/filesystem_async.py) starts a process for them, which imports torch: seconds
    for each rank. A rehearsal saves synchronously, so that the reports never leave this process.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    getattr(filesystem_async, "_results_queue")  # noqa: B009 - fails if a later Megatron has another name for it
    filesystem_async._results_queue = queue.Queue()


def _torchrun_environment(rank: int, ranks: int) -> dict[str, str]:
    """The variables that torchrun sets, and the threads of a rank."""
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


def _wait(running: dict[int, int], folder: Path, began: float, limit_s: float, quiet_s: float) -> str:
    """Wait until all ranks (`running`: {pid: rank}) have ended, or one fails or hangs; returns the fault, or ''."""
    next_look = began + 1
    while running:
        if failure := _first_failure(running, folder):
            return failure
        if (now := time.time()) > next_look:
            next_look = now + 1
            if silent := stall.silent_rank(Attempt(folder).heartbeats(), [], quiet_s, now - began, now, limit_s):
                return silent
            if now > began + 2 * limit_s:
                return f"ranks {', '.join(map(str, sorted(running.values())))} hang: no end in time"
        time.sleep(0.02)
    return ""


def _first_failure(running: dict[int, int], folder: Path) -> str:
    """Take the ranks that have ended out of `running`; says which of them failed and why."""
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        rank = running.pop(pid)
        if status and os.WIFSIGNALED(status):
            return f"rank {rank} was killed by signal {os.WTERMSIG(status)}"
        if status:
            return f"rank {rank} failed: {_last_error(folder / f'{rank}.log')}"
    return ""


def _last_error(log: Path) -> str:
    """The exception at the end of a rank's log, else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    tracebacks = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
    after = [line for line in lines[tracebacks[-1] + 1 :] if not line.startswith(" ")] if tracebacks else lines[-1:]
    return (after[0] if after else "its log is empty")[:500]


def _end_session(pid: int) -> None:
    """Kill a rank and the processes that it started: Megatron's checkpoint writers would wait for ever."""
    kill_group(pid)
    send([pid], signal.SIGKILL)  # a rank that has not reached setsid() yet
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
