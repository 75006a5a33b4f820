"""Plans: layout searches in one or several precisions, and their results as sentences and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from superpod.errors import UserError
from superpod.planner import columns, explain, intervals, memory, predict, suggestions
from superpod.planner.hardware.precisions import auto_precisions
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.planner.predict import Prediction
from superpod.planner.rules import pipeline_layout, textbook
from superpod.planner.search import SearchResult, Space
from superpod.planner.search import search as search_one
from superpod.planner.timing import steptime

SCHEMA = 1
PAIRED_WIDTH = 0.25
"""Width of the interval of two layouts' ratio of step times relative to that of one: they share most of the error."""


def search(
    job: PlannedJob, *, auto: bool = False, fixed: dict[str, Any] | None = None, memory_cap_gib: float | None = None
) -> dict[str, SearchResult]:
    """Search all legal layouts in the job's precision, or with `auto` in several; the fastest precision comes first.

    Raises:
        UserError: no layout is legal in any of the precisions, or a fixed key is invalid.
    """
    if memory_cap_gib is not None and not 0 < memory_cap_gib < 1e6:
        gpu = job.node.gpu
        hint = f"{gpu.name} has {gpu.hbm_usable_gib:.1f} GiB"
        raise UserError(f"--memory-cap must be greater than 0 GiB and finite, not {memory_cap_gib:g}", hint)
    space = Space(fixed=fixed or {})
    results: dict[str, SearchResult] = {}
    refusals: list[UserError] = []
    for precision in auto_precisions(job.node.gpu) if auto else (job.precision,):
        try:
            results[precision] = search_one(job.replace(precision=precision), space, memory_cap_gib=memory_cap_gib)
        except UserError as refused:
            refusals.append(refused)
    if not results:
        raise refusals[0]
    fastest_seconds = {p: float(f.seconds[f.ranked[0]]) if len(f.ranked) else np.inf for p, f in results.items()}
    return dict(sorted(results.items(), key=lambda item: fastest_seconds[item[0]]))


MAX_RANKED = 1000
"""Maximum number of listed layouts per precision."""


def best(job: PlannedJob, **search_options: Any) -> PlannedJob:
    """Return the run with the fastest layout that fits; `search_options` are keyword arguments for `search`.

    Raises:
        UserError: no layout fits; the message says what would make one fit.
    """
    results = search(job, **search_options)
    precision, first = next(iter(results.items()))
    if not len(first.ranked):
        raise UserError(explain_no_fit(first))
    return first.job_at(int(first.ranked[0])).replace(precision=precision)


def seconds(job: PlannedJob) -> float:
    """Return the predicted step time of a legal run in seconds.

    Raises:
        UserError: the run is illegal.
    """
    prediction = predict.one(job)
    if prediction.step_time_s is None:
        raise UserError(prediction.reason)
    return prediction.step_time_s


def rank_layouts(results: dict[str, SearchResult], *, variants: bool = False) -> list[tuple[str, SearchResult, int]]:
    """Return the layouts that fit in all precisions, the fastest first: (precision, search result, index).

    Only the best of the layouts with the same parallel degrees is included, unless `variants`: layouts that differ
    only in what they recompute would fill the table.
    """
    every = [
        (p, f, int(i)) for p, f in results.items() for i in (f.ranked if variants else f.best_per_degrees)[:MAX_RANKED]
    ]
    return sorted(every, key=lambda entry: float(entry[1].seconds[entry[2]])) if len(results) > 1 else every


def mfu(job: PlannedJob, seconds: float) -> float:
    """Return the model FLOPs utilization (see `steptime.mfu`)."""
    return float(steptime.mfu(job, seconds))


def explain_no_fit(result: SearchResult) -> str:
    """Return the message if no layout fits: the layout that needs the least memory, and what would make it fit."""
    i = int(np.argmin(result.reserved))
    job = result.job_at(i)
    short = suggestions.describe_shortage(job, predict.one(job), suggestions.advise_more_memory(job))
    return f"no layout fits; the one with the least memory is {explain.title(job.layout)}, {short}"


def equivalent_layouts(result: SearchResult) -> str:
    """Name the simplest of the layouts that cannot be told apart from the best one; "" = it is the best one."""
    best = int(result.ranked[0])
    low, high = intervals.from_job(result.job).time_factors(result.job.gpus)
    limit = float(result.seconds[best]) * float(high / low) ** PAIRED_WIDTH
    close = [int(i) for i in result.best_per_degrees if result.seconds[i] <= limit]
    simplest = min(close, key=lambda i: _complexity(result.layout(i)))
    if len(close) == 1 or simplest == best:
        return ""
    slower = float(result.seconds[simplest] / result.seconds[best]) - 1
    return (
        f"{len(close)} layouts are within the planner's error of the best; the simplest of them is "
        f"{explain.title(result.layout(simplest))}, {slower:.1%} slower"
    )


