"""A run that somebody looks at for long: every byte of its metrics is read once, and nothing is written."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from superpod.common.files import JsonObject, parse_lines, refuse_special
from superpod.runtime.runs.run_facts import METRICS, last_of_each_step, metrics
from superpod.runtime.runs.run_folder import RunFolder

HEAD_BYTES, TAIL_BYTES = 64 * 1024, 8 * 2**20
"""Of a file that has grown before: its beginning and its end are read. 8 MiB are some 30,000 steps."""
MOST_LINES = 60_000
"""Lines that are kept; of more, every other one of the older half goes."""
NEWEST = 300
"""Lines that `RunFolder.newest_metrics` has at about: 64 KiB of them."""


class MetricsFile:
    """The lines of a metrics.jsonl, read as it grows; a file that was replaced or cut is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[JsonObject] = []
        """as they were written: steps that a resumed run repeats too"""
        self.bytes_read = 0
        self.begun = 0
        """how often reading has begun at the start: the lines before it no longer count"""
        self._at, self._inode = 0, -1
        self._lock = threading.Lock()

    def look(self) -> bool:
        """Read what is new, whole lines only; whether there was any. A file that is gone or unreadable has nothing."""
        with self._lock:
            try:
                refuse_special(self.path)
                with open(self.path, "rb") as file:
                    return self._read(file.fileno())
            except OSError:
                changed = bool(self.lines)
                self._begin(-1)
                return changed

    def _begin(self, inode: int) -> None:
        self.begun += bool(self._at)
        self.lines, self._at, self._inode = [], 0, inode

    def _read(self, handle: int) -> bool:
        stat = os.fstat(handle)
        if stat.st_ino != self._inode or stat.st_size < self._at:
            self._begin(stat.st_ino)
        if stat.st_size == self._at:
            return False
        if not self._at and stat.st_size > HEAD_BYTES + TAIL_BYTES:
            self._take(os.pread(handle, HEAD_BYTES, 0))
            self._at = stat.st_size - TAIL_BYTES
            skipped = os.pread(handle, HEAD_BYTES, self._at)
            self._at += skipped.find(b"\n") + 1  # reading goes on at the begin of a line
        data = _read_from(handle, self._at, stat.st_size - self._at)
        end = data.rfind(b"\n") + 1  # a line that is being written waits
        self.bytes_read += len(data)
        self._take(data[:end])
        self._at += end
        return end > 0

    def _take(self, data: bytes) -> None:
        self.lines += metrics(parse_lines(data))
        while len(self.lines) > MOST_LINES:
            half = len(self.lines) // 2
            self.lines = [*self.lines[:100], *self.lines[100:half:2], *self.lines[half:]]


def _read_from(handle: int, at: int, count: int) -> bytes:
    parts = []
    while count and (part := os.pread(handle, count, at)):
        parts.append(part)
        at, count = at + len(part), count - len(part)
    return b"".join(parts)


@dataclass(frozen=True)
class FollowedRun(RunFolder):
    """A run folder whose metrics come from a `MetricsFile`, for whoever sums it up again and again."""

    file: MetricsFile = field(default_factory=lambda: MetricsFile(Path(os.devnull)), compare=False, repr=False)

    @classmethod
    def follow(cls, run: RunFolder) -> FollowedRun:
        """Begin to follow a run."""
        return cls(run.path, MetricsFile(run.path / METRICS))

    def metrics(self) -> list[JsonObject]:
        """As `RunFolder.metrics`; of a long run without lines of its middle."""
        self.file.look()
        return last_of_each_step(self.file.lines)

    def newest_metrics(self) -> list[JsonObject]:
        """As `RunFolder.newest_metrics`."""
        self.file.look()
        return self.file.lines[-NEWEST:]


def curve(lines: Sequence[JsonObject], key: str, most: int = 2000) -> list[tuple[int, float]]:
    """(step, value) of a field of `lines`; of more than `most`, means of neighbours, and the newest as it is.

    A mean stands at the last step of those that it is of.
    """
    points = [(line["step"], float(line[key])) for line in last_of_each_step(lines) if line.get(key) is not None]
    width = -(-len(points) // most)
    if width <= 1:
        return points
    groups = [points[i : min(i + width, len(points) - 1)] for i in range(0, len(points) - 1, width)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups] + [points[-1]]
