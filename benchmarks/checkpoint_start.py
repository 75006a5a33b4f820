"""Measure how long a job needs to select the checkpoint from which it resumes: 32,768 files, 1 ms per file-system call.

The checkpoint is like one of 16,384 ranks on 2,048 nodes (two files per rank, a part of the manifest per node), with
small files on the local disk. Each file-system call (open, fstat, stat, read, listing, close) takes a millisecond
longer. 64 nodes verify it: their shares run sequentially on this machine, and the result is the time of the slowest
plus that of the first node alone, without the one or two seconds in which Slurm starts a step. The exit code is 1 if
the time exceeds the target, a file is read more than once, or the decision is wrong.

    python -m benchmarks.checkpoint_start [--ranks 16384] [--nodes 64]
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.reports.runs import checkpoint_files as made

from superpod.runtime.checkpoints import manifest, resume, shared_reading
from superpod.runtime.checkpoints.saved_checkpoints import own_files

TARGET_S = 5.0
LATENCY_S = 1e-3
CALLS = ("open", "fstat", "stat", "lstat", "read", "pread", "preadv", "listdir", "scandir", "close", "readlink")
RANKS_PER_NODE = 8


class SlowFileSystem:
    """Delays every file-system call by LATENCY_S, and counts the calls by function and file."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.of_file: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.Lock()
        self._real = {name: getattr(os, name) for name in CALLS}
        self._open = io.open

    def __enter__(self) -> SlowFileSystem:
        for name, real in self._real.items():
            setattr(os, name, self._delay(name, real))
        io.open = self._delay("open", self._open)
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        io.open = self._open

    def _delay(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return `real` with a delay and a counter."""

        def delayed(*args: Any, **named: Any) -> Any:
            time.sleep(LATENCY_S)
            with self._lock:
                self.calls[name] += 1
                if args and isinstance(args[0], (str, Path)):
                    self.of_file[name, str(args[0])] += 1
            return real(*args, **named)

        return delayed


def write(folder: Path, ranks: int) -> None:
    """Write the checkpoint of `ranks` ranks, with its complete manifest."""
    made.write(folder, files=0, step=50)
    weights = folder / "weights"
    names = [f"__{rank}_{number}.distcp" for rank in range(ranks) for number in (0, 1)]
    for name in names:
        (weights / name).write_bytes(name.encode() * 20)
    sizes = {name: (weights / name).stat().st_size for name in names}
    tensors = {"decoder.weight": ((4, 6), [(4, 6)]), "optimizer.state.exp_avg": ((24,), [(24,)])}
    (weights / ".metadata").write_bytes(made.pickled(tensors, sizes))
    (weights / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    nodes = max(1, ranks // RANKS_PER_NODE)
    for node in range(nodes):
        rank = node * RANKS_PER_NODE
        files = own_files(folder, rank, RANKS_PER_NODE)
        manifest.write_part(folder, str(rank), files, parts=nodes if rank == 0 else 0)


class Nodes:
    """Replaces the job step with a task per node: runs the shares sequentially, and measures the time of each."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, nodes: int, command: list[str], limit_s: float) -> tuple[dict[int, list[str]], int | None]:
        checkpoint, shares, bytes_ = Path(command[2]), Path(command[3]), int(command[4])
        lines = {}
        for node in range(nodes):
            start = time.monotonic()
            own = shared_reading.read_share(shares, node)
            lines[node] = [json.dumps(shared_reading._check_here(checkpoint, own, bytes_))]
            self.seconds.append(time.monotonic() - start)
        return lines, 0


def measure(checkpoints: Path, reader: resume.Examine, files: int) -> tuple[float, bool]:
    """Print the calls of a decision, and return (its seconds, whether it is right and opened each file once)."""
    with SlowFileSystem() as slow:
        start = time.monotonic()
        decided = resume.newest_usable(checkpoints, reader)
        took = time.monotonic() - start
    shards = {key: count for key, count in slow.of_file.items() if key[1].endswith(".distcp")}
    most = max(shards.values(), default=0)
    calls = ", ".join(f"{count:,} {name}" for name, count in slow.calls.most_common())
    print(f"calls: {calls}; at most {most} open of a shard, and no stat besides its fstat")
    return took, decided.checkpoint is not None and decided.is_verified and most == 1 and len(shards) == files


def main() -> int:
    """Write the checkpoint, measure the decision and print it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--nodes", type=int, default=64, help="number of nodes that verify the checkpoint")
    options = parser.parse_args()
    files = 2 * options.ranks
    with tempfile.TemporaryDirectory(prefix="checkpoint_start-") as scratch:
        checkpoints = Path(scratch) / "checkpoints"
        write(checkpoints / "step=49-consumed_samples=400.0", options.ranks)
        nodes = Nodes()
        shared_reading.job_step.run_on_every_node = nodes
        names = [f"node{number}" for number in range(options.nodes)]
        took, is_right = measure(checkpoints, shared_reading.SharedReader(names, Path(scratch)), files)
        spread_s = took - sum(nodes.seconds) + max(nodes.seconds)
        print(
            f"{files:,} files, {LATENCY_S * 1e3:.0f} ms a call, {options.nodes} nodes: decided in {spread_s:.2f} s, "
            f"{max(nodes.seconds):.2f} s of these on the slowest node; target {TARGET_S:.0f} s"
        )
        alone_s, is_right_alone = measure(checkpoints, shared_reading.SharedReader(names[:1], Path(scratch)), files)
        print(f"one node alone: {alone_s:.2f} s; no target, such a checkpoint has thousands of nodes")
    is_good = is_right and is_right_alone and spread_s < TARGET_S
    print("ok" if is_good else "MISSED")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
