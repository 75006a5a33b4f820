"""Prints tables, text and JSON. At any terminal width, long text wraps between words and is never truncated."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from superpod.launch.display.consoles import UNLIMITED, console, is_unlimited

if TYPE_CHECKING:
    from rich.table import Table

GAP = 2
"""Spaces between two columns."""
INDENT = "  "
CHART_WIDTH = 80
"""Width of a chart in output that is not wrapped."""
MIN_WIDTH = 20
"""Minimum width to which text is wrapped, even in narrower terminals."""
NO_BREAK_SPACE = "\u00a0"
"""Non-breaking space, at which `textwrap` does not wrap."""


def print_json(value: object) -> None:
    """Print a value as JSON, indented by one space per level."""
    import json

    print(json.dumps(value, indent=1))


def print_rows(titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[int] = ()) -> None:
    """Print a table with bold column titles and unwrapped cells; the columns with indices `right` are right-aligned."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # as `Text`, because rich would interpret brackets in a string as markup
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table at its full width; a narrower terminal scrolls or folds it."""
    from rich.console import Console
    from rich.measure import Measurement

    terminal = console()
    needed_width = Measurement.get(terminal, terminal.options.update(width=UNLIMITED), table).maximum
    wide = Console(highlight=False, width=max(terminal.width, needed_width))
    with wide.capture() as capture:
        wide.print(table)
    # rich pads the last column: the spaces would wrap in a narrower terminal and end up in copied text.
    terminal.out("\n".join(line.rstrip() for line in capture.get().splitlines()), highlight=False)


def print_folded_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, fold: int = 0, min_width: int = 0
) -> None:
    """Print a table at the width of the terminal by wrapping one column, at commas if possible.

    Words are not split: if the longest word of the wrapped column does not fit, the table is wider than the terminal.
    Columns whose cells all begin with a digit are right-aligned.

    Args:
        titles: column titles.
        rows: one list of cells per row.
        fold: index of the column to wrap.
        min_width: minimum width of that column, in characters.
    """
    from rich.table import Table

    columns = [*zip(titles, *rows, strict=True)]
    widths = [max((len(line) for cell in column for line in cell.splitlines()), default=0) for column in columns]
    other_widths = sum(GAP + column_width for i, column_width in enumerate(widths) if i != fold)
    longest_word = max((len(word) for cell in columns[fold] for word in cell.split()), default=0)
    fold_width = max(width() - other_widths, longest_word + len(INDENT), min_width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_numeric = all(cell[:1].isdigit() for cell in column[1:])
        table.add_column(column[0], justify="right" if is_numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_wrap_cell(cell, fold_width) if i == fold else cell for i, cell in enumerate(row)))
    print_table(table)


def print_wrapped(text: str) -> None:
    """Print text wrapped to the terminal, with indented continuation lines; words are not split, even at hyphens."""
    print(_wrap(text, width()))


def _wrap_cell(cell: str, width: int) -> str:
    """Wrap a cell to `width` characters at its commas, and at spaces only where the text between commas is longer."""
    parts = [
        part.replace(" ", NO_BREAK_SPACE) if len(part) < width - len(INDENT) else part for part in cell.split(", ")
    ]
    return _wrap(", ".join(parts), width).replace(NO_BREAK_SPACE, " ")


def _wrap(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)


def width() -> int:
    """Return the width to which text on stdout is wrapped, in characters; at least MIN_WIDTH."""
    return max(console().width, MIN_WIDTH)


def chart_width() -> int:
    """Return the width of a chart in characters: that of the terminal, or 80 without one."""
    return CHART_WIDTH if is_unlimited(sys.stdout) else width()


def format_count(count: float) -> str:
    """Format a number of tokens or parameters: 15.6T, 8.03B, 135M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def format_duration(seconds: float | None) -> str:
    """Format a duration in whole days, hours, minutes or seconds, such as "3 h"; None as "-"."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
