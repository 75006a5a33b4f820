"""The page of a plan, and that of one layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from superpod.pages import figures, layout_detail, layout_points
from superpod.pages.page import Page, render
from superpod.planner import explain, memory, plans, predict
from superpod.planner.hardware import GIB
from superpod.planner.planned_job import PlannedJob
from superpod.planner.predict import Prediction
from superpod.planner.search import SearchResult

SMALLEST = 20
"""Rows of a table when nothing fits."""
Says: TypeAlias = Sequence[tuple[str, Sequence[str]]]

LAYOUT, PRECISION = "{layout}", "{precision}"
"""Stand in a command for what the page fills in."""
ROWS, DETAILED = 100, 12
"""Layouts in the table, and those of them whose details lie in the page."""
MAP_BY = (
    *(("tp", "TP"), ("pp", "PP"), ("vp", "VP"), ("cp", "CP"), ("ep", "EP"), ("mbs", "micro-batch size")),
    *(("recompute", "recomputation"), ("sharding", "sharding"), ("split", "ends of the pipeline")),
    *(("precision", "precision"), ("fits", "whether it fits")),
)
SCRIPTS = ("filter.js", "map.js", "table.js", "layout.js", "timeline.js", "ranks.js")
LAYOUT_SECTIONS = (
    *(("layout", "This layout"), ("time", "Time"), ("timeline", "Timeline"), ("memory", "Memory")),
    *(("gpus", "GPUs"), ("scaling", "Scaling"), ("sensitivity", "Sensitivity")),
)


def of_plan(searches: Mapping[str, SearchResult], *, command: str, explain_command: str, variants: bool = False) -> str:
    """The page of a plan in one or several precisions; where nothing fits, its table has the smallest layouts.

    Args:
        searches: by precision, the fastest first.
        command: the command line that made it.
        explain_command: one that makes the page of a single layout, with `LAYOUT` and `PRECISION` in their places.
        variants: as of `plans.ranked`.
    """
    entries = plans.ranked(dict(searches), variants=variants)[:ROWS] or _smallest(searches)
    jobs = [search.job_of(i).replace(precision=precision) for precision, search, i in entries]
    predictions = predict.many(jobs)
    best = next(iter(searches.values()))
    legal, fit = sum(map(len, searches.values())), sum(len(search.ranked) for search in searches.values())
    data = {
        **_run(jobs[0], explain_command),
        "map": layout_points.of(searches),
        "rows": [_row(job, prediction) for job, prediction in zip(jobs, predictions, strict=True)],
        "layouts": layout_detail.of(jobs[:DETAILED]),
    }
    lead = f"{_what(jobs[0], ' or '.join(searches))}: {legal:,} legal layouts, {fit:,} fit"
    page = Page(
        "plan.html", _title(jobs[0]), lead, command, (("all", "All layouts"), ("table", "Table"), *LAYOUT_SECTIONS),
        SCRIPTS, data, _words(jobs, predictions, _says(best), variants),
    )  # fmt: skip
    return render(page, figures.plan() | figures.layout())


def of_layout(job: PlannedJob, *, command: str, says: Says = ()) -> str:
    """The page of one legal layout; `says` are the sentences at its top, under their headings."""
    data = {**_run(job, ""), "layouts": layout_detail.of([job])}
    page = Page(
        "plan.html", _title(job), _what(job, job.precision), command, LAYOUT_SECTIONS,
        ("filter.js", "map.js", "layout.js", "timeline.js", "ranks.js"), data, {"says": says},
    )  # fmt: skip
    return render(page, figures.layout())


def _smallest(searches: Mapping[str, SearchResult]) -> list[tuple[str, SearchResult, int]]:
    """Of the first precision, the layouts that come nearest to fitting."""
    precision, search = next(iter(searches.items()))
    return [(precision, search, int(i)) for i in np.argsort(search.reserved)[:SMALLEST]]


def _says(best: SearchResult) -> list[tuple[str, list[str]]]:
    """Why the first layout wins, and what would be faster: what the terminal says too."""
    if not len(best.ranked):
        return [("Nothing fits", [plans.closest(best)])]
    why = [line for line in explain.why(best, int(best.ranked[0])) if "--layout" not in line]
    return [("Why the first one wins", why), ("Faster, but too large", explain.misses(best))]


def _title(job: PlannedJob) -> str:
    return f"{job.model.name} on {job.gpus:,} × {job.node.gpu.name.upper()}"


def _what(job: PlannedJob, precision: str) -> str:
    return f"{job.task}, seq {job.seq:,}, global batch {job.layout.gbs:,}, {precision}, {job.fabric.name}"


def _run(job: PlannedJob, explain_command: str) -> dict[str, Any]:
    """What all layouts of a page share."""
    return {
        "seq": job.seq,
        "gbs": job.layout.gbs,
        "gpus": job.gpus,
        "limit_gib": memory.limit(job) / GIB,
        "explain": explain_command,
    }


def _row(job: PlannedJob, prediction: Prediction) -> dict[str, Any]:
    x = job.layout
    return {
        "title": explain.title(x),
        "option": layout_points.option(x),
        "precision": job.precision,
        "degrees": {
            "tp": x.tp,
            "pp": x.pp,
            "vp": x.vp or 1,
            "cp": x.cp,
            "ep": x.ep,
            "etp": x.etp or x.tp,
            "mbs": x.mbs,
        },
        "verdict": prediction.outcome,
        "seconds": prediction.step_time_s,
        "rate": prediction.tokens_per_s_per_gpu,
        "mfu": prediction.mfu,
        "gib": prediction.reserved_gib_max,
    }


def _words(jobs: Sequence[PlannedJob], predictions: Sequence[Prediction], says: Says, variants: bool) -> dict[str, Any]:
    """The table for readers without scripts too: the cells of every row as (text, number to sort by)."""
    several = len({job.precision for job in jobs}) > 1
    titles = ["no.", "layout", *["precision"] * several, "step, s", "tokens/s/GPU", "MFU, %", "GiB", "bubble, %"]
    moe = jobs[0].model.is_moe
    degrees = ["TP", "PP", "VP", "CP", *["EP"] * moe, "mbs"]
    rows = []
    for job, p in zip(jobs, predictions, strict=True):
        seconds, x = p.step_time_s or 0.0, job.layout
        rate, mfu, gib = p.tokens_per_s_per_gpu or 0.0, 100 * (p.mfu or 0.0), p.reserved_gib_max or 0.0
        bubble = 100 * p.terms_s["pp_bubble"] / seconds
        figures = (
            f"{seconds:.3f}",
            f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}",
            *(f"{v:.1f}" for v in (mfu, gib, bubble)),
        )
        cells: list[tuple[str, float | None]] = [(job.precision, None)] * several
        cells += zip(figures, (seconds, rate, mfu, gib, bubble), strict=True)
        cells += [(str(v), v) for v in (x.tp, x.pp, x.vp or 1, x.cp, *[x.ep] * moe, x.mbs)]
        rows.append({"title": explain.title(x), "cells": cells})
    return {"rows": rows, "columns": [*titles, *degrees], "map_by": MAP_BY, "says": says, "variants": variants}
