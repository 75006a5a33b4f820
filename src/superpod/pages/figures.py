"""Creates the empty figures of a page: Bokeh models that the scripts in `assets/` fill with the data of the page.

The data is stored separately because a page shows different layouts in the same figures. Bokeh was chosen because its
Python package contains its script, which may be embedded (BSD-3): pages have 1.3 MB and do not need the network.
"""

from __future__ import annotations

from typing import Any

from bokeh.core.properties import value
from bokeh.models import (
    BasicTicker,
    BasicTickFormatter,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    Label,
    LinearColorMapper,
    LogTicker,
    NoOverlap,
    NumeralTickFormatter,
    Range1d,
    Span,
    TapTool,
)
from bokeh.plotting import figure

Limits = tuple[float, float]
"""Start and end of an axis."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
NUMBER = "0,0.[00]"
"""Format of tick labels: 12,500 or 0.5."""
SCALES = ("seq", "gbs", "far", "near", "imbalance")
"""Keys of the sensitivity curves in `sensitivity.py`, one figure each."""
EDGES: dict[str, Any] = {"left": "left", "right": "right", "bottom": "bottom", "top": "top"}
"""Columns of a data source with the edges of rectangles."""
BAR_COLUMNS = (*EDGES, "color", "label", "value", "row", "alpha")
"""Columns of the data source of stacked bars; each row is a part of a bar."""


def create_plan_figures() -> dict[str, figure]:
    """Return the figures for all layouts of a plan, by their keys in the template."""
    return {"map": _create_map()}


def create_layout_figures() -> dict[str, figure]:
    """Return the figures for one layout, by their keys in the template."""
    return {
        "terms": create_bars("terms", height=190),
        "memory": create_bars("memory", height=260, lines=True),
        "timeline": _create_timeline(),
        "ranks": _create_rank_map(),
        **{f"scaling_{key}": _create_curve(f"scaling_{key}", log=True) for key in ("strong", "weak")},
        **{f"sensitivity_{key}": _create_curve(f"sensitivity_{key}", log=key != "imbalance") for key in SCALES},
    }


def create_scaling_figures() -> dict[str, figure]:
    """Return the figures of throughput against cluster size, by their keys in the template."""
    return {f"sizes_{key}": _create_curve(f"sizes_{key}", log=True, height=320) for key in ("rate", "efficiency")}


def create_cost_figures() -> dict[str, figure]:
    """Return the figures of a cost estimate, with a bar per GPU type, by their keys in the template."""
    keys = ("days", "gpu_hours", "energy_mwh", "money")
    return {f"cost_{key}": create_bars(f"cost_{key}", height=160) for key in keys}


def create_live_figures() -> dict[str, figure]:
    """Return the figures for the loss and throughput of a live run, by their keys in the template."""
    return {f"live_{key}": _create_live_curve(f"live_{key}") for key in ("loss", "rate")}


def create_figure(name: str, height: int, tools: str = "", *, x: Limits, y: Limits, **options: Any) -> figure:
    """Return an empty figure in the style of the pages.

    Args:
        name: name of the Bokeh model; its axis ranges are named `{name}_x` and `{name}_y`.
        height: height in pixels.
        tools: Bokeh's tools, separated by commas.
        x, y: initial limits of the axes.
        options: other arguments of Bokeh's `figure`.
    """
    plot = figure(
        name=name, height=height, sizing_mode="stretch_width", tools=tools, toolbar_location="right" if tools else None,
        outline_line_color=None, min_border_left=74, min_border_right=16, min_border_top=8,
        x_range=Range1d(start=x[0], end=x[1], name=f"{name}_x"),
        y_range=Range1d(start=y[0], end=y[1], name=f"{name}_y"), **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    for axis in plot.axis:
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.major_label_policy = NoOverlap(min_distance=6)  # shows fewer labels on a narrow screen
        axis.minor_tick_line_color = None
        axis.major_tick_in, axis.major_tick_out = 0, 4
    return plot


def _create_source(name: str, *columns: str) -> ColumnDataSource:
    """Return an empty data source with these columns."""
    return ColumnDataSource({column: [] for column in columns}, name=name)


def add_hover(plot: figure, glyphs: Any, **options: Any) -> None:
    """Make a figure report the item of `glyphs` under the pointer, for the tooltips of `assets/core.js`."""
    plot.add_tools(HoverTool(tooltips=None, renderers=[glyphs], **options))


def _create_map() -> figure:
    """Return the map of all legal layouts: step time against memory."""
    plot = create_figure(
        "map", 460, "pan,box_zoom,wheel_zoom,reset,save", x=(1, 100), y=(1, 100), x_axis_type="log", y_axis_type="log",
        x_axis_label="reserved memory, maximum of all ranks, GiB", y_axis_label="step time, s",
    )  # fmt: skip
    source = _create_source("map_data", "gib", "seconds", "color")
    mapper = LinearColorMapper(palette=["#888888"], low=0, high=1, name="map_colors")
    points = plot.scatter("gib", "seconds", source=source, size=4, line_color=None, fill_alpha=0.75, name="map_points")
    points.glyph.fill_color = {"field": "color", "transform": mapper}
    points.nonselection_glyph = points.selection_glyph = None
    plot.step(
        "gib", "seconds", source=_create_source("frontier", "gib", "seconds"), line_width=1.6, mode="after", name="edge"
    )
    plot.scatter(
        "gib", "seconds", source=_create_source("chosen", "gib", "seconds"), size=15, marker="circle", fill_alpha=0,
        line_width=2.5, name="ring",
    )  # fmt: skip
    plot.add_layout(Span(dimension="height", line_dash="dashed", line_width=1.5, location=1, name="map_limit"))
    for axis in plot.axis:
        axis.ticker = LogTicker(desired_num_ticks=8, num_minor_ticks=1)
        axis.formatter = BasicTickFormatter()
    label = Label(x=1, y=8, y_units="screen", x_offset=6, text="", text_font=FONT, text_font_size="12px")
    label.name = "map_words"
    plot.add_layout(label)
    add_hover(plot, points, point_policy="snap_to_data")
    plot.add_tools(TapTool(renderers=[points]))
    plot.toolbar.active_drag = None
    return plot


def create_bars(name: str, height: int, *, lines: bool = False) -> figure:
    """Return a figure of horizontal stacked bars, with vertical lines for two limits if `lines`."""
    plot = create_figure(name, height, x=(0, 1), y=(1, 0))
    bars = plot.quad(
        **EDGES, fill_color="color", fill_alpha="alpha", line_color=None,
        source=_create_source(f"{name}_data", *BAR_COLUMNS), name=f"{name}_bars",
    )  # fmt: skip
    plot.yaxis.ticker = FixedTicker(ticks=[], name=f"{name}_rows")
    plot.ygrid.visible = False
    plot.xaxis.ticker = BasicTicker(desired_num_ticks=5 if height < 180 else 8, num_minor_ticks=0)
    plot.xaxis.formatter = NumeralTickFormatter(format=NUMBER)
    plot.output_backend = "svg"
    for limit in ("limit", "gpu") if lines else ():
        plot.add_layout(
            Span(dimension="height", line_dash="dashed", line_width=1.5, location=0, name=f"{name}_{limit}")
        )
    add_hover(plot, bars)
    return plot


def _create_timeline() -> figure:
    """Return the figure of the passes of a step, with a row per pipeline rank."""
    plot = create_figure(
        "timeline", 300, "xpan,xbox_zoom,xwheel_zoom,reset,save", x=(0, 1), y=(1, 0),
        x_axis_label="time, s", y_axis_label="pipeline rank",
    )  # fmt: skip
    bars = plot.quad(
        **EDGES, fill_color="color", line_color="color", line_width=0.4,
        source=_create_source("timeline_data", *EDGES, "color", "i", "term"), name="timeline_parts",
    )  # fmt: skip
    frames = _create_source("frames", *EDGES)
    plot.quad(**EDGES, fill_color=None, line_width=0.6, source=frames, name="frame_lines")
    plot.text(
        "x", "y", text="text", source=_create_source("numbers", "x", "y", "text"), text_align="center",
        text_baseline="middle", text_color="white", text_font_size="11px", text_font=value(FONT), name="numbers_text",
    )  # fmt: skip
    plot.yaxis.ticker = FixedTicker(ticks=[], name="timeline_rows")
    plot.ygrid.visible = False
    plot.toolbar.active_drag = None
    add_hover(plot, bars)
    return plot


def _create_rank_map() -> figure:
    """Return the map of all GPUs with frames around nodes, NVLink domains and a parallel group."""
    plot = create_figure("ranks", 340, "pan,box_zoom,wheel_zoom,reset,save", x=(0, 1), y=(1, 0))
    plot.min_border_left = 16
    cells = _create_source("gpus", *EDGES, "color")
    bars = plot.quad(**EDGES, fill_color="color", line_color=None, source=cells, name="gpus_cells")
    bars.nonselection_glyph = bars.selection_glyph = None
    for name, width in (("nodes", 0.7), ("domains", 1.3), ("peers", 2.4)):
        boxes = _create_source(name, *EDGES)
        plot.quad(**EDGES, fill_color=None, line_width=width, source=boxes, name=f"{name}_lines")
    plot.text(
        "x", "y", text="text", source=_create_source("gpu_words", "x", "y", "text"), text_align="center",
        text_baseline="middle", text_color="white", text_font_size="11px", text_font=value(FONT), name="gpu_words_text",
    )  # fmt: skip
    plot.axis.visible = False
    plot.grid.visible = False
    add_hover(plot, bars)
    plot.add_tools(TapTool(renderers=[bars]))
    plot.toolbar.active_drag = None
    return plot


def _create_curve(name: str, *, log: bool, height: int = 230) -> figure:
    """Return a figure of a curve with dots, or of two for strong and weak scaling; `log` is for the x axis."""
    plot = create_figure(name, height, x=(1, 2), y=(0, 1), x_axis_type="log" if log else "linear")
    for part in ("strong", "weak") if name.startswith("sizes_") else ("curve",):
        plot.line(
            "x", "y", source=_create_source(f"{name}_{part}", "x", "y"), line_width=2.2, name=f"{name}_{part}_line",
            line_dash="dashed" if part == "weak" else "solid",
        )  # fmt: skip
        dots = plot.scatter(
            "x", "y", source=_create_source(f"{name}_{part}_points", "x", "y", "fill", "edge"), size=9,
            fill_color="fill", line_color="edge", line_width=1.8, name=f"{name}_{part}_dots",
        )  # fmt: skip
        add_hover(plot, dots)
    plot.xaxis.ticker = FixedTicker(ticks=[], name=f"{name}_ticks")
    plot.yaxis.formatter = NumeralTickFormatter(format=NUMBER)
    plot.output_backend = "svg"
    return plot


def _create_live_curve(name: str) -> figure:
    """Return a figure of a curve against steps, which is updated while a run trains."""
    plot = create_figure(name, 260, "xpan,xbox_zoom,reset,save", x=(0, 1), y=(0, 1), x_axis_label="step")
    source = _create_source(f"{name}_data", "x", "y")
    plot.line("x", "y", source=source, line_width=1.8, name=f"{name}_line")
    points = plot.scatter("x", "y", source=source, size=7, fill_alpha=0, line_alpha=0, name=f"{name}_points")
    plot.xaxis.ticker = BasicTicker(desired_num_ticks=6, num_minor_ticks=0)
    plot.xaxis.formatter = plot.yaxis.formatter = NumeralTickFormatter(format=NUMBER)
    plot.toolbar.active_drag = None
    add_hover(plot, points, point_policy="snap_to_data", mode="vline")
    return plot
