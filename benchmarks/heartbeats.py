"""Measure the cost of heartbeats for a shared folder and the first node.

python benchmarks/heartbeats.py [--nodes 2048] [--ranks 8] [--seconds 60] [--limit 60] [--folder DIR]

One process per core drives the `Heartbeat` of its ranks, with a memory folder per node; every rank makes a step per
second. Then one rank stops, and the others wait for it. This process polls like `attempt.py`. Every call on a file of
the shared folder is counted: open, fstat, read, write, close. The exit code is 1 if a target is missed.
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
"""Interval at which runtime/attempts/attempt.py polls the stall detector, which seldom reads files."""


@dataclass
class Job:
    """The simulated job and its folders."""

    folder: Path
    nodes: int
    ranks: int
    seconds: float
    limit_s: float
    memory: Path
    counts: DictProxy[str, float] = field(repr=False)
    """Calls on the shared folder by process; `late`: seconds by which the slowest process is behind."""
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
        figures, status_s = measure(job)
    finally:
        shutil.rmtree(job.memory, ignore_errors=True)
        shutil.rmtree(job.folder, ignore_errors=True)
    every_s = write_every_s(job.limit_s, job.nodes)
    print(
        f"{job.nodes:,} nodes x {job.ranks} ranks, {os.cpu_count()} processes; a node writes every {every_s:.1f} s, ",
        end="",
    )
    print(f"the limit is {job.limit_s:.0f} s")
    return print_table(job, figures, status_s)


def parse() -> Job:
    """Create the job from the command line."""
    parser = argparse.ArgumentParser(description="Measure the cost of heartbeats.")
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--limit", type=float, default=60, help="seconds without a step after which a run is stalled")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder on the shared file system")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="heartbeats-", dir=options.folder))
    memory = Path(tempfile.mkdtemp(prefix="heartbeats-", dir=node_board.shared_memory_folders()[0]))
    counts = multiprocessing.Manager().dict()
    return Job(folder, options.nodes, options.ranks, options.seconds, options.limit, memory, counts)


@dataclass
class Figures:
    """The measured figures."""

    calls_s: float = 0.0
    """Calls per second on the shared folder, of all processes."""
    look_s: float = 0.0
    """Seconds of the longest poll."""
    core: float = 0.0
    """Share of a core that polling used."""
    named_s: float | None = None
    """Seconds from the last step of all ranks until the stopped rank was reported; None = it was not."""
    message: str = ""
    """The message that reports the stopped rank."""
    late_s: float = 0.0
    """Seconds by which the slowest process was behind."""


def measure(job: Job) -> tuple[Figures, float]:
    """Drive and poll the heartbeats; return the figures and the seconds of `recipes status`."""
    run, attempt = new_run(job)
    job.began = time.time() + 5 + job.nodes * job.ranks / 4000  # until every process has created its ranks
    drivers = start_drivers(job, attempt)
    figures = watch(job, stall.StallDetector(attempt, job.limit_s, job.began).check, attempt.path)
    for driver in drivers:
        driver.terminate()
        driver.join()
    figures.late_s = job.counts.get("late", 0)
    return figures, max(status(run) for _ in range(3))


def new_run(job: Job) -> tuple[RunFolder, Attempt]:
    """Create a run in progress, for `recipes status`."""
    facts = {"max_steps": 1000, "stalled_s": job.limit_s, "nodes": job.nodes, "gpus_per_node": job.ranks}
    run = RunFolder.create(job.folder, "simulated", facts=facts, recipe_lines=[])
    for step in range(1, 1001):
        append_line(
            run.path / "metrics.jsonl", {"t": 1.0, "attempt": "001", "step": step, "loss": 2.0, "step_time_s": 1.0}
        )
    attempt = run.new_attempt(job="1")
    attempt.mark("running", nodes=[f"node{i}" for i in range(job.nodes)])
    return run, attempt


def start_drivers(job: Job, attempt: Attempt) -> list[multiprocessing.Process]:
    """Start a process per core that drives ranks."""
    cores = os.cpu_count() or 1
    drivers = [
        multiprocessing.Process(target=drive_ranks, args=(job, attempt.path, i, cores), daemon=True)
        for i in range(cores)
    ]
    for driver in drivers:
        driver.start()
    return drivers


def drive_ranks(job: Job, attempt: Path, core: int, cores: int) -> None:
    """Drive the ranks of every `cores`-th node: a step and a tick per second, like a rank's training and its thread."""
    os.nice(9)  # the first node has its own cores
    calls = count_calls(job.folder)
    ranks = [rank for node in range(core, job.nodes, cores) for rank in create_heartbeats(job, attempt, node)]
    time.sleep(max(0.0, job.began - time.time()))
    for second in seconds_from(job):
        for rank in ranks:
            if second < job.seconds:
                rank.beat(second, "train", allocated_gib=61.25, reserved_gib=70.5)
            elif rank.rank == job.victim:
                continue  # its process is stopped
            rank.tick(time.time())
        record(job, core, second, calls[0])


