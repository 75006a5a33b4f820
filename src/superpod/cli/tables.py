"""Tables and sentences for terminals of any width: long text wraps between words, and nothing is cut off."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GAP = 2
"""Spaces between two columns."""
INDENT = "  "
UNLIMITED = 100_000
"""Columns of a pipe or a file."""
CHART = 80
LEAST = 20
"""Columns that text is wrapped to in a terminal that has fewer."""
GLUE = "\u00a0"
"""A space that `textwrap` does not break at."""


def show(table: Table) -> None:
    """Print a table at its full width; a narrower terminal scrolls or folds it."""
    from rich.console import Console
    from rich.measure import Measurement

    terminal = console()
    needed = Measurement.get(terminal, terminal.options.update(width=UNLIMITED), table).maximum
    wide = Console(highlight=False, width=max(terminal.width, needed))
    with wide.capture() as capture:
        wide.print(table)
    # rich fills the last column: the spaces would fold in a narrower terminal, and stand in what is copied.
    terminal.out("\n".join(line.rstrip() for line in capture.get().splitlines()), highlight=False)


def show_folded(titles: Sequence[str], rows: Sequence[Sequence[str]], *, fold: int = 0, least: int = 0) -> None:
    """Print rows at the terminal's width by wrapping the column number `fold`, at its commas if possible.

    No word is cut: the table becomes wider than the terminal if the longest word of that column, or `least` characters,
    do not fit. Columns whose cells all begin with a digit are aligned to the right.
    """
    from rich.table import Table

    columns = [*zip(titles, *rows, strict=True)]
    taken = sum(GAP + max(map(_columns, column)) for i, column in enumerate(columns) if i != fold)
    longest = max((len(word) for cell in columns[fold] for word in cell.split()), default=0)
    columns_left = max(width() - taken, longest + len(INDENT), least)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        figures = all(cell[:1].isdigit() for cell in column[1:])
        table.add_column(column[0], justify="right" if figures else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_folded(cell, columns_left) if i == fold else cell for i, cell in enumerate(row)))
    show(table)


def say(sentence: str) -> None:
    """Print a sentence wrapped to the terminal, later lines indented; words such as options stay whole."""
    print(_fold(sentence, width()))


def _columns(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _folded(cell: str, width: int) -> str:
    """A cell wrapped at its commas; a part between two commas is broken only if it does not fit in a line."""
    parts = [part.replace(" ", GLUE) if len(part) < width - len(INDENT) else part for part in cell.split(", ")]
    return _fold(", ".join(parts), width).replace(GLUE, " ")


def _fold(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)


def console(file: IO[str] | None = None, *, highlight: bool = False) -> Console:
    """A console that wraps to its terminal, or to COLUMNS; what goes to a file or a pipe is not wrapped."""
    from rich.console import Console

    if is_unlimited(file or sys.stdout):
        return Console(file=file, highlight=highlight, width=UNLIMITED)
    return Console(file=file, highlight=highlight)


def is_unlimited(file: IO[str]) -> bool:
    """Whether output is not wrapped: programs such as grep read lines, and would get half a row."""
    return not file.isatty() and "COLUMNS" not in os.environ


def width() -> int:
    """Columns that text on stdout is wrapped to, at least LEAST."""
    return max(console().width, LEAST)


def chart_width() -> int:
    """Columns of a chart: those of the terminal, or 80 without one."""
    return CHART if is_unlimited(sys.stdout) else width()


def amount(count: float) -> str:
    """A number of tokens or parameters in the unit that papers use: 15.6T, 8.03B, 135M."""
    size, unit = next(((size, unit) for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if count >= size), (1, ""))
    return f"{count / size:.3g}{unit}"


def ago(seconds: float | None) -> str:
    """A time span in the unit that a person would use; "-" if unknown."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
