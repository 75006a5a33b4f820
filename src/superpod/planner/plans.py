"""A plan: searches in one or several precisions, as sentences for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from superpod.errors import UserError
from superpod.planner import columns, explain, memory, predict
from superpod.planner.hardware.precisions import AUTO_PRECISIONS
from superpod.planner.planned_job import PlannedJob
from superpod.planner.predict import Prediction
from superpod.planner.rules import pipeline_layout, textbook
from superpod.planner.search import SearchResult, Space
from superpod.planner.search import search as search_one
from superpod.planner.timing import steptime

SCHEMA = 1


def search(
    job: PlannedJob, *, auto: bool = False, fixed: dict[str, Any] | None = None, memory_cap_gib: float | None = None
) -> dict[str, SearchResult]:
    """Every legal layout, in the job's precision or (`auto`) in each worth trying; the fastest precision first.

    Raises:
        UserError: when no layout is legal, or a fixed key is none.
    """
    tried = [p for p in AUTO_PRECISIONS if p in job.node.gpu.precisions] if auto else [job.precision]
    if memory_cap_gib is not None and not 0 < memory_cap_gib < 1e6:
        gpu = job.node.gpu
        hint = f"{gpu.name} has {gpu.hbm_usable_gib:.1f} GiB"
        raise UserError(f"--memory-cap must be above 0 GiB and finite, not {memory_cap_gib:g}", hint)
    space = Space(fixed=fixed or {})
    results = {p: search_one(job.replace(precision=p), space, memory_cap_gib=memory_cap_gib) for p in tried}
    fastest = {p: float(f.seconds[f.ranked[0]]) if len(f.ranked) else np.inf for p, f in results.items()}
    return dict(sorted(results.items(), key=lambda item: fastest[item[0]]))


MOST_RANKED = 1000
"""Layouts of a precision that are listed at most."""


def best(job: PlannedJob, **how: Any) -> PlannedJob:
    """The run with its fastest layout that fits; `how` as for `search`.

    Raises:
        UserError: when none fits, saying what would.
    """
    results = search(job, **how)
    precision, first = next(iter(results.items()))
    if not len(first.ranked):
        raise UserError(explain_no_fit(first))
    return first.job_at(int(first.ranked[0])).replace(precision=precision)


def seconds(job: PlannedJob) -> float:
    """Step time of a legal run.

    Raises:
        UserError: when it is not legal.
    """
    prediction = predict.one(job)
    if prediction.step_time_s is None:
        raise UserError(prediction.reason)
    return prediction.step_time_s


def ranked(results: dict[str, SearchResult], *, variants: bool = False) -> list[tuple[str, SearchResult, int]]:
    """The fitting layouts of all precisions, the fastest first: (precision, search, index).

    Of those with the same parallel degrees only the best, unless `variants`: ten layouts that differ in what they
    recompute are one answer.
    """
    every = [
        (p, f, int(i)) for p, f in results.items() for i in (f.ranked if variants else f.best_per_degrees)[:MOST_RANKED]
    ]
    return sorted(every, key=lambda entry: float(entry[1].seconds[entry[2]])) if len(results) > 1 else every


def mfu(job: PlannedJob, seconds: float) -> float:
    """Model FLOPs utilization: `steptime.mfu`."""
    return float(steptime.mfu(job, seconds))


def explain_no_fit(result: SearchResult) -> str:
    """The message when nothing fits: the layout that exceeds memory least, and what would make it fit."""
    i = int(np.argmin(result.reserved))
    job = result.job_at(i)
    short = explain.describe_shortage(job, predict.one(job), explain.advise_more_memory(job))
    return f"no layout fits; the smallest is {explain.title(job.layout)}, {short}"


def compare_with_textbook(result: SearchResult) -> str:
    """The layout that the textbook's rules choose, and how much slower it is than the best."""
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
    """The plan as `plan.json` holds it: query, number of candidates, and the best layouts with all their figures."""
    query = _query(next(iter(results.values())).job) | {"precision": list(results), "memory_cap_gib": memory_cap_gib}
    layouts = [_layout(p, f, i) for p, f, i in ranked(results, variants=variants)[:top]]
    return {"schema": SCHEMA, "query": query, "candidates": sum(map(len, results.values())), "layouts": layouts}


def describe_run(job: PlannedJob) -> dict[str, Any]:
    """The plan of one run whose layout is given, in the same form."""
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
    return described(job, prediction) | {"precision": precision, "why": explain.why(result, i, prediction)}


def described(job: PlannedJob, prediction: Prediction | None = None) -> dict[str, Any]:
    """One run's layout with its figures: an entry of `layouts`."""
    prediction = prediction or predict.one(job)
    return {
        "layout": asdict(job.layout),
        "pipeline_layout": pipeline_layout.from_job(job),
        "verdict": prediction.verdict,
        "fit": prediction.fit,
        "step_time_s": prediction.step_time_s,
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_gpu,
        "mfu": prediction.mfu,
        "reserved_gib": prediction.reserved_gib_max,
        "terms_s": dict(prediction.terms_s),
        "stages": stages(job),
        "checkpoint_bytes": memory.checkpoint_bytes(job),
        "why": [explain.bound(prediction)],
    }


def stages(job: PlannedJob) -> list[dict[str, Any]]:
    """Bytes of every pipeline rank at its peak, by owner."""
    owners = memory.by_owner(job, columns.from_job(job))
    return [
        {"rank": rank, "bytes": {key: round(float(part[rank])) for key, part in owners.items()}}
        for rank in range(job.layout.pp)
    ]
