"""What a page shows of a layout: figures, memory by rank, the step's timeline, the rank map, what it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from superpod.errors import UserError
from superpod.pages import layout_points, rank_map, sensitivity, step_timeline
from superpod.pages.packing import column
from superpod.pages.step_timeline import StepTimeline
from superpod.planner import columns, explain, memory, plans, predict
from superpod.planner.hardware import GIB
from superpod.planner.planned_job import PlannedJob
from superpod.planner.predict import Prediction

MOST_PASSES = 200_000
"""Passes of a schedule that is still simulated: 1 to 4 s."""
PASSES = 24_000
"""Passes of all timelines of a page but the first: more would take longer than the plan itself."""
DRAWN = 12_000
"""Passes of a timeline that lie in the page; of a longer one the first and the last ones, and the middle as a block."""


def of(jobs: Sequence[PlannedJob]) -> list[dict[str, Any]]:
    """Everything of some legal layouts of a run, as `assets/layout.js` reads it.

    The first one has its timeline; of the others those whose passes together are few enough (`PASSES`).
    """
    details, left = [], MOST_PASSES
    for job, prediction, curves in zip(jobs, predict.many(jobs), sensitivity.of(jobs), strict=True):
        count = _passes(job)
        details.append(_detail(job, prediction, timeline=count <= left) | curves)
        left = PASSES if len(details) == 1 else left - count * (count <= left)
    return details


def _detail(job: PlannedJob, prediction: Prediction, *, timeline: bool) -> dict[str, Any]:
    return {
        "title": explain.title(job.layout),
        "option": layout_points.option(job.layout),
        "precision": job.precision,
        "verdict": prediction.outcome,
        "seconds": prediction.step_time_s,
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
    """Passes of a step on all pipeline ranks."""
    return 2 * job.layout.pp * (job.layout.vp or 1) * job.micro_batches


def _degrees(job: PlannedJob) -> dict[str, int]:
    x = job.layout
    return {"tp": x.tp, "pp": x.pp, "vp": x.vp or 1, "cp": x.cp, "ep": x.ep, "dp": job.dp, "mbs": x.mbs}


def _memory(job: PlannedJob) -> dict[str, Any]:
    """GiB of every pipeline rank by owner, and what the allocator reserves for them."""
    stages = plans.stages(job)
    reserved = memory.reserved(job, columns.of(job)) / GIB
    owners = [owner for owner in stages[0]["bytes"] if any(stage["bytes"][owner] for stage in stages)]
    owners.sort(key=lambda owner: -max(stage["bytes"][owner] for stage in stages))
    return {
        "owners": [owner.replace("_", " ") for owner in owners],
        "gib": [[round(stage["bytes"][owner] / GIB, 4) for owner in owners] for stage in stages],
        "reserved_gib": [round(float(size), 4) for size in np.broadcast_to(reserved, len(stages))],
        "gpu_gib": job.node.gpu.hbm_usable_gib,
    }


def _ranks(job: PlannedJob) -> dict[str, Any]:
    grid = rank_map.of(job)
    return {
        "gpus": job.gpus,
        "node": job.node.gpus,
        "domain": job.node.nvlink_domain,
        "grid": {name: list(dimension) for name, dimension in grid.items()},
    }


def _timeline(job: PlannedJob) -> dict[str, Any]:
    """The passes as columns, rank by rank; or why there are none."""
    try:
        return drawn(step_timeline.of(job))
    except UserError as none:
        return {"none": str(none)}


def drawn(step: StepTimeline, most: int = DRAWN) -> dict[str, Any]:
    """The passes of a step as columns, rank by rank; of a long one those at its two ends."""
    events = list(step.events)
    rest: list[tuple[int, float, float, int]] = []
    if len(events) > most:
        middle = events[most // 2 : -(most // 2)]
        events = events[: most // 2] + events[-(most // 2) :]
        for rank in range(step.ranks):
            mine = [event for event in middle if event.stage == rank]
            if mine:
                rest.append((rank, mine[0].start, mine[-1].end, len(mine)))
    events.sort(key=lambda event: (event.stage, event.start))
    return {
        "rank": column(np.array([event.stage for event in events])),
        "backward": column(np.array([event.kind == "backward" for event in events])),
        "chunk": column(np.array([event.chunk for event in events])),
        "micro_batch": column(np.array([event.micro_batch for event in events])),
        "start": column(np.array([event.start for event in events])),
        "passes": {kind: list(map(dict, ranks)) for kind, ranks in step.passes.items()},
        "middle": rest,
        "after": dict(step.after),
        "span_s": step.span_s,
        "step_s": step.step_s,
        "plan_s": step.plan_s,
        "bubble_s": step.bubble_s,
    }
