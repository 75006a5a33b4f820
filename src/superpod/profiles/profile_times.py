"""Times that no profile can hold, and how many were left out for them: none of them in silence."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superpod.common.files import is_number

DAY_NS = 86_400 * 10**9
"""No profile is as long."""
FITS_NS = 9 * 10**18
"""The latest time that 64 bits hold is little more."""

NO_NUMBER = "without a number"
NEGATIVE = "of negative duration"
LONG = "longer than a day"
FAR = "more than a day away from the others"


class Times:
    """The times of one file, each judged as it is read; then, with `settle`, by how far it is from most."""

    def __init__(self) -> None:
        self._left_out: Counter[str] = Counter()
        self._example: dict[str, str] = {}
        self._middle: float | None = None

    def span(self, start: Any, length: Any, unit_ns: int, name: str) -> tuple[int, int] | None:
        """First and last nanosecond of an event from its numbers in units of `unit_ns`; None where they cannot be."""
        if not (is_number(start) and is_number(length)):
            return self._leave_out(NO_NUMBER, name)
        if length < 0:
            return self._leave_out(NEGATIVE, name)
        if length * unit_ns > DAY_NS:
            return self._leave_out(LONG, name)
        if not abs(start) * unit_ns < FITS_NS:
            return self._leave_out(FAR, name)
        first = round(start * unit_ns)
        if self._middle is not None and abs(first - self._middle) > DAY_NS:
            return self._leave_out(FAR, name)
        return first, first + round(length * unit_ns)

    def settle(self, starts: NDArray[np.int64]) -> None:
        """Take the median of the work's starts, if there are any, as what all else must be near."""
        if len(starts):
            self._middle = float(np.median(starts))

    def near(self, starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these starts lie within a day of the median."""
        if self._middle is None:
            return np.ones(len(starts), dtype=bool)
        return np.abs(starts.astype(np.float64) - self._middle) <= DAY_NS

    def leave_out_far(self, number: int) -> None:
        """So many were found not to be near."""
        if number:
            self._left_out[FAR] += number

    @property
    def words(self) -> str:
        """What was left out and why: `3 events: 2 of negative duration (aten::mm), ...`; '' for nothing."""
        if not self._left_out:
            return ""
        total = self._left_out.total()
        parts = [
            f"{count:,} {why}" + (f" ({self._example[why]})" if why in self._example else "")
            for why, count in self._left_out.most_common()
        ]
        return f"{total:,} event{'s' * (total != 1)}, whose times cannot be: {', '.join(parts)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """For `Recording.notes`."""
        return (f"left out {self.words}",) if self._left_out else ()

    def _leave_out(self, why: str, name: str) -> None:
        self._left_out[why] += 1
        self._example.setdefault(why, name[:60])


def keep_rows(columns: Sequence[array[Any]], near: NDArray[np.bool_]) -> int:
    """Keep these rows of the columns; how many others there were."""
    if not near.all():
        for column in columns:
            column[:] = array(column.typecode, compress(column, near))
    return int((~near).sum())
