"""Monitors a run while it trains: each byte of its metrics is read once, and nothing is written."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from superpod.common.json_files import JsonObject, parse_lines, refuse_special
from superpod.runtime.runs.run_facts import METRICS, last_of_each_step, metrics
from superpod.runtime.runs.run_folder import RunFolder

HEAD_BYTES, TAIL_BYTES = 64 * 1024, 8 * 2**20
"""Bytes read at first from the beginning and the end of a large file; 8 MiB are about 30,000 steps."""
MAX_LINES = 60_000
"""Maximum number of lines in memory. Above it, every other line of the older half is dropped."""
MAX_NEWEST_LINES = 300
"""Maximum number of lines of `newest_metrics`."""


class MetricsFile:
    """The lines of a growing metrics.jsonl. A replaced or truncated file is read again from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[JsonObject] = []
        """in the order of writing, including the steps that a resumed run repeats"""
        self.bytes_read = 0
        self.begun = 0
        """number of restarts from the beginning, each of which discards earlier lines"""
        self._at, self._inode = 0, -1
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Read new complete lines, and return whether the lines have changed. An unreadable file has none."""
        with self._lock:
            try:
                refuse_special(self.path)
                with open(self.path, "rb") as file:
                    return self._read(file.fileno())
            except OSError:
                changed = bool(self.lines)
                self._restart(-1)
                return changed

    def _restart(self, inode: int) -> None:
        if self._at:
            self.begun += 1
        self.lines, self._at, self._inode = [], 0, inode

    def _read(self, handle: int) -> bool:
        stat = os.fstat(handle)
        if stat.st_ino != self._inode or stat.st_size < self._at:
            self._restart(stat.st_ino)
        if stat.st_size == self._at:
            return False
        if not self._at and stat.st_size > HEAD_BYTES + TAIL_BYTES:
            self._add(os.pread(handle, HEAD_BYTES, 0))
            self._at = stat.st_size - TAIL_BYTES
            first_bytes = os.pread(handle, HEAD_BYTES, self._at)
            self._at += first_bytes.find(b"\n") + 1  # continue at the beginning of a line
        data = _read_from(handle, self._at, stat.st_size - self._at)
        end = data.rfind(b"\n") + 1  # an incomplete line is read next time
        self.bytes_read += len(data)
        self._add(data[:end])
        self._at += end
        return end > 0

    def _add(self, data: bytes) -> None:
        self.lines += metrics(parse_lines(data))
        while len(self.lines) > MAX_LINES:
            half = len(self.lines) // 2
            self.lines = [*self.lines[:100], *self.lines[100:half:2], *self.lines[half:]]


def _read_from(handle: int, offset: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.pread(handle, count, offset)
        if not part:
            break
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)


@dataclass(frozen=True)
class FollowedRun(RunFolder):
    """A run folder whose metrics come from a `MetricsFile`, for callers that read them repeatedly."""

    file: MetricsFile = field(default_factory=lambda: MetricsFile(Path(os.devnull)), compare=False, repr=False)

    @classmethod
    def follow(cls, run: RunFolder) -> FollowedRun:
        """Return a followed run for a run folder."""
        return cls(run.path, MetricsFile(run.path / METRICS))

    def metrics(self) -> list[JsonObject]:
        """Return the last line of each step; in long runs, some lines in the middle are missing."""
        self.file.refresh()
        return last_of_each_step(self.file.lines)

    def newest_metrics(self) -> list[JsonObject]:
        """Return the newest lines, at most `MAX_NEWEST_LINES`."""
        self.file.refresh()
        return self.file.lines[-MAX_NEWEST_LINES:]


def extract_curve(lines: Sequence[JsonObject], key: str, max_points: int = 2000) -> list[tuple[int, float]]:
    """Return the (step, value) points of the field `key` in lines of metrics.jsonl.

    If there are more than `max_points`, neighboring points except the newest are averaged. An average has the last of
    its steps.
    """
    points = [(line["step"], float(line[key])) for line in last_of_each_step(lines) if line.get(key) is not None]
    width = -(-len(points) // max_points)
    if width <= 1:
        return points
    groups = [points[i : min(i + width, len(points) - 1)] for i in range(0, len(points) - 1, width)]
    means = [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
    return [*means, points[-1]]
