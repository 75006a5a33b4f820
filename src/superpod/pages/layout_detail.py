"""Details of a layout on a page: figures, memory per rank, timeline, rank map and sensitivity."""

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
"""Maximum number of passes to simulate for the first layout, which takes 1 to 4 s."""
MAX_PASSES_OTHERS = 24_000
"""Maximum total number of passes to simulate for other layouts; more would take longer than the plan itself."""
MAX_DRAWN = 12_000
"""Maximum number of passes to draw; in longer timelines, the middle is drawn as a block."""


def describe_layouts(jobs: Sequence[PlannedJob]) -> list[dict[str, Any]]:
    """Return the details of legal layouts in the format of `assets/plan/layout.js`.

    The timeline is simulated for the first layout and, up to `MAX_PASSES_OTHERS` in total, for the others.
    """
    details, remaining_passes = [], MAX_PASSES_FIRST
    for job, prediction, curves in zip(jobs, predict.many(jobs), sensitivity.sensitivity_curves(jobs), strict=True):
        count = _passes(job)
        is_simulated = count <= remaining_passes
        details.append(_detail(job, prediction, timeline=is_simulated) | curves)
        if len(details) == 1:
            remaining_passes = MAX_PASSES_OTHERS
        elif is_simulated:
            remaining_passes -= count
    return details


def interval_note(p: Prediction) -> str:
    """Return the note below a step time: its interval, and whether it is extrapolated."""
    interval = intervals.range_text(p.step_time_s or 0.0, p.step_time_low_s or 0.0, p.step_time_high_s or 0.0)
    return "; ".join(filter(None, [f"80 % interval {interval} s", p.extrapolation]))


def _detail(job: PlannedJob, prediction: Prediction, *, timeline: bool) -> dict[str, Any]:
    return {
        "title": explain.title(job.layout),
        "option": layout_points.option(job.layout),
        "precision": job.precision,
        "verdict": prediction.outcome,
        "seconds": prediction.step_time_s,
        "interval": interval_note(prediction),
        "rate": prediction.tokens_per_s_per_gpu,
        "mfu": prediction.mfu,
        "gib": prediction.reserved_gib_max,
        "limit_gib": prediction.limit_gib,
        "micro_batches": job.micro_batches,
        "degrees": _degrees(job),
        "terms": dict(prediction.terms_s),
        "memory": _memory(job),
        "ranks": _ranks(job),
        "timeline": _timeline(job) if timeline else {"none": f"a step has {_passes(job):,} passes"},
    }


def _passes(job: PlannedJob) -> int:
    """Return the number of passes in a step, over all pipeline ranks."""
    return 2 * job.layout.pp * (job.layout.vp or 1) * job.micro_batches


def _degrees(job: PlannedJob) -> dict[str, int]:
    layout = job.layout
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "vp": layout.vp or 1,
        "cp": layout.cp,
        "ep": layout.ep,
        "dp": job.dp,
        "mbs": layout.mbs,
    }


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
    grid = rank_map.rank_grid(job)
    return {
        "gpus": job.gpus,
        "node": job.node.gpus,
        "domain": job.node.nvlink_domain,
        "grid": {name: list(dimension) for name, dimension in grid.items()},
    }


def _timeline(job: PlannedJob) -> dict[str, Any]:
    """Return the passes as columns, sorted by rank, or why the schedule cannot be simulated."""
    try:
        return pack_timeline(step_timeline.simulate_step(job))
    except UserError as none:
        return {"none": str(none)}


def pack_timeline(step: StepTimeline, max_passes: int = MAX_DRAWN) -> dict[str, Any]:
    """Return the passes of a step as columns, sorted by rank; for a long step, only those near its start and end.

    `middle` has a row (rank, start, end, number of passes) per rank for the passes that are left out.
    """
    events = list(step.events)
    middle_rows: list[tuple[int, float, float, int]] = []
    if len(events) > max_passes:
        half_passes = max_passes // 2
        middle_events = events[half_passes:-half_passes]
        events = events[:half_passes] + events[-half_passes:]
        for rank in range(step.ranks):
            of_rank = [event for event in middle_events if event.stage == rank]
            if of_rank:
                middle_rows.append((rank, of_rank[0].start, of_rank[-1].end, len(of_rank)))
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
