"""Divide nested operations into disjoint pieces: each moment of a thread belongs to the innermost operation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from superpod.profiles.profile_classes import CLASSES
from superpod.profiles.profile_times import keep_rows


class Leaves:
    """Collects the operations of all threads, in any order, and divides them into pieces.

    An operation of kind HOLDS does no work itself: its time outside nested operations is not counted. All work inside
    an operation of kind OPTIMIZER, such as `Optimizer.step#Adam.step`, belongs to the optimizer.
    """

    HOLDS, OPTIMIZER = -1, -2

    def __init__(self) -> None:
        self._threads: dict[Hashable, tuple[array[int], ...]] = {}

    def __len__(self) -> int:
        return sum(len(columns[0]) for columns in self._threads.values())

    def add(self, thread: tuple[Any, Any], start: int, end: int, name: int, kind: int) -> None:
        """Add an operation of a (process, thread), in nanoseconds; `kind` is a class index, HOLDS or OPTIMIZER."""
        key = (str(thread[0]), str(thread[1]))
        columns = self._threads.get(key)
        if columns is None:
            columns = self._threads[key] = (array("q"), array("q"), array("i"), array("b"))
        for column, value in zip(columns, (start, end, name, kind), strict=True):
            column.append(value)

    @property
    def starts(self) -> Any:
        """Array of the start times of all operations, in nanoseconds."""
        starts = [np.frombuffer(columns[0], dtype=np.int64) for columns in self._threads.values()]
        return np.concatenate(starts) if starts else np.zeros(0, dtype=np.int64)

    def keep(self, is_near: Callable[[Any], Any]) -> int:
        """Remove the operations whose start times are not in the mask `is_near(starts)`; return their number."""
        return sum(keep_rows(columns, is_near(np.array(columns[0]))) for columns in self._threads.values())

    def rows(self) -> tuple[Any, Any, Any, Any]:
        """Return arrays (start, end, name, kind) of all pieces."""
        pieces = (array("q"), array("q"), array("i"), array("b"))
        for columns in self._threads.values():
            _split([np.frombuffer(column, dtype=column.typecode) for column in columns], pieces)
        types = (np.int64, np.int64, np.int32, np.int8)
        return tuple(np.array(column, dtype=kind) for column, kind in zip(pieces, types, strict=True))  # pyright: ignore[reportReturnType]


def _split(columns: list[Any], pieces: tuple[array[int], ...]) -> None:
    """Divide the operations of one thread, and append the pieces; both have the columns start, end, name and kind."""
    start, end, _, _ = columns
    order = np.lexsort((-end, start))  # an operation comes before those nested in it
    optimizer = CLASSES.index("optimizer")
    stack: list[tuple[int, int, int, bool]] = []  # (end, name, kind, inside the optimizer)
    time = 0

    def write(end: int) -> None:
        """Append the piece of the innermost operation from `time` to `end`."""
        _, name, kind, in_optimizer = stack[-1]
        if end > time and kind >= 0:
            row = (time, end, name, optimizer if in_optimizer else kind)
            for piece, value in zip(pieces, row, strict=True):
                piece.append(value)

    for first, last, name, kind in zip(*(column[order].tolist() for column in columns), strict=True):
        while stack and stack[-1][0] <= first:
            write(stack[-1][0])
            time = max(time, stack.pop()[0])
        in_optimizer = kind == Leaves.OPTIMIZER
        if stack:
            write(first)
            # Clip, because in some traces a nested operation ends a few ns after the enclosing one.
            last = min(last, stack[-1][0])
            in_optimizer = in_optimizer or stack[-1][3]
        time = first
        stack.append((last, name, kind, in_optimizer))
    while stack:
        write(stack[-1][0])
        time = max(time, stack.pop()[0])
