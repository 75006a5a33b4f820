"""Read the rows of a CSV file. An unclosed quote makes only its own row malformed, not all following rows."""

from __future__ import annotations

import csv
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from superpod.errors import cut
from superpod.planner.tables.published import COLUMNS

MAX_LINES = 100
"""Maximum number of lines of a row with line breaks in cells; a longer row lacks a closing quote."""


CLOSED = re.compile(r'(?:(?:[^",][^,]*+|"(?:[^"]++|"")*+"(?!")[^,]*+)?+(?:,|\Z))*+\Z', re.DOTALL).match
"""Matches if every quoted cell is closed, as in Python's csv: a quote counts only at the start of a cell."""

FOLLOWED_BY_COMMA = re.compile(r'(?:(?:[^",][^,]*+|"(?:[^"]++|"")*+"(?!")\s*+)?+(?:,|\Z))*+\Z', re.DOTALL).match
"""Matches if, in addition, at most spaces follow each closing quote before the comma. If other text follows, the quote
that seems to close a cell of several lines opens another cell in a later row."""


BROKEN = "\0"
"""Key of a malformed row's error message; no column has this name."""


ONE_LINE = tuple(name for name in COLUMNS if name not in ("id", "flags"))
"""Columns whose values have no line breaks."""


class Cells(NamedTuple):
    """A row of a CSV file."""

    values: list[str]
    broken: str = ""
    """Error message if the row is malformed, else ""."""
    line: int = 0
    """Line number in the file where the row ends."""


def read(lines: Iterable[str]) -> Iterator[Cells]:
    """Yield the rows that are not empty; each line of a row with an unclosed quote is a separate row."""
    csv.field_size_limit(sys.maxsize)  # with the default, reading would stop at a long cell
    rows = _Rows(iter(lines))
    for values in csv.reader(rows):  # reads one complete row at a time
        if values:
            yield Cells(values, rows.broken, rows.line)


def to_dict(names: list[str], row: Cells) -> dict[str, str]:
    """Return column -> value of a row, without missing cells; a malformed row has its error message under BROKEN."""
    cells = dict(zip(names, row.values, strict=False))
    if len(row.values) > len(names):
        extra = row.values[len(names) :]
        message = f"the row has {len(row.values)} cells, but the header has {len(names)} columns"
        cells[BROKEN] = f"{message}: the extra cells are {cut(', '.join(extra))}"
    has_breaks = "\n" in "".join(row.values)  # few rows have
    if has_breaks and (multi_line := [name for name in ONE_LINE if "\n" in cells.get(name, "")]):
        first = row.line - sum(value.count("\n") for value in row.values)
        message = f"a quote in line {first} is closed in line {row.line}"
        cells[BROKEN] = f"{message}, but {multi_line[0]} must be on one line: add the missing quote"
    if row.broken:
        cells[BROKEN] = row.broken
    return cells


class _Rows:
    """Iterator that joins lines to rows. `broken` and `line` describe the last row, like those of `Cells`."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self._pushed_back = lines, deque[str]()
        self.broken, self.line = "", 0

    def __iter__(self) -> Iterator[str]:
        return self

    def _next_line(self) -> str | None:
        return self._pushed_back.popleft() if self._pushed_back else next(self._lines, None)

    def __next__(self) -> str:
        line = self._next_line()
        if line is None:
            raise StopIteration
        self.broken, self.line = "", self.line + 1
        return self._join_lines(line) if '"' in line and not CLOSED(line) else line

    def _join_lines(self, first: str) -> str:
        """Join the lines of a row with line breaks in a cell; return only the first line if its quote is not closed."""
        parts = [first]
        while len(parts) < MAX_LINES and (line := self._next_line()) is not None:
            parts.append(line)
            if '"' in line and CLOSED("".join(parts)):
                break
        row = "".join(parts)
        if CLOSED(row) and FOLLOWED_BY_COMMA(row):
            self.line += len(parts) - 1
            return row
        self._pushed_back.extendleft(reversed(parts[1:]))
        self.broken = f"a quote in line {self.line} is not closed"
        return first.rstrip("\r\n").replace('"', "") + "\n"
