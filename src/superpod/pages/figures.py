"""The empty figures of a page: Bokeh models that the scripts in `assets/` fill with the data of the page.

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

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
NUMBER = "0,0.[00]"
"""Format of tick labels: 12,500 or 0.5."""
SCALES = ("seq", "gbs", "far", "near", "imbalance")
"""Keys of the sensitivity curves in `sensitivity.py`, one figure each."""


def plan() -> dict[str, figure]:
    """Return the figures for all layouts of a plan, by their keys in the template."""
    return {"map": _map()}


def layout() -> dict[str, figure]:
    """Return the figures for one layout."""
    return {
        "terms": _bars("terms", height=190),
        "memory": _bars("memory", height=260, line=True),
        "timeline": _timeline(),
        "ranks": _ranks(),
        **{f"scaling_{key}": _curve(f"scaling_{key}", log=True) for key in ("strong", "weak")},
        **{f"sensitivity_{key}": _curve(f"sensitivity_{key}", log=key != "imbalance") for key in SCALES},
    }


def scale() -> dict[str, figure]:
    """Return the figures of throughput against cluster size."""
    return {f"sizes_{key}": _curve(f"sizes_{key}", log=True, height=320) for key in ("rate", "efficiency")}


def cost() -> dict[str, figure]:
    """Return the figures of a cost estimate, with a bar per GPU type."""
    return {f"cost_{key}": _bars(f"cost_{key}", height=160) for key in ("days", "gpu_hours", "energy_mwh", "money")}


def live() -> dict[str, figure]:
    """Return the figures for the live curves of a run."""
    return {f"live_{key}": _live_curve(f"live_{key}") for key in ("loss", "rate")}


def _base_figure(name: str, height: int, tools: str = "", **more: Any) -> figure:
    plot = figure(
        name=name, height=height, sizing_mode="stretch_width", tools=tools, toolbar_location="right" if tools else None,
        outline_line_color=None, min_border_left=74, min_border_right=16, min_border_top=8, **more,
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


def _source(name: str, *columns: str) -> ColumnDataSource:
    return ColumnDataSource({column: [] for column in columns}, name=name)


def _hover(plot: figure, *glyphs: Any, **how: Any) -> None:
    """Make the figure report the item under the pointer, for the tooltips of `assets/core.js`."""
    plot.add_tools(HoverTool(tooltips=None, renderers=[*glyphs], **how))


def _map() -> figure:
    plot = _base_figure(
        "map", 460, "pan,box_zoom,wheel_zoom,reset,save", x_axis_type="log", y_axis_type="log",
        x_range=Range1d(start=1, end=100, name="map_x"), y_range=Range1d(start=1, end=100, name="map_y"),
        x_axis_label="reserved memory, maximum of all ranks, GiB", y_axis_label="step time, s",
    )  # fmt: skip
    source = _source("map_data", "gib", "seconds", "color")
    mapper = LinearColorMapper(palette=["#888888"], low=0, high=1, name="map_colors")
    points = plot.scatter("gib", "seconds", source=source, size=4, line_color=None, fill_alpha=0.75, name="map_points")
    points.glyph.fill_color = {"field": "color", "transform": mapper}
    points.nonselection_glyph = points.selection_glyph = None
    plot.step("gib", "seconds", source=_source("frontier", "gib", "seconds"), line_width=1.6, mode="after", name="edge")
    plot.scatter(
        "gib", "seconds", source=_source("chosen", "gib", "seconds"), size=15, marker="circle", fill_alpha=0,
        line_width=2.5, name="ring",
    )  # fmt: skip
    plot.add_layout(Span(dimension="height", line_dash="dashed", line_width=1.5, location=1, name="map_limit"))
    for axis in plot.axis:
        axis.ticker = LogTicker(desired_num_ticks=8, num_minor_ticks=1)
        axis.formatter = BasicTickFormatter()
    plot.add_layout(
        Label(
            x=1,
            y=8,
            y_units="screen",
            x_offset=6,
            text="",
            text_font=FONT,
            text_font_size="12px",
            name="map_words",
        )
    )
    _hover(plot, points, point_policy="snap_to_data")
    plot.add_tools(TapTool(renderers=[points]))
    plot.toolbar.active_drag = None
    return plot


def _bars(name: str, height: int, *, line: bool = False) -> figure:
    """Return a figure of horizontal stacked bars."""
    plot = _base_figure(
        name,
        height,
        x_range=Range1d(start=0, end=1, name=f"{name}_x"),
        y_range=Range1d(start=1, end=0, name=f"{name}_y"),
    )
    columns = ("left", "right", "bottom", "top", "color", "label", "value", "row", "alpha")
    bars = plot.quad(
        left="left", right="right", bottom="bottom", top="top", fill_color="color", fill_alpha="alpha",
        line_color=None, source=_source(f"{name}_data", *columns), name=f"{name}_bars",
    )  # fmt: skip
    plot.yaxis.ticker = FixedTicker(ticks=[], name=f"{name}_rows")
    plot.ygrid.visible = False
    plot.xaxis.ticker = BasicTicker(desired_num_ticks=5 if height < 180 else 8, num_minor_ticks=0)
    plot.xaxis.formatter = NumeralTickFormatter(format=NUMBER)
    plot.output_backend = "svg"
    if line:
        for mark in ("limit", "gpu"):
            plot.add_layout(
                Span(dimension="height", line_dash="dashed", line_width=1.5, location=0, name=f"{name}_{mark}")
            )
    _hover(plot, bars)
    return plot


def _timeline() -> figure:
    plot = _base_figure(
        "timeline", 300, "xpan,xbox_zoom,xwheel_zoom,reset,save", x_range=Range1d(start=0, end=1, name="timeline_x"),
        y_range=Range1d(start=1, end=0, name="timeline_y"), x_axis_label="time, s", y_axis_label="pipeline rank",
    )  # fmt: skip
    columns = ("left", "right", "bottom", "top", "color", "i", "term")
    bars = plot.quad(
        left="left", right="right", bottom="bottom", top="top", fill_color="color", line_color="color", line_width=0.4,
        source=_source("timeline_data", *columns), name="timeline_parts",
    )  # fmt: skip
    frames = _source("frames", "left", "right", "bottom", "top")
    plot.quad(
        left="left", right="right", bottom="bottom", top="top", fill_color=None, line_width=0.6, source=frames,
        name="frame_lines",
    )  # fmt: skip
    plot.text(
        "x", "y", text="text", source=_source("numbers", "x", "y", "text"), text_align="center",
        text_baseline="middle", text_color="white", text_font_size="11px", text_font=value(FONT), name="numbers_text",
    )  # fmt: skip
    plot.yaxis.ticker = FixedTicker(ticks=[], name="timeline_rows")
    plot.ygrid.visible = False
    plot.toolbar.active_drag = None
    _hover(plot, bars)
    return plot


def _ranks() -> figure:
    plot = _base_figure(
        "ranks", 340, "pan,box_zoom,wheel_zoom,reset,save", x_range=Range1d(start=0, end=1, name="ranks_x"),
        y_range=Range1d(start=1, end=0, name="ranks_y"),
    )  # fmt: skip
    plot.min_border_left = 16
    bars = plot.quad(
        left="left", right="right", bottom="bottom", top="top", fill_color="color", line_color=None,
        source=_source("gpus", "left", "right", "bottom", "top", "color"), name="gpus_cells",
    )  # fmt: skip
    bars.nonselection_glyph = bars.selection_glyph = None
    for name, width in (("nodes", 0.7), ("domains", 1.3), ("peers", 2.4)):
        boxes = _source(name, "left", "right", "bottom", "top")
        plot.quad(
            left="left", right="right", bottom="bottom", top="top", fill_color=None, line_width=width, source=boxes,
            name=f"{name}_lines",
        )  # fmt: skip
    plot.text(
        "x", "y", text="text", source=_source("gpu_words", "x", "y", "text"), text_align="center",
        text_baseline="middle", text_color="white", text_font_size="11px", text_font=value(FONT), name="gpu_words_text",
    )  # fmt: skip
    plot.axis.visible = False
    plot.grid.visible = False
    _hover(plot, bars)
    plot.add_tools(TapTool(renderers=[bars]))
    plot.toolbar.active_drag = None
    return plot


def _curve(name: str, *, log: bool, height: int = 230) -> figure:
    plot = _base_figure(
        name, height, x_axis_type="log" if log else "linear", x_range=Range1d(start=1, end=2, name=f"{name}_x"),
        y_range=Range1d(start=0, end=1, name=f"{name}_y"),
    )  # fmt: skip
    for part in ("strong", "weak") if name.startswith("sizes_") else ("curve",):
        plot.line(
            "x",
            "y",
            source=_source(f"{name}_{part}", "x", "y"),
            line_width=2.2,
            name=f"{name}_{part}_line",
            line_dash="dashed" if part == "weak" else "solid",
        )
        points_glyph = plot.scatter(
            "x", "y", source=_source(f"{name}_{part}_points", "x", "y", "fill", "edge"), size=9, fill_color="fill",
            line_color="edge", line_width=1.8, name=f"{name}_{part}_dots",
        )  # fmt: skip
        _hover(plot, points_glyph)
    plot.xaxis.ticker = FixedTicker(ticks=[], name=f"{name}_ticks")
    plot.yaxis.formatter = NumeralTickFormatter(format=NUMBER)
    plot.output_backend = "svg"
    return plot


def _live_curve(name: str) -> figure:
    """Return a figure of a live curve against steps."""
    plot = _base_figure(
        name, 260, "xpan,xbox_zoom,reset,save", x_range=Range1d(start=0, end=1, name=f"{name}_x"),
        y_range=Range1d(start=0, end=1, name=f"{name}_y"), x_axis_label="step",
    )  # fmt: skip
    source = _source(f"{name}_data", "x", "y")
    plot.line("x", "y", source=source, line_width=1.8, name=f"{name}_line")
    shown = plot.scatter("x", "y", source=source, size=7, fill_alpha=0, line_alpha=0, name=f"{name}_points")
    plot.xaxis.ticker = BasicTicker(desired_num_ticks=6, num_minor_ticks=0)
    plot.xaxis.formatter = plot.yaxis.formatter = NumeralTickFormatter(format=NUMBER)
    plot.toolbar.active_drag = None
    _hover(plot, shown, point_policy="snap_to_data", mode="vline")
    return plot