def create_heartbeats(job: Job, attempt: Path, node: int) -> list[Heartbeat]:
    """Create the heartbeats of a node, with its own host name and memory folder."""
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
    """Return the seconds of a process of `recipes status`."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "superpod.cli", "status", str(run.path)], check=True, capture_output=True)
    return time.perf_counter() - begin


def count_calls(shared: Path) -> list[int]:
    """Start counting this process's calls on files of the shared folder; return [number of calls], which grows."""
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
    """Yield the seconds since the start of the job, each when it is reached."""
    second = 0
    while True:
        time.sleep(max(0.0, job.began + second - time.time()))
        yield second
        second += 1


def record(job: Job, core: int, second: int, calls: int) -> None:
    """Record the number of calls during the measurement, and how many seconds this process is behind."""
    if second < job.seconds:
        job.counts[f"calls {core}"] = calls
        job.counts["late"] = max(job.counts.get("late", 0), time.time() - job.began - second - 1)


def watch(job: Job, look: Callable[[], str | None], attempt: Path) -> Figures:
    """Poll every second until a rank is reported; return the longest poll and the cost during the measurement."""
    figures, calls = Figures(), count_calls(attempt)
    time.sleep(max(0.0, job.began - time.time()))
    used, last = time.process_time(), job.began + job.seconds - 1
    while not figures.message and time.time() < last + 3 * job.limit_s:
        begin = time.perf_counter()
        figures.message = look() or ""
        figures.look_s = max(figures.look_s, time.perf_counter() - begin)
        if time.time() < job.began + job.seconds:
            figures.core = (time.process_time() - used) / (time.time() - job.began)
            figures.calls_s = calls[0] / job.seconds
        time.sleep(POLL_S)
    figures.calls_s += sum(n for name, n in job.counts.items() if name != "late") / job.seconds
    beats = heartbeat_pages.read(attempt / "heartbeat") or {}
    if figures.message:
        figures.named_s = time.time() - POLL_S - max(beat["moved"] for beat in beats.values())
    return figures


def print_table(job: Job, figures: Figures, status_s: float) -> int:
    """Print the figures and their targets; return 1 if a target is missed."""
    named = "not named" if figures.named_s is None else f"{figures.named_s:.1f} s"
    is_named = f"rank {job.victim} on node{job.victim // job.ranks} " in figures.message
    within = is_named and figures.named_s is not None and figures.named_s <= job.limit_s + POLL_S + 0.5
    rows = [
        ("calls per second on the shared folder", f"{figures.calls_s:,.0f}", f"<= {job.nodes / 10:,.0f}",
         figures.calls_s <= job.nodes / 10),
        ("one poll of the first node", f"{figures.look_s:.3f} s", f"< {LOOK_S} s", figures.look_s < LOOK_S),
        ("its share of a core", f"{figures.core:.2%}", f"< {CORE:.0%}", figures.core < CORE),
        ("status, the complete process", f"{status_s:.2f} s", f"< {STATUS_S:g} s", status_s < STATUS_S),
        ("a stopped rank is named after", named, f"{job.limit_s:.0f} s + a poll of {POLL_S:.0f} s", within),
    ]  # fmt: skip
    for what, figure, target, met in rows:
        print(f"{what:<38}{figure:>14}   target {target:<22}{'met' if met else 'MISSED'}")
    print(f"named: {figures.message or 'nobody'}; the slowest driver was {max(0.0, figures.late_s):.1f} s behind")
    return 0 if all(met for *_, met in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
