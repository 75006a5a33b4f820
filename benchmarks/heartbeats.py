"""The cost of heartbeats for a shared folder and the first node, compared with one file per rank.

python benchmarks/heartbeats.py [--nodes 2048] [--ranks 8] [--seconds 60] [--limit 60] [--folder DIR]

One process a core drives the ranks' own `Heartbeat`s, each node with a memory folder of its own; every rank makes a
step a second. Then one rank stops, and the others wait for it. This process watches as `attempt.py` does. Counted
is every call on a file of the shared folder: open, fstat, read, write, close. Exit 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.managers import DictProxy
from pathlib import Path

from superpod.common.json_files import append_line
from superpod.runtime.heartbeat import heartbeat_pages, node_board, stall
from superpod.runtime.heartbeat.heartbeat import LIMIT, Heartbeat, locate_rank, write_every_s
from superpod.runtime.runs.run_folder import Attempt, RunFolder

LOOK_S, CORE, STATUS_S = 0.5, 0.02, 2.0
POLL_S = 1.0
"""as often as runtime/attempts/attempt.py asks its watch, which mostly answers without a look"""

OLD_SECONDS = 20


@dataclass
class Job:
    """What is simulated, and where."""

    folder: Path
    nodes: int
    ranks: int
    seconds: float
    limit_s: float
    memory: Path
    counts: DictProxy[str, float] = field(repr=False)
    """calls on the shared folder by process; `late`: seconds that the slowest process fell behind"""
    began: float = 0.0

    @property
    def victim(self) -> int:
        """The rank that stops."""
        return self.nodes * self.ranks * 5 // 16 + 3


def main() -> int:
    job = parse()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * job.nodes * job.ranks)), hard))
    os.environ[LIMIT] = str(job.limit_s)
    try:
        new, status_s = a_page_a_node(job)
        old = a_file_a_rank(job)
    finally:
        shutil.rmtree(job.memory, ignore_errors=True)
        shutil.rmtree(job.folder, ignore_errors=True)
    every_s = write_every_s(job.limit_s, job.nodes)
    print(
        f"{job.nodes:,} nodes x {job.ranks} ranks, {os.cpu_count()} processes; a node writes every {every_s:.1f} s, ",
        end="",
    )
    print(f"the limit is {job.limit_s:.0f} s")
    return print_table(job, new, status_s, old)


def parse() -> Job:
    """The command line."""
    parser = argparse.ArgumentParser(description="The cost of heartbeats, compared with one file per rank.")
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--limit", type=float, default=60, help="seconds without a step that make a stall")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder of the shared file system")
    words = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="heartbeats-", dir=words.folder))
    memory = Path(tempfile.mkdtemp(prefix="heartbeats-", dir=node_board.shared_memory_folders()[0]))
    counts = multiprocessing.Manager().dict()
    return Job(folder, words.nodes, words.ranks, words.seconds, words.limit, memory, counts)


@dataclass
class Figures:
    """What was measured."""

    calls_s: float = 0.0
    """calls on the shared folder a second, of all processes"""
    look_s: float = 0.0
    """the longest look"""
    core: float = 0.0
    """share of a core that the watcher took"""
    named_s: float | None = None
    """seconds from the last step of all to the name of the rank that stopped"""
    words: str = ""
    late_s: float = 0.0


# -- one page per node -----------------------------------------------------------------------------------------------


def a_page_a_node(job: Job) -> tuple[Figures, float]:
    """Drive and watch today's heartbeats; the figures, and the seconds of `recipes status`."""
    run, attempt = new_run(job)
    job.began = time.time() + 5 + job.nodes * job.ranks / 4000  # until every process has made its ranks
    drivers = start(job, attempt, drive_pages)
    figures = watch(job, stall.StallDetector(attempt, job.limit_s, job.began).check, attempt.path)
    for driver in drivers:
        driver.terminate()
        driver.join()
    figures.late_s = job.counts.get("late", 0)
    return figures, max(status(run) for _ in range(3))