def _complexity(layout: Layout) -> tuple[int, int, int]:
    """Return what makes a layout less simple: kinds of parallelism, pipeline chunks, and GPUs per model replica."""
    degrees = (layout.tp, layout.pp, layout.vp or 1, layout.cp, layout.ep)
    return sum(degree > 1 for degree in degrees), layout.vp or 1, layout.tp * layout.pp * layout.cp


def compare_with_textbook(result: SearchResult) -> str:
    """Describe the layout that the textbook rules choose, and how much slower it is than the best one."""
    try:
        rules = textbook.choose(result.job)
    except UserError as none:
        return str(none)
    theirs = predict.one(result.job.replace(layout=rules.layout))
    if theirs.step_time_s is None:
        return f"the textbook rules choose {explain.title(rules.layout)}, which is {theirs.verdict}: {theirs.reason}"
    regret = theirs.step_time_s / float(result.seconds[result.ranked[0]]) - 1
    fits = "" if theirs.verdict == "ok" else f" and does not fit ({theirs.reason})"
    notes = "".join(f"; {note}" for note in rules.notes)
    return (
        f"the textbook rules choose {explain.title(rules.layout)}: {theirs.step_time_s:.3f} s per step, "
        f"{regret:.1%} slower than the best{fits}{notes}"
    )


def as_json(
    results: dict[str, SearchResult], *, top: int, memory_cap_gib: float | None = None, variants: bool = False
) -> dict[str, Any]:
    """Return the contents of `plan.json`: query, number of candidates, and the best layouts with their figures."""
    query = _query(next(iter(results.values())).job) | {"precision": list(results), "memory_cap_gib": memory_cap_gib}
    layouts = [_layout(p, f, i) for p, f, i in rank_layouts(results, variants=variants)[:top]]
    return {"schema": SCHEMA, "query": query, "candidates": sum(map(len, results.values())), "layouts": layouts}


def describe_run(job: PlannedJob) -> dict[str, Any]:
    """Return the contents of `plan.json` for one run with a given layout."""
    return {"schema": SCHEMA, "query": _query(job), "candidates": 1, "layouts": [described(job)]}


def _query(job: PlannedJob) -> dict[str, Any]:
    return {
        "model": job.model.name,
        "gpu": job.node.gpu.name,
        "gpus": job.gpus,
        "seq": job.seq,
        "gbs": job.layout.gbs,
        "precision": [job.precision],
        "task": job.task,
        "memory_cap_gib": None,
        "fabric": job.fabric.name,
        "options": asdict(job.options),
    }


def _layout(precision: str, result: SearchResult, i: int) -> dict[str, Any]:
    job = result.job_at(i)
    prediction = predict.one(job)
    return described(job, prediction) | {"precision": precision, "why": explain.explain_layout(result, i, prediction)}


def described(job: PlannedJob, prediction: Prediction | None = None) -> dict[str, Any]:
    """Return the layout of a run with its figures, as an entry of `layouts` in `plan.json`."""
    prediction = prediction or predict.one(job)
    return {
        "layout": asdict(job.layout),
        "pipeline_layout": pipeline_layout.from_job(job),
        "verdict": prediction.verdict,
        "fit": prediction.fit,
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.step_time_low_s,
        "step_time_high_s": prediction.step_time_high_s,
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_gpu,
        "mfu": prediction.mfu,
        "reserved_gib": prediction.reserved_gib_max,
        "allocated_gib": prediction.allocated_gib_max,
        "allocated_low_gib": prediction.allocated_low_gib,
        "allocated_high_gib": prediction.allocated_high_gib,
        "terms_s": dict(prediction.terms_s),
        "stages": stages(job),
        "checkpoint_bytes": memory.checkpoint_bytes(job),
        "why": [explain.bound(prediction)],
    }


def stages(job: PlannedJob) -> list[dict[str, Any]]:
    """Return the bytes per category at the peak of each pipeline rank."""
    owners = memory.by_owner(job, columns.from_job(job))
    return [
        {"rank": rank, "bytes": {key: round(float(part[rank])) for key, part in owners.items()}}
        for rank in range(job.layout.pp)
    ]
