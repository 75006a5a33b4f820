"""The figures of a run report: curves over steps, and where the time went. They hold their data themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bokeh.models import BasicTickFormatter, ColumnDataSource, FixedTicker, Range1d, Span
from bokeh.plotting import figure

from superpod.pages.figures import _bars, _hover, _plain

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
"""Of runs: Okabe and Ito's, which people tell from one another whatever they see, grey in place of black."""

COLUMNS = ("left", "right", "bottom", "top", "color", "label", "value", "row", "alpha")
"""Of the parts of a bar, as `figures` draws them."""


@dataclass(frozen=True)
class Line:
    """A curve of one run; `dots` lie on it without being joined, such as validations."""

    xs: Sequence[float]
    ys: Sequence[float]
    dots_x: Sequence[float] = ()
    dots_y: Sequence[float] = ()
    breaks: Sequence[float] = ()
    """where a later attempt begins"""


@dataclass(frozen=True)
class Part:
    """A piece of a stacked bar."""

    row: int
    name: str
    seconds: float
    color: str


def color(i: int) -> str:
    """Of the i-th run."""
    return COLORS[i % len(COLORS)]


def curve(name: str, unit: str, lines: Sequence[Line], *, height: int) -> figure:
    """Curves over steps, one a run. Of the models, `{name}_{i}` is a run's data, and `{name}_{i}_line` its line."""
    points = [(x, y) for line in lines for x, y in (*_zip(line.xs, line.ys), *_zip(line.dots_x, line.dots_y))]
    (left, right), (low, high) = _range([x for x, _ in points], 0.01), _range([y for _, y in points], 0.05)
    plot = _plain(
        name, height, x_range=Range1d(start=left, end=right, name=f"{name}_x"),
        y_range=Range1d(start=low, end=high, name=f"{name}_y"), x_axis_label="step", y_axis_label=unit,
    )  # fmt: skip
    plot.output_backend = "svg"
    plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    plot.yaxis.formatter = BasicTickFormatter(precision=3)
    for i, line in enumerate(lines):
        source = ColumnDataSource({"x": [*line.xs], "y": [*line.ys]}, name=f"{name}_{i}")
        plot.line("x", "y", source=source, line_color=color(i), line_width=1.8, name=f"{name}_{i}_line")
        seen = 1.0 if len(line.xs) == 1 else 0.0  # else the points are there for the pointer alone: a line has no place
        points_of = plot.scatter("x", "y", source=source, size=8, line_color=None, fill_color=color(i), fill_alpha=seen)
        points_of.name = f"{name}_{i}_point"
        _hover(plot, points_of, mode="vline")
        if line.dots_x:
            dots = ColumnDataSource({"x": [*line.dots_x], "y": [*line.dots_y]}, name=f"{name}_{i}_dots")
            marks = plot.scatter(
                "x", "y", source=dots, size=9, fill_color=color(i), line_color="white", line_width=1.2,
                name=f"{name}_{i}_marks",
            )  # fmt: skip
            _hover(plot, marks)
        for place in line.breaks if len(lines) == 1 else ():
            plot.add_layout(Span(dimension="height", line_dash="dashed", line_width=1, location=place))
    return plot


def bars(name: str, rows: Sequence[str], parts: Sequence[Part]) -> figure:
    """Stacked bars, one a row, in seconds; of the models, `{name}_data` holds the parts."""
    plot = _bars(name, 80 + 36 * len(rows))
    ends = dict.fromkeys(range(len(rows)), 0.0)
    columns: dict[str, list[object]] = {key: [] for key in COLUMNS}
    for part in parts:
        left = ends[part.row]
        ends[part.row] = right = left + part.seconds
        values = (left, right, part.row + 0.36, part.row - 0.36, part.color, part.name, part.seconds, part.row, 1)
        for key, value in zip(COLUMNS, values, strict=True):
            columns[key].append(value)
    source = plot.select_one({"name": f"{name}_data"})
    assert isinstance(source, ColumnDataSource)
    source.data = dict(columns)  # pyright: ignore[reportAttributeAccessIssue]
    plot.x_range.end = (max(ends.values(), default=0.0) or 1.0) * 1.02  # pyright: ignore[reportAttributeAccessIssue]
    plot.y_range.start, plot.y_range.end = len(rows) - 0.4, -0.6  # pyright: ignore[reportAttributeAccessIssue]
    plot.yaxis[0].ticker = FixedTicker(ticks=list(range(len(rows))), name=f"{name}_rows")
    plot.yaxis[0].major_label_overrides = dict(enumerate(rows))
    plot.xaxis[0].axis_label = "s"
    return plot


def _zip(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(xs, ys, strict=True))


def _range(values: Sequence[float], room: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    more = (high - low) * room or abs(high) * room or 1.0
    return low - more, high + more
