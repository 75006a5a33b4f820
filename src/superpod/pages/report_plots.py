"""Creates the figures of a run report with their data: curves against steps, and stacked bars of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bokeh.models import BasicTickFormatter, ColumnDataSource, FixedTicker, Span
from bokeh.plotting import figure

from superpod.pages.figures import BAR_COLUMNS, add_hover, create_bars, create_figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
"""Colors of runs: the palette of Okabe and Ito for color-blind readers, with gray instead of black."""


@dataclass(frozen=True)
class Line:
    """A curve of one run, and separate dots such as validation losses."""

    xs: Sequence[float]
    ys: Sequence[float]
    dots_x: Sequence[float] = ()
    dots_y: Sequence[float] = ()
    breaks: Sequence[float] = ()
    """Steps at which a later attempt begins."""


@dataclass(frozen=True)
class Part:
    """A part of a stacked bar."""

    row: int
    """Number of the bar, from 0 at the top."""
    name: str
    seconds: float
    color: str


def get_color(i: int) -> str:
    """Return the color of the i-th run."""
    return COLORS[i % len(COLORS)]


def plot_curves(name: str, unit: str, lines: Sequence[Line], *, height: int) -> figure:
    """Return a figure with one curve per run; `{name}_{i}` and `{name}_{i}_line` are the i-th data source and line."""
    left, right = _range([x for line in lines for x in (*line.xs, *line.dots_x)], 0.01)
    low, high = _range([y for line in lines for y in (*line.ys, *line.dots_y)], 0.05)
    plot = create_figure(name, height, x=(left, right), y=(low, high), x_axis_label="step", y_axis_label=unit)
    plot.output_backend = "svg"
    plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    plot.yaxis.formatter = BasicTickFormatter(precision=3)
    for i, line in enumerate(lines):
        source = ColumnDataSource({"x": [*line.xs], "y": [*line.ys]}, name=f"{name}_{i}")
        plot.line("x", "y", source=source, line_color=get_color(i), line_width=1.8, name=f"{name}_{i}_line")
        # Points are invisible and only serve the tooltips, except for a single point, which has no line.
        alpha = 1.0 if len(line.xs) == 1 else 0.0
        points = plot.scatter(
            "x", "y", source=source, size=8, line_color=None, fill_color=get_color(i), fill_alpha=alpha
        )
        points.name = f"{name}_{i}_point"
        add_hover(plot, points, mode="vline")
        if line.dots_x:
            dots = ColumnDataSource({"x": [*line.dots_x], "y": [*line.dots_y]}, name=f"{name}_{i}_dots")
            marks = plot.scatter(
                "x", "y", source=dots, size=9, fill_color=get_color(i), line_color="white", line_width=1.2,
                name=f"{name}_{i}_marks",
            )  # fmt: skip
            add_hover(plot, marks)
        if len(lines) == 1:
            for step in line.breaks:
                plot.add_layout(Span(dimension="height", line_dash="dashed", line_width=1, location=step))
    return plot


def plot_bars(name: str, rows: Sequence[str], parts: Sequence[Part]) -> figure:
    """Return a figure with a stacked bar of seconds for each label in `rows`; `{name}_data` is its data source."""
    plot = create_bars(name, 80 + 36 * len(rows))
    ends = dict.fromkeys(range(len(rows)), 0.0)
    columns: dict[str, list[object]] = {key: [] for key in BAR_COLUMNS}
    for part in parts:
        left = ends[part.row]
        ends[part.row] = right = left + part.seconds
        values = (left, right, part.row + 0.36, part.row - 0.36, part.color, part.name, part.seconds, part.row, 1)
        for key, value in zip(BAR_COLUMNS, values, strict=True):
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


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Return the limits of an axis that shows `values`, extended by a relative margin."""
    low, high = min(values), max(values)
    extra = (high - low) * margin or abs(high) * margin or 1.0
    return low - extra, high + extra
