"""The rows of a CSV file as cells. A quote that is never closed costs its own row, not all those after it."""

from __future__ import annotations

import csv
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from superpod.errors import cut

MOST_LINES = 100
"""Lines that one row may have, in cells with line breaks; a row that has more has lost a quote."""


CLOSED = re.compile(r'(?:(?:[^",][^,]*+|"(?:[^"]++|"")*+"(?!")[^,]*+)?+(?:,|\Z))*+\Z', re.DOTALL).match
"""Whether every quote that opens a cell is closed, as Python's csv reads them: only at its start it opens one."""


BROKEN = "\0"
"""The column that holds what is wrong with a row as a row; no file has one of that name."""


class Cells(NamedTuple):
    """A row."""

    values: list[str]
    broken: str = ""
    """What is wrong with it as a row; "" = nothing."""
    line: int = 0
    """Of the file, where it ends."""


def read(lines: Iterable[str]) -> Iterator[Cells]:
    """The rows that are not empty. Lines of a row whose quote is not closed are rows of their own."""
    csv.field_size_limit(sys.maxsize)  # the default would end the table at a long cell
    whole = _Rows(iter(lines))
    for values in csv.reader(whole):  # takes a row at a time, and each is whole
        if values:
            yield Cells(values, whole.broken, whole.line)


def named(names: list[str], row: Cells) -> dict[str, str]:
    """A row by its columns; missing cells are blank."""
    cells = dict(zip(names, row.values, strict=False))
    if len(row.values) > len(names):
        extra = row.values[len(names) :]
        many = f"it has {len(row.values)} cells, and the first line names {len(names)} columns"
        cells[BROKEN] = f"{many}: {cut(', '.join(extra))} stands beyond them"
    if row.broken:
        cells[BROKEN] = row.broken
    return cells


class _Rows:
    """Lines joined to rows. `broken` says of the last one what is wrong with it, `line` where it ends."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self._pushed_back = lines, deque[str]()
        self.broken, self.line = "", 0

    def __iter__(self) -> Iterator[str]:
        return self

    def _line(self) -> str | None:
        return self._pushed_back.popleft() if self._pushed_back else next(self._lines, None)

    def __next__(self) -> str:
        line = self._line()
        if line is None:
            raise StopIteration
        self.broken, self.line = "", self.line + 1
        return self._joined(line) if '"' in line and not CLOSED(line) else line

    def _joined(self, first: str) -> str:
        """A row with a line break in a cell, or, where its quote is not closed, its first line."""
        parts = [first]
        while len(parts) < MOST_LINES and (line := self._line()) is not None:
            parts.append(line)
            if '"' in line and CLOSED("".join(parts)):
                self.line += len(parts) - 1
                return "".join(parts)
        self._pushed_back.extendleft(reversed(parts[1:]))
        self.broken = "a quote in it is not closed"
        return first.rstrip("\r\n").replace('"', "") + "\n"