def new_run(job: Job) -> tuple[RunFolder, Attempt]:
    """A run that is under way, as `recipes status` would show it."""
    facts = {"max_steps": 1000, "stalled_s": job.limit_s, "nodes": job.nodes, "gpus_per_node": job.ranks}
    run = RunFolder.create(job.folder, "simulated", facts=facts, recipe_lines=[])
    for step in range(1, 1001):
        append_line(
            run.path / "metrics.jsonl", {"t": 1.0, "attempt": "001", "step": step, "loss": 2.0, "step_time_s": 1.0}
        )
    attempt = run.new_attempt(job="1")
    attempt.mark("running", nodes=[f"node{i}" for i in range(job.nodes)])
    return run, attempt


def start(job: Job, attempt: Attempt, drive: Callable[..., None]) -> list[multiprocessing.Process]:
    """One process a core."""
    cores = os.cpu_count() or 1
    drivers = [
        multiprocessing.Process(target=drive, args=(job, attempt.path, i, cores), daemon=True) for i in range(cores)
    ]
    for driver in drivers:
        driver.start()
    return drivers


def drive_pages(job: Job, attempt: Path, core: int, cores: int) -> None:
    """The ranks of every `cores`-th node: a step and a tick a second, as a rank's training and thread do."""
    os.nice(9)  # the first node has cores of its own
    calls = count_calls(job.folder)
    ranks = [rank for node in range(core, job.nodes, cores) for rank in ranks_of(job, attempt, node)]
    time.sleep(max(0.0, job.began - time.time()))
    for second in seconds_from(job):
        for rank in ranks:
            if second < job.seconds:
                rank.beat(second, "train", allocated_gib=61.25, reserved_gib=70.5)
            elif rank.rank == job.victim:
                continue  # its process is stopped
            rank.tick(time.time())
        note(job, core, second, calls[0])


def ranks_of(job: Job, attempt: Path, node: int) -> list[Heartbeat]:
    """The heartbeats of a node, which has a name and a memory of its own."""
    memory = job.memory / str(node)
    memory.mkdir()
    node_board.shared_memory_folders = lambda: [memory]
    socket.gethostname = lambda: f"node{node}"
    size = job.ranks
    environ = {"GROUP_RANK": f"{node}", "LOCAL_WORLD_SIZE": f"{size}", "WORLD_SIZE": f"{size * job.nodes}"}
    ranks = range(node * size, (node + 1) * size)
    places = {rank: locate_rank(rank, environ | {"LOCAL_RANK": f"{rank % size}"}) for rank in ranks}
    return [Heartbeat(attempt / "heartbeat", rank, place=places[rank]) for rank in ranks]


def status(run: RunFolder) -> float:
    """Seconds of a whole `recipes status`."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "superpod.cli", "status", str(run.path)], check=True, capture_output=True)
    return time.perf_counter() - begin


# -- one file per rank, the earlier format ---------------------------------------------------------------------------


def a_file_a_rank(job: Job) -> Figures:
    """Drive and watch heartbeats as they were: each rank appends to its own file; all files are read every second."""
    attempt = RunFolder.create(job.folder, "before", facts={}, recipe_lines=[]).new_attempt(job="1")
    job.began, job.seconds = time.time() + 5, OLD_SECONDS
    job.counts.clear()
    drivers = start(job, attempt, drive_files)
    time.sleep(job.began + job.seconds - time.time())
    for driver in drivers:
        driver.terminate()
        driver.join()
    begin = time.perf_counter()
    stall.StallDetector(attempt, job.limit_s, job.began).check()
    look_s = time.perf_counter() - begin
    calls = sum(n for name, n in job.counts.items() if name != "late")
    looks = 4 * job.nodes * job.ranks / max(look_s, POLL_S)  # the watcher's open, seek, read and close a file
    late_s = job.counts.get("late", 0)
    return Figures(calls / (job.seconds + late_s) + looks, look_s, min(1.0, look_s / POLL_S), late_s=late_s)


def drive_files(job: Job, attempt: Path, core: int, cores: int) -> None:
    """What every rank's training did: a line a second."""
    os.nice(9)
    calls = count_calls(job.folder)
    time.sleep(max(0.0, job.began - time.time()))
    for second in seconds_from(job):
        for rank in range(core, job.nodes * job.ranks, cores):
            line = {"t": time.time(), "step": second, "phase": "train", "host": "node", "allocated_gib": 61.25}
            append_line(attempt / "heartbeat" / f"{rank}.jsonl", line)
        note(job, core, second, calls[0])


