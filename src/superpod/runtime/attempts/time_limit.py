"""The time limit of the job that an attempt runs in, read anew while it runs: `scontrol update TimeLimit` moves it.

The first node asks Slurm and writes `attempts/NNN/deadline.json`; rank 0 reads it (`stopping.Deadline`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from superpod.common.files import number_or_none, read_json, write_json

FILE = "deadline.json"
"""`{"at": Unix time of the job's limit}` in an attempt's folder; 0 = no limit."""

ASK_S = 60.0
"""Seconds between two questions to the controller, one job each."""


class TimeLimit:
    """The newest limit of a job, as Unix time; 0 = none."""

    def __init__(self, attempt: Path, ask: Callable[[], float]) -> None:
        self._file, self._ask = attempt / FILE, ask
        self.at = ask()
        self._next = time.monotonic() + ASK_S
        self._write()

    def look(self) -> str:
        """Ask again when it is time to; returns what has changed, in words, or ''."""
        if time.monotonic() < self._next:
            return ""
        self._next = time.monotonic() + ASK_S
        at = self._ask()
        if not at or at == self.at:  # 0: the controller does not answer, and the limit known before still holds
            return ""
        self.at = at
        self._write()
        return f"the job's time limit is now {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}"

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the ranks keep the limit that they know
            write_json(self._file, {"at": self.at})


def read(attempt: Path) -> float | None:
    """The limit that the first node has last written; None when there is none to read."""
    at = (read_json(attempt / FILE) or {}).get("at")
    return number_or_none(at)
