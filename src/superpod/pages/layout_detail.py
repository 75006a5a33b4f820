"""Computes the details of a layout on a page: figures, memory per rank, timeline, rank map and sensitivity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from superpod.errors import UserError
from superpod.pages import layout_points, rank_map, sensitivity, step_timeline
from superpod.pages.page_data import pack_array
from superpod.pages.step_timeline import StepTimeline
from superpod.planner import columns, explain, intervals, memory, plans, predict
from superpod.planner.hardware import GIB
from superpod.planner.planned_job import PlannedJob
from superpod.planner.predict import Prediction

MAX_PASSES_FIRST = 200_000
"""Maximum number of passes to simulate for the first layout, in 1 to 4 s."""
MAX_PASSES_OTHERS = 24_000
"""Maximum total number of passes to simulate for all other layouts; more would take longer than the plan itself."""
MAX_DRAWN = 12_000
"""Maximum number of passes to draw; in longer timelines, the middle is drawn as a block."""


def describe_layouts(jobs: Sequence[PlannedJob]) -> list[dict[str, Any]]:
    """Return the details of legal layouts in the format of `assets/plan/layout.js`.

    The timeline is simulated for the first layout up to `MAX_PASSES_FIRST` passes, and for the others up to
    `MAX_PASSES_OTHERS` passes in total.
    """
    details, remaining_passes = [], MAX_PASSES_FIRST
    for job, prediction, curves in zip(jobs, predict.many(jobs), sensitivity.sensitivity_curves(jobs), strict=True):
        count = _count_passes(job)
        is_simulated = count <= remaining_passes
        details.append(_detail(job, prediction, timeline=is_simulated) | curves)
        if len(details) == 1:
            remaining_passes = MAX_PASSES_OTHERS
        elif is_simulated:
            remaining_passes -= count
    return details


def summarize(job: PlannedJob, p: Prediction) -> dict[str, Any]:
    """Return the title, options and predicted figures of a layout; `interval` is the note below its step time."""
    interval = intervals.range_text(p.step_time_s or 0.0, p.step_time_low_s or 0.0, p.step_time_high_s or 0.0)
    return {
        "title": explain.title(job.layout),
        "option": layout_points.option(job.layout),
        "precision": job.precision,
        "verdict": p.outcome,
        "seconds": p.step_time_s,
        "interval": "; ".join(filter(None, [f"80 % interval {interval} s", p.extrapolation])),
        "rate": p.tokens_per_s_per_gpu,
        "mfu": p.mfu,
        "gib": p.reserved_gib_max,
    }


def _detail(job: PlannedJob, prediction: Prediction, *, timeline: bool) -> dict[str, Any]:
    """Return the details of a layout, with a simulated timeline if `timeline`."""
    degrees = {name: getattr(job.layout, name) for name in ("tp", "pp", "cp", "ep", "mbs")}
    return summarize(job, prediction) | {
        "limit_gib": prediction.limit_gib,
        "micro_batches": job.micro_batches,
        "degrees": degrees | {"vp": job.layout.vp or 1, "dp": job.dp},
        "terms": dict(prediction.terms_s),
        "memory": _memory(job),
        "ranks": _ranks(job),
        "timeline": _timeline(job) if timeline else {"none": f"a step has {_count_passes(job):,} passes"},
    }


def _count_passes(job: PlannedJob) -> int:
    """Return the number of forward and backward passes in a step, over all pipeline ranks and chunks."""
    return 2 * job.layout.pp * (job.layout.vp or 1) * job.micro_batches


def _memory(job: PlannedJob) -> dict[str, Any]:
    """Return the allocated memory of each pipeline rank by category, and its reserved memory, in GiB."""
    stages = plans.stages(job)
    reserved = memory.reserved(job, columns.from_job(job)) / GIB
    owners = [owner for owner in stages[0]["bytes"] if any(stage["bytes"][owner] for stage in stages)]
    owners.sort(key=lambda owner: -max(stage["bytes"][owner] for stage in stages))
    return {
        "owners": [owner.replace("_", " ") for owner in owners],
        "gib": [[round(stage["bytes"][owner] / GIB, 4) for owner in owners] for stage in stages],
        "reserved_gib": [round(float(size), 4) for size in np.broadcast_to(reserved, len(stages))],
        "gpu_gib": job.node.gpu.hbm_usable_gib,
    }


def _ranks(job: PlannedJob) -> dict[str, Any]:
    """Return the numbers of GPUs of the job, a node and an NVLink domain, and (stride, size) of each dimension."""
    grid = {name: list(dimension) for name, dimension in rank_map.rank_grid(job).items()}
    return {"gpus": job.gpus, "node": job.node.gpus, "domain": job.node.nvlink_domain, "grid": grid}


def _timeline(job: PlannedJob) -> dict[str, Any]:
    """Simulate a step, and return its passes as columns, or {"none": reason} if it cannot be simulated."""
    try:
        return pack_timeline(step_timeline.simulate_step(job))
    except UserError as error:
        return {"none": str(error)}


def pack_timeline(step: StepTimeline, max_passes: int = MAX_DRAWN) -> dict[str, Any]:
    """Return the passes of a step as columns, sorted by rank; for a long step, only those near its start and end.

    `middle` has a row (rank, start, end, number of passes) per rank for the omitted passes.
    """
    events = list(step.events)
    middle_rows: list[tuple[int, float, float, int]] = []
    if len(events) > max_passes:
        half_passes = max_passes // 2
        middle_events = events[half_passes:-half_passes]
        events = events[:half_passes] + events[-half_passes:]
        for rank in range(step.ranks):
            omitted = [event for event in middle_events if event.stage == rank]
            if omitted:
                middle_rows.append((rank, omitted[0].start, omitted[-1].end, len(omitted)))
    events.sort(key=lambda event: (event.stage, event.start))
    return {
        "rank": pack_array(np.array([event.stage for event in events])),
        "backward": pack_array(np.array([event.kind == "backward" for event in events])),
        "chunk": pack_array(np.array([event.chunk for event in events])),
        "micro_batch": pack_array(np.array([event.micro_batch for event in events])),
        "start": pack_array(np.array([event.start for event in events])),
        "passes": {kind: list(map(dict, ranks)) for kind, ranks in step.passes.items()},
        "middle": middle_rows,
        "after": dict(step.after),
        "span_s": step.span_s,
        "step_s": step.step_s,
        "plan_s": step.plan_s,
        "bubble_s": step.bubble_s,
    }
