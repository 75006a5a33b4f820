"""Detect implausible times in a profile; events with such times are omitted and counted by reason."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superpod.common.json_files import is_number
from superpod.errors import counted

DAY_NS = 86_400 * 10**9
"""Longer than any profile."""
FITS_NS = 9 * 10**18
"""Slightly less than the latest time that fits into 64 bits."""

NO_NUMBER = "without a number"
NEGATIVE = "of negative duration"
LONG = "longer than a day"
FAR = "more than a day away from the others"


class Times:
    """Checks the times of events in a file, after `set_median` also their distance from the median start time."""

    def __init__(self) -> None:
        self._omitted: Counter[str] = Counter()
        self._example: dict[str, str] = {}
        self._median: float | None = None

    def span(self, start: Any, length: Any, unit_ns: int, name: str) -> tuple[int, int] | None:
        """Return the start and end of an event in nanoseconds; None if they are implausible.

        Args:
            start, length: times in units of `unit_ns` nanoseconds, as in the file.
            unit_ns: the unit.
            name: name of the event, for the message about omitted events.
        """
        if not (is_number(start) and is_number(length)):
            return self._omit(NO_NUMBER, name)
        if length < 0:
            return self._omit(NEGATIVE, name)
        if length * unit_ns > DAY_NS:
            return self._omit(LONG, name)
        if not abs(start) * unit_ns < FITS_NS:
            return self._omit(FAR, name)
        first = round(start * unit_ns)
        if self._median is not None and abs(first - self._median) > DAY_NS:
            return self._omit(FAR, name)
        return first, first + round(length * unit_ns)

    def set_median(self, starts: NDArray[np.int64]) -> None:
        """Store the median of the start times; `is_near` and `count_outliers` compare other times with it."""
        if len(starts):
            self._median = float(np.median(starts))

    def is_near(self, starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the start times within a day of the median; all are if `set_median` was not called."""
        if self._median is None:
            return np.ones(len(starts), dtype=bool)
        return np.abs(starts.astype(np.float64) - self._median) <= DAY_NS

    def count_outliers(self, number: int) -> None:
        """Add to the number of events that are omitted because their start is far from the median."""
        if number:
            self._omitted[FAR] += number

    @property
    def text(self) -> str:
        """Text such as `3 events with implausible times: 2 of negative duration (aten::mm), ...`, or ""."""
        if not self._omitted:
            return ""
        reasons = []
        for reason, count in self._omitted.most_common():
            example = f" ({self._example[reason]})" if reason in self._example else ""
            reasons.append(f"{count:,} {reason}{example}")
        return f"{counted(self._omitted.total(), 'event')} with implausible times: {', '.join(reasons)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """The note about omitted events for `Recording.notes`, or ()."""
        return (f"omitted {self.text}",) if self._omitted else ()

    def _omit(self, reason: str, name: str) -> None:
        self._omitted[reason] += 1
        self._example.setdefault(reason, name[:60])


def keep_rows(columns: Sequence[array[Any]], near: NDArray[np.bool_]) -> int:
    """Keep only the rows of `columns` where `near` is true, in place; return the number of removed rows."""
    if not near.all():
        for column in columns:
            column[:] = array(column.typecode, compress(column, near))
    return int((~near).sum())
