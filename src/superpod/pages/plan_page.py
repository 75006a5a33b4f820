"""Renders the HTML pages of a plan and of a single layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from superpod.pages import figures, layout_detail, layout_points
from superpod.pages.page import Page, render
from superpod.planner import explain, intervals, memory, plans, predict
from superpod.planner.hardware import GIB
from superpod.planner.planned_job import PlannedJob
from superpod.planner.predict import Prediction
from superpod.planner.search import SearchResult

ROWS_WITHOUT_FIT = 20
"""Number of rows in the table if no layout fits."""
Explanations: TypeAlias = Sequence[tuple[str, Sequence[str]]]
"""(heading, sentences below it)."""

LAYOUT, PRECISION = "{layout}", "{precision}"
"""Placeholders in a command, which the page's script replaces."""
ROWS, DETAILED = 100, 12
"""Maximum numbers of layouts in the table, and of layouts with details."""
MAP_BY = (
    *(("tp", "TP"), ("pp", "PP"), ("vp", "VP"), ("cp", "CP"), ("ep", "EP"), ("mbs", "micro-batch size")),
    *(("recompute", "recomputation"), ("sharding", "sharding"), ("split", "ends of the pipeline")),
    *(("precision", "precision"), ("fits", "whether it fits")),
)
SCRIPTS = ("plan/filter.js", "plan/map.js", "plan/table.js", "plan/layout.js", "plan/timeline.js", "plan/ranks.js")
LAYOUT_SCRIPTS = tuple(name for name in SCRIPTS if name != "plan/table.js")
LAYOUT_SECTIONS = (
    *(("layout", "This layout"), ("time", "Time"), ("timeline", "Timeline"), ("memory", "Memory")),
    *(("gpus", "GPUs"), ("scaling", "Scaling"), ("sensitivity", "Sensitivity")),
)


def render_plan(
    searches: Mapping[str, SearchResult], *, command: str, explain_command: str, variants: bool = False
) -> str:
    """Return the HTML page of a plan. If no layout fits, its table lists the layouts with the least memory.

    Args:
        searches: {precision: search result}, the fastest first.
        command: command line that generated the page.
        explain_command: command line for the page of a single layout, with placeholders `LAYOUT` and `PRECISION`.
        variants: whether to include variants of layouts, as in `plans.rank_layouts`.
    """
    entries = plans.rank_layouts(dict(searches), variants=variants)[:ROWS] or _rank_by_memory(searches)
    jobs = [search.job_at(i).replace(precision=precision) for precision, search, i in entries]
    predictions = predict.many(jobs)
    first_search = next(iter(searches.values()))
    legal, fit = sum(map(len, searches.values())), sum(len(search.ranked) for search in searches.values())
    data = {
        **_shared_data(jobs[0], explain_command),
        "map": layout_points.map_points(searches),
        "rows": [_row(job, prediction) for job, prediction in zip(jobs, predictions, strict=True)],
        "layouts": layout_detail.describe_layouts(jobs[:DETAILED]),
    }
    lead = f"{_describe(jobs[0], ' or '.join(searches))}: {legal:,} legal layouts, {fit:,} fit"
    page = Page(
        "plan/plan.html", _title(jobs[0]), lead, command,
        (("all", "All layouts"), ("table", "Table"), *LAYOUT_SECTIONS),
        SCRIPTS, data, _context(jobs, predictions, _explanations(first_search), variants),
    )  # fmt: skip
    return render(page, figures.create_plan_figures() | figures.create_layout_figures())


def render_layout(job: PlannedJob, *, command: str, explanations: Explanations = ()) -> str:
    """Return the HTML page of a legal layout, with `explanations` at the top."""
    data = {**_shared_data(job, ""), "layouts": layout_detail.describe_layouts([job])}
    page = Page(
        "plan/plan.html", _title(job), _describe(job, job.precision), command, LAYOUT_SECTIONS,
        LAYOUT_SCRIPTS, data, {"says": explanations},
    )  # fmt: skip
    return render(page, figures.create_layout_figures())


def _rank_by_memory(searches: Mapping[str, SearchResult]) -> list[tuple[str, SearchResult, int]]:
    """Return (precision, search, index) of the layouts of the first precision that reserve the least memory."""
    precision, search = next(iter(searches.items()))
    return [(precision, search, int(i)) for i in np.argsort(search.reserved)[:ROWS_WITHOUT_FIT]]


def _explanations(search: SearchResult) -> list[tuple[str, list[str]]]:
    """Return the reasons why the first layout is the fastest, and the faster ones that do not fit."""
    if not len(search.ranked):
        return [("No layout fits", [plans.explain_no_fit(search)])]
    reasons = [line for line in explain.explain_layout(search, int(search.ranked[0])) if "--layout" not in line]
    return [
        ("Why the first layout is the fastest", reasons),
        ("Faster, but tight or too large", explain.faster_layouts(search)),
    ]


def _title(job: PlannedJob) -> str:
    return f"{job.model.name} on {job.gpus:,} × {job.node.gpu.name.upper()}"


def _describe(job: PlannedJob, precision: str) -> str:
    return f"{job.task}, seq {job.seq:,}, global batch {job.layout.gbs:,}, {precision}, {job.fabric.name}"


def _shared_data(job: PlannedJob, explain_command: str) -> dict[str, Any]:
    """Return the data that is the same for all layouts of a page."""
    return {
        "seq": job.seq,
        "gbs": job.layout.gbs,
        "gpus": job.gpus,
        "limit_gib": memory.limit(job) / GIB,
        "explain": explain_command,
    }


def _row(job: PlannedJob, prediction: Prediction) -> dict[str, Any]:
    """Return the data of a row of the table, for the filter and the selection."""
    layout = job.layout
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "mbs")}
    degrees |= {"vp": layout.vp or 1, "etp": layout.etp or layout.tp}
    return layout_detail.summarize(job, prediction) | {"degrees": degrees}


def _context(
    jobs: Sequence[PlannedJob], predictions: Sequence[Prediction], explanations: Explanations, variants: bool
) -> dict[str, Any]:
    """Return the variables of the template. A table cell is (text, number by which the script sorts, or None)."""
    with_precision = len({job.precision for job in jobs}) > 1
    rows = []
    columns: list[str] = []
    for job, p in zip(jobs, predictions, strict=True):
        seconds, x = p.step_time_s or 0.0, job.layout
        rate, mfu, gib = p.tokens_per_s_per_gpu or 0.0, 100 * (p.mfu or 0.0), p.reserved_gib_max or 0.0
        bubble = 100 * p.terms_s["pp_bubble"] / seconds
        cells: dict[str, tuple[str, float | None]] = {}
        if with_precision:
            cells["precision"] = (job.precision, None)
        step_text = intervals.text(seconds, p.step_time_low_s or 0.0, p.step_time_high_s or 0.0, unit="")
        cells["step, s"] = (step_text, seconds)
        cells["tokens/s/GPU"] = (f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}", rate)
        cells |= {name: (f"{v:.1f}", v) for name, v in (("MFU, %", mfu), ("GiB", gib), ("bubble, %", bubble))}
        degrees = {"TP": x.tp, "PP": x.pp, "VP": x.vp or 1, "CP": x.cp, "EP": x.ep, "mbs": x.mbs}
        if not job.model.is_moe:
            del degrees["EP"]
        cells |= {name: (str(size), size) for name, size in degrees.items()}
        columns = ["no.", "layout", *cells]
        rows.append({"title": explain.title(x), "cells": [*cells.values()]})
    return {"rows": rows, "columns": columns, "map_by": MAP_BY, "says": explanations, "variants": variants}
