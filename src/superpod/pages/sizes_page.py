"""Renders the HTML pages of `recipes scale` and `recipes cost`: figures, and the table that the command prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from superpod.pages import figures
from superpod.pages.page import Page, render
from superpod.planner import explain, scaling
from superpod.planner.planned_job import PlannedJob
from superpod.planner.scaling import Point

SCALE_TITLES = ("scaling", "GPUs", "global batch", "step, s", "tokens/s", "tokens/s/GPU", "efficiency, %", "layout")


def render_scale(job: PlannedJob, points: Sequence[Point], *, command: str) -> str:
    """Return the HTML page of throughput against cluster size.

    Args:
        job: the job with the fewest GPUs.
        points: the best layout of each size.
        command: command line that generated the page.
    """
    data = {"points": [_point(point) for point in points]}
    context = {
        "titles": SCALE_TITLES,
        "rows": [_row(point) for point in points],
        "plots": ("rate", "efficiency"),
        "family": "sizes",
    }
    lead = f"{job.task}, seq {job.seq:,}, {job.fabric.name}: the best layout for each number of GPUs"
    lead = "; ".join([lead, *dict.fromkeys(point.extrapolation for point in points if point.extrapolation)])
    title = f"{job.model.name} on {points[0].gpus:,} to {points[-1].gpus:,} × {job.node.gpu.name.upper()}"
    sections = (("curves", "Curves"), ("table", "Table"))
    page = Page("scale.html", title, lead, command, sections, ("sizes.js",), data, context)
    return render(page, figures.create_scaling_figures())


def _point(point: Point) -> dict[str, Any]:
    title = "" if point.layout is None else explain.title(point.layout)
    return scaling.as_json(point) | {"layout": None, "title": title}


def _row(p: Point) -> list[str]:
    if p.seconds is None or p.layout is None:
        return [p.kind, f"{p.gpus:,}", f"{p.gbs:,}", "-", "-", "-", "-", p.reason]
    rates = (f"{p.tokens_per_s:,.0f}", f"{p.tokens_per_s / p.gpus:,.0f}", f"{100 * p.efficiency:.1f}")
    return [p.kind, f"{p.gpus:,}", f"{p.gbs:,}", p.step_time, *rates, f"{explain.title(p.layout)}, {p.precision}"]


def render_cost(
    model: str, budgets: Sequence[Mapping[str, Any]], *, titles: Sequence[str], rows: Sequence[Sequence[str]],
    assumptions: str, currency: str, command: str,
) -> str:  # fmt: skip
    """Return the HTML page of the cost of a token budget.

    Args:
        model: name of the model.
        budgets: for each GPU type, its name, the title of its layout, whether it fits, and the figures of
            `planner/cost.py`.
        titles: column titles of the table.
        rows: rows of the table.
        assumptions: sentence that states the assumptions of the estimate.
        currency: currency of the cost.
        command: command line that generated the page.
    """
    drawn = figures.create_cost_figures()
    plots = tuple(name.removeprefix("cost_") for name in drawn)
    context = {"titles": titles, "rows": rows, "plots": plots, "family": "cost"}
    sections = (("curves", "Figures"), ("table", "Table"))
    data = {"budgets": list(budgets), "currency": currency}
    page = Page("scale.html", f"Cost of {model}", assumptions, command, sections, ("budget.js",), data, context)
    return render(page, drawn)
