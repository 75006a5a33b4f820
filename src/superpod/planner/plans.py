"""Search layouts in one or several precisions, and describe the results in sentences and as JSON."""

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
"""Width of the interval of the ratio of two layouts' step times, relative to that of one: most errors cancel out."""


def search(
    job: PlannedJob, *, auto: bool = False, fixed: dict[str, Any] | None = None, memory_cap_gib: float | None = None
) -> dict[str, SearchResult]:
    """Search all legal layouts of a job in its precision, or with `auto` in several.

    Returns precision -> search result, the fastest precision first.

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
"""Maximum number of layouts that are listed per precision."""


def best(job: PlannedJob, **search_options: Any) -> PlannedJob:
    """Return the job with its fastest layout that fits; `search_options` are keyword arguments of `search`.

    Raises:
        UserError: no layout fits; the message has the layout that needs the least memory, and how to reduce it.
    """
    results = search(job, **search_options)
    precision, first = next(iter(results.items()))
    if not len(first.ranked):
        raise UserError(explain_no_fit(first))
    return first.job_at(int(first.ranked[0])).replace(precision=precision)


def seconds(job: PlannedJob) -> float:
    """Return the predicted step time of a legal run in seconds. Raises UserError if the run is illegal."""
    prediction = predict.one(job)
    if prediction.step_time_s is None:
        raise UserError(prediction.reason)
    return prediction.step_time_s


def rank_layouts(results: dict[str, SearchResult], *, variants: bool = False) -> list[tuple[str, SearchResult, int]]:
    """Return (precision, search result, index) of the layouts that fit, over all precisions, the fastest first.

    Without `variants`, only the best of the layouts with the same parallel degrees is included, because layouts that
    differ only in recomputation would fill the table.
    """
    entries = []
    for precision, result in results.items():
        ranked = result.ranked if variants else result.best_per_degrees
        entries += [(precision, result, int(i)) for i in ranked[:MAX_RANKED]]
    return sorted(entries, key=lambda entry: float(entry[1].seconds[entry[2]])) if len(results) > 1 else entries


def mfu(job: PlannedJob, seconds: float) -> float:
    """Return the model FLOPs utilization of a job with a step time of `seconds`, 0 to 1; see `steptime.mfu`."""
    return float(steptime.mfu(job, seconds))


def explain_no_fit(result: SearchResult) -> str:
    """Return the message if no layout fits: the layout that needs the least memory, and changes that free memory."""
    i = int(np.argmin(result.reserved))
    job = result.job_at(i)
    short = suggestions.describe_shortage(job, predict.one(job), suggestions.advise_more_memory(job))
    return f"no layout fits; the one with the least memory is {explain.title(job.layout)}, {short}"


def equivalent_layouts(result: SearchResult) -> str:
    """Describe the simplest layout within the planner's error of the best one; "" = it is the best one."""
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
    """Return a sort key, the simplest layout first: (kinds of parallelism, chunks per rank, GPUs per model replica)."""
    degrees = (layout.tp, layout.pp, layout.vp or 1, layout.cp, layout.ep)
    return sum(degree > 1 for degree in degrees), layout.vp or 1, layout.tp * layout.pp * layout.cp


def compare_with_textbook(result: SearchResult) -> str:
    """Describe the layout of the textbook rules, and how much slower it is than the best one."""
    try:
        rules = textbook.choose(result.job)
    except UserError as none:
        return str(none)
    name = explain.title(rules.layout)
    prediction = predict.one(result.job.replace(layout=rules.layout))
    if prediction.step_time_s is None:
        return f"the textbook rules choose {name}, which is {prediction.verdict}: {prediction.reason}"
    regret = prediction.step_time_s / float(result.seconds[result.ranked[0]]) - 1
    fits = "" if prediction.verdict == "ok" else f" and does not fit ({prediction.reason})"
    notes = "".join(f"; {note}" for note in rules.notes)
    return (
        f"the textbook rules choose {name}: {prediction.step_time_s:.3f} s per step, "
        f"{regret:.1%} slower than the best{fits}{notes}"
    )


def as_json(
    results: dict[str, SearchResult], *, top: int, memory_cap_gib: float | None = None, variants: bool = False
) -> dict[str, Any]:
    """Return the contents of `plan.json`: query, number of candidates, the `top` best layouts and their figures."""
    query = _describe_query(next(iter(results.values())).job) | {
        "precision": list(results),
        "memory_cap_gib": memory_cap_gib,
    }
    layouts = [_describe_layout(p, f, i) for p, f, i in rank_layouts(results, variants=variants)[:top]]
    return {"schema": SCHEMA, "query": query, "candidates": sum(map(len, results.values())), "layouts": layouts}


def describe_run(job: PlannedJob) -> dict[str, Any]:
    """Return the contents of `plan.json` for one run with a given layout."""
    return {"schema": SCHEMA, "query": _describe_query(job), "candidates": 1, "layouts": [described(job)]}


def _describe_query(job: PlannedJob) -> dict[str, Any]:
    """Return the `query` of `plan.json`."""
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


def _describe_layout(precision: str, result: SearchResult, i: int) -> dict[str, Any]:
    """Return the i-th layout of a search as an entry of `layouts` in `plan.json`."""
    job = result.job_at(i)
    prediction = predict.one(job)
    return described(job, prediction) | {"precision": precision, "why": explain.explain_layout(result, i, prediction)}


def described(job: PlannedJob, prediction: Prediction | None = None) -> dict[str, Any]:
    """Return the layout of a job and its predicted figures, in the form of `layouts` in `plan.json`."""
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
    """Return the bytes per category of each pipeline rank at its peak, in the form of `stages` in `plan.json`."""
    owners = memory.by_owner(job, columns.from_job(job))
    return [
        {"rank": rank, "bytes": {key: round(float(part[rank])) for key, part in owners.items()}}
        for rank in range(job.layout.pp)
    ]
