"""Plots for a terminal, drawn with braille dots, or with ASCII characters where braille is not supported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red", "white")
LETTERS = "*+x#%@&"
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille character (from U+2800), by row and column."""
LABEL_WIDTH = 9
"""Width of the axis labels on the left, in characters."""


@dataclass(frozen=True)
class Curve:
    """Points in order of x, connected by lines, or shown as separate marks `o` if `dots` is set."""

    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False
    color: int = 0


def draw_curves(curves: Sequence[Curve], *, width: int, height: int, braille: bool) -> list[Text]:
    """Return a plot as `height` lines of `width` characters and a line for the x axis; [] if there are no points."""
    from rich.text import Text

    points = [(x, y) for curve in curves for x, y in zip(curve.xs, curve.ys, strict=True)]
    if not points:
        return []
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    x_range, y_range = (right - left) or 1, (high - low) or 1

    # A braille character has 2 columns and 4 rows of dots.
    dots_x, dots_y = (2, 4) if braille else (1, 1)
    characters = max(8, width - LABEL_WIDTH - 2)
    columns, rows = characters * dots_x, height * dots_y

    cells: dict[tuple[int, int], tuple[int, int]] = {}  # (line, character) -> (braille bits, or 0; color)
    marks: dict[tuple[int, int], int] = {}
    for curve in curves:
        places = [
            (round((x - left) / x_range * (columns - 1)), round((high - y) / y_range * (rows - 1)))
            for x, y in zip(curve.xs, curve.ys, strict=True)
        ]
        if curve.dots:
            marks |= {(row // dots_y, column // dots_x): curve.color for column, row in places}
            continue
        for column, row in _connect(_compute_column_medians(places)):
            cell = row // dots_y, column // dots_x
            bit = BITS[row % 4][column % 2] if braille else 0
            bits, _ = cells.get(cell, (0, 0))
            cells[cell] = bits | bit, curve.color

    labels = {0: format_axis_value(high)}
    labels.setdefault(height - 1, format_axis_value(low))
    lines = []
    for row in range(height):
        line = Text(f"{labels.get(row, ''):>{LABEL_WIDTH}} " + ("│" if braille else "|"))
        for column in range(characters):
            if (row, column) in marks:
                line.append("o", style=COLORS[marks[row, column] % len(COLORS)])
            elif (row, column) in cells:
                bits, color = cells[row, column]
                letter = chr(0x2800 + bits) if braille else LETTERS[color % len(LETTERS)]
                line.append(letter, style=COLORS[color % len(COLORS)])
            else:
                line.append(" ")
        lines.append(line)
    first, last = format_axis_value(left), format_axis_value(right)
    axis = f"{'':{LABEL_WIDTH + 2}}{first}{last:>{max(1, characters - len(first))}}"
    return [*lines, Text(axis, style="dim")]


def _compute_column_medians(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (column, median row) of each column if columns have several points, else the points unchanged."""
    columns: dict[int, list[int]] = {}
    for column, row in places:
        columns.setdefault(column, []).append(row)
    if len(places) < 2 * len(columns):
        return [*places]
    return [(column, sorted(rows)[len(rows) // 2]) for column, rows in columns.items()]


def _connect(places: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the cells on the straight lines between consecutive points."""
    cells = set(places[:1])
    for (x, y), (u, v) in pairwise(places):
        distance = max(abs(u - x), abs(v - y), 1)
        for i in range(1, distance + 1):
            cells.add((round(x + (u - x) * i / distance), round(y + (v - y) * i / distance)))
    return cells


def format_axis_value(value: float) -> str:
    """Return a number as text of at most nine characters."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    return f"{value:.2e}"
