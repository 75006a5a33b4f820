"""Curves for a terminal: of braille dots, eight to a letter, or of letters where the terminal has no braille."""

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
"""Of a braille letter, U+2800 on: the bit of each of its four rows and two columns."""
LABEL = 9
"""Columns of the figures at the left."""


@dataclass(frozen=True)
class Curve:
    """Points to be joined, in the order of x; `dots` are not joined, and shown as `o`."""

    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False
    color: int = 0


def draw(curves: Sequence[Curve], *, width: int, height: int, braille: bool) -> list[Text]:
    """The curves in `height` lines of `width` columns and a line of x below; nothing of no points."""
    from rich.text import Text

    points = [(x, y) for curve in curves for x, y in zip(curve.xs, curve.ys, strict=True)]
    if not points:
        return []
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    wide, deep = (right - left) or 1, (high - low) or 1
    across, fine, tall = max(8, width - LABEL - 2), (2, 4) if braille else (1, 1), height
    columns, rows = across * fine[0], tall * fine[1]
    cells: dict[tuple[int, int], tuple[int, int]] = {}  # (row, column) -> (bits or 0 of a letter, colour)
    marks: dict[tuple[int, int], int] = {}
    for curve in curves:
        places = [
            (round((x - left) / wide * (columns - 1)), round((high - y) / deep * (rows - 1)))
            for x, y in zip(curve.xs, curve.ys, strict=True)
        ]
        if curve.dots:
            marks |= {(row // fine[1], column // fine[0]): curve.color for column, row in places}
            continue
        for column, row in _joined(_medians(places)):
            key = row // fine[1], column // fine[0]
            bit = BITS[row % 4][column % 2] if braille else 0
            cells[key] = cells.get(key, (0, 0))[0] | bit, curve.color
    lines = []
    for row in range(tall):
        label = high if row == 0 else low if row == tall - 1 else None
        line = Text(f"{'' if label is None else short(label):>{LABEL}} " + ("│" if braille else "|"))
        for column in range(across):
            if (row, column) in marks:
                line.append("o", style=COLORS[marks[row, column] % len(COLORS)])
            elif (row, column) in cells:
                bits, color = cells[row, column]
                letter = chr(0x2800 + bits) if braille else LETTERS[color % len(LETTERS)]
                line.append(letter, style=COLORS[color % len(COLORS)])
            else:
                line.append(" ")
        lines.append(line)
    ends = short(left), short(right)
    return [*lines, Text(f"{'':{LABEL + 2}}{ends[0]}{ends[1]:>{max(1, across - len(ends[0]))}}", style="dim")]


def _medians(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of many places in one column their middle, so that a long and noisy curve is no block."""
    columns: dict[int, list[int]] = {}
    for column, row in places:
        columns.setdefault(column, []).append(row)
    if len(places) < 2 * len(columns):
        return [*places]
    return [(column, sorted(rows)[len(rows) // 2]) for column, rows in columns.items()]


def _joined(places: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """The places and those between them; of many in one column, all."""
    drawn = set(places[:1])
    for (x, y), (u, v) in pairwise(places):
        far = max(abs(u - x), abs(v - y), 1)
        drawn |= {(round(x + (u - x) * i / far), round(y + (v - y) * i / far)) for i in range(1, far + 1)}
    return drawn


def short(value: float) -> str:
    """A number in nine letters at most."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"
