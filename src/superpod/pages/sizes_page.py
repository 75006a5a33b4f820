"""The pages of `recipes scale` and `recipes cost`: few figures, and the table that the terminal shows too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from superpod.pages import figures
from superpod.pages.page import Page, render
from superpod.planner import explain, scaling
from superpod.planner.planned_job import PlannedJob
from superpod.planner.scaling import Point

SCALE_TITLES = ("scaling", "GPUs", "global batch", "step, s", "tokens/s", "tokens/s/GPU", "efficiency, %", "layout")


def of_scale(job: PlannedJob, points: Sequence[Point], *, command: str) -> str:
    """The page of throughput over sizes; `job` is the run at the smallest."""
    data = {"points": [_point(point) for point in points]}
    words = {
        "titles": SCALE_TITLES,
        "rows": [_row(point) for point in points],
        "plots": ("rate", "efficiency"),
        "family": "sizes",
    }
    lead = f"{job.task}, seq {job.seq:,}, {job.precision}, {job.fabric.name}: the best layout of each size"
    title = f"{job.model.name} on {points[0].gpus:,} to {points[-1].gpus:,} × {job.node.gpu.name.upper()}"
    sections = (("curves", "Curves"), ("table", "Table"))
    page = Page("scale.html", title, lead, command, sections, ("sizes.js",), data, words)
    return render(page, figures.scale())


def _point(point: Point) -> dict[str, Any]:
    title = "" if point.layout is None else explain.title(point.layout)
    return scaling.as_json(point) | {"layout": None, "title": title}


def _row(p: Point) -> list[str]:
    if p.seconds is None or p.layout is None:
        return [p.kind, f"{p.gpus:,}", f"{p.gbs:,}", "-", "-", "-", "-", p.reason]
    figures = (
        f"{p.seconds:.3f}",
        f"{p.tokens_per_s:,.0f}",
        f"{p.tokens_per_s / p.gpus:,.0f}",
        f"{100 * p.efficiency:.1f}",
    )
    return [p.kind, f"{p.gpus:,}", f"{p.gbs:,}", *figures, explain.title(p.layout)]


def of_cost(
    model: str, budgets: Sequence[Mapping[str, Any]], *, titles: Sequence[str], rows: Sequence[Sequence[str]],
    assumptions: str, currency: str, command: str,
) -> str:  # fmt: skip
    """The page of a token budget.

    Args:
        model: its name.
        budgets: of each kind of GPU its name, its layout's title, whether it fits, and figures of `planner/cost.py`.
        titles, rows: the table as the terminal shows it.
        assumptions: what the figures take for granted.
        currency: of the money.
        command: the command line that made the page.
    """
    plots = tuple(name.removeprefix("cost_") for name in figures.cost())
    words = {"titles": titles, "rows": rows, "plots": plots, "family": "cost"}
    sections = (("curves", "Figures"), ("table", "Table"))
    data = {"budgets": list(budgets), "currency": currency}
    page = Page("scale.html", f"What {model} takes", assumptions, command, sections, ("budget.js",), data, words)
    return render(page, figures.cost())
