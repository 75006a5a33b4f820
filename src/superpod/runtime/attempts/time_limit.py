"""Track the time limit of the running job, which `scontrol update TimeLimit` may change.

The first node queries Slurm and writes `attempts/NNN/deadline.json`; rank 0 reads it (`stopping.Deadline`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from superpod.common.json_files import number_or_none, read_json, write_json

FILE = "deadline.json"
"""File in an attempt's folder: `{"at": Unix time at which the time limit expires, 0 = no limit}`."""

QUERY_S = 60.0
"""Seconds between two queries of the controller."""


class TimeLimit:
    """The time limit of a job: `at` is the Unix time at which it expires, 0 = no limit.

    `attempt` is the folder of the attempt; `query` returns the limit from Slurm, 0 if there is none or Slurm does not
    respond.
    """

    def __init__(self, attempt: Path, query: Callable[[], float]) -> None:
        self._file, self._query = attempt / FILE, query
        self.at = query()
        self._next = time.monotonic() + QUERY_S
        self._write()

    def update(self) -> str:
        """Query the limit every QUERY_S seconds; return a message if it has changed, otherwise ''."""
        if time.monotonic() < self._next:
            return ""
        self._next = time.monotonic() + QUERY_S
        end_time = self._query()
        if not end_time or end_time == self.at:  # 0 = the controller does not respond: keep the known limit
            return ""
        self.at = end_time
        self._write()
        return f"the job's time limit is now {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(end_time))}"

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # on a full disk, the ranks keep the known limit
            write_json(self._file, {"at": self.at})


def read(attempt: Path) -> float | None:
    """Return the Unix time at which the limit of an attempt expires, as written by the first node; None if unknown."""
    end_time = (read_json(attempt / FILE) or {}).get("at")
    return number_or_none(end_time)