# -- measuring -------------------------------------------------------------------------------------------------------


def count_calls(shared: Path) -> list[int]:
    """Count the calls of this process on files of the shared folder from now on."""
    calls, handles = [0], set()
    real_open = os.open

    def opened(path: os.PathLike[str] | str, *args: int, **more: int) -> int:
        handle = real_open(path, *args, **more)
        if str(path).startswith(str(shared)):
            handles.add(handle)
            calls[0] += 1
        return handle

    def counting(real: Callable[..., object]) -> Callable[..., object]:
        def call(handle: int, *args: object) -> object:
            if handle in handles:
                calls[0] += 1
                if real is real_close:
                    handles.discard(handle)
            return real(handle, *args)

        return call

    real_close = os.close
    os.open = opened
    for name in ("pwrite", "write", "pread", "read", "fstat", "ftruncate", "close"):
        setattr(os, name, counting(getattr(os, name)))
    return calls


def seconds_from(job: Job) -> Iterator[int]:
    """Seconds since the beginning, one after the other, each not before its time."""
    second = 0
    while True:
        time.sleep(max(0.0, job.began + second - time.time()))
        yield second
        second += 1


def note(job: Job, core: int, second: int, calls: int) -> None:
    """Leave the count of the measured time, and how far this process is behind."""
    if second < job.seconds:
        job.counts[f"calls {core}"] = calls
        job.counts["late"] = max(job.counts.get("late", 0), time.time() - job.began - second - 1)


def watch(job: Job, look: Callable[[], str | None], attempt: Path) -> Figures:
    """Ask for a look every second until a rank is named; the longest look and the cost of the measured time."""
    figures, calls = Figures(), count_calls(attempt)
    time.sleep(max(0.0, job.began - time.time()))
    used, last = time.process_time(), job.began + job.seconds - 1
    while not figures.words and time.time() < last + 3 * job.limit_s:
        begin = time.perf_counter()
        figures.words = look() or ""
        figures.look_s = max(figures.look_s, time.perf_counter() - begin)
        if time.time() < job.began + job.seconds:
            figures.core = (time.process_time() - used) / (time.time() - job.began)
            figures.calls_s = calls[0] / job.seconds
        time.sleep(POLL_S)
    figures.calls_s += sum(n for name, n in job.counts.items() if name != "late") / job.seconds
    beats = heartbeat_pages.read(attempt / "heartbeat") or {}
    if figures.words:
        figures.named_s = time.time() - POLL_S - max(beat["moved"] for beat in beats.values())
    return figures


def print_table(job: Job, new: Figures, status_s: float, old: Figures) -> int:
    """The figures beside those of before, and the targets; 1 when one is missed."""
    behind = f" ({old.late_s:.0f} s behind)" if old.late_s > 1 else ""
    named = "not named" if new.named_s is None else f"{new.named_s:.1f} s"
    is_named = f"rank {job.victim} on node{job.victim // job.ranks} " in new.words
    within = is_named and new.named_s is not None and new.named_s <= job.limit_s + POLL_S + 0.5
    rows = [
        ("calls per second on the shared folder", f"{new.calls_s:,.0f}", f"{old.calls_s:,.0f}{behind}",
         f"<= {job.nodes / 10:,.0f}", new.calls_s <= job.nodes / 10),
        ("one poll of the first node", f"{new.look_s:.3f} s", f"{old.look_s:.1f} s", f"< {LOOK_S} s",
         new.look_s < LOOK_S),
        ("its share of a core", f"{new.core:.2%}", f"{old.core:.0%}", f"< {CORE:.0%}", new.core < CORE),
        ("status, the whole process", f"{status_s:.2f} s", "", f"< {STATUS_S:g} s", status_s < STATUS_S),
        ("a stopped rank is named after", named, "", f"{job.limit_s:.0f} s + a poll of {POLL_S:.0f} s", within),
    ]  # fmt: skip
    print(f"{'':<35}{'one page per node':>17}{'one file per rank':>26}   target")
    for what, now, before, target, met in rows:
        print(f"{what:<38}{now:>14}{before:>26}   {target:<26}{'met' if met else 'MISSED'}")
    print(f"named: {new.words or 'nobody'}; the slowest driver was {max(0.0, new.late_s):.1f} s behind")
    return 0 if all(met for *_, met in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
