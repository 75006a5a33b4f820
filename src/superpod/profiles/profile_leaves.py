"""Operations that hold one another as pieces that do not: each moment of a thread is its innermost operation's."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from superpod.profiles.profile_classes import CLASSES
from superpod.profiles.profile_times import keep_rows


class Leaves:
    """Operations as they are added, in any order.

    HOLDS is the kind of one that does no work itself: what is left of it beside those inside is no work. Inside one of
    the kind OPTIMIZER, such as `Optimizer.step#Adam.step`, all work is the optimizer's.
    """

    HOLDS, OPTIMIZER = -1, -2

    def __init__(self) -> None:
        self._threads: dict[Hashable, tuple[array[int], ...]] = {}

    def __len__(self) -> int:
        return sum(len(columns[0]) for columns in self._threads.values())

    def add(self, thread: tuple[Any, Any], start: int, end: int, name: int, kind: int) -> None:
        """One operation; times in ns."""
        key = (str(thread[0]), str(thread[1]))
        columns = self._threads.get(key)
        if columns is None:
            columns = self._threads[key] = (array("q"), array("q"), array("i"), array("b"))
        for column, value in zip(columns, (start, end, name, kind), strict=True):
            column.append(value)

    @property
    def starts(self) -> Any:
        """When each operation starts, ns."""
        every = [np.frombuffer(columns[0], dtype=np.int64) for columns in self._threads.values()]
        return np.concatenate(every) if every else np.zeros(0, dtype=np.int64)

    def keep(self, near: Callable[[Any], Any]) -> int:
        """Keep the operations whose starts are near; how many others there were."""
        return sum(keep_rows(columns, near(np.array(columns[0]))) for columns in self._threads.values())

    def rows(self) -> tuple[Any, Any, Any, Any]:
        """(start, end, name, kind) of every piece of work, as arrays."""
        pieces = (array("q"), array("q"), array("i"), array("b"))
        for columns in self._threads.values():
            _split([np.frombuffer(column, dtype=column.typecode) for column in columns], pieces)
        types = (np.int64, np.int64, np.int32, np.int8)
        return tuple(np.array(column, dtype=kind) for column, kind in zip(pieces, types, strict=True))  # pyright: ignore[reportReturnType]


def _split(columns: list[Any], pieces: tuple[array[int], ...]) -> None:
    """Add the pieces of one thread."""
    start, end, _, _ = columns
    order = np.lexsort((-end, start))  # an operation before those inside it
    optimizer = CLASSES.index("optimizer")
    stack: list[tuple[int, int, int, bool]] = []  # (end, name, kind, inside the optimizer)
    at = 0

    def write(until: int) -> None:
        _, name, kind, inside = stack[-1]
        if until > at and kind >= 0:
            row = (at, until, name, optimizer if inside else kind)
            for piece, value in zip(pieces, row, strict=True):
                piece.append(value)

    for first, last, name, kind in zip(*(column[order].tolist() for column in columns), strict=True):
        while stack and stack[-1][0] <= first:
            write(stack[-1][0])
            at = max(at, stack.pop()[0])
        if stack:
            write(first)
        at = first
        inside = bool(stack and stack[-1][3])
        # Clipped: clocks of some traces let one inside end some ns after the one that holds it.
        stack.append((min(last, stack[-1][0]) if stack else last, name, kind, inside or kind == Leaves.OPTIMIZER))
    while stack:
        write(stack[-1][0])
        at = max(at, stack.pop()[0])
