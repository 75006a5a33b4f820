"""The step of a run, pass by pass: when every pipeline rank works, on what, and when it waits.

`schedule.py` runs the passes; their seconds are those of `steptime.py`, priced for every pipeline rank
by itself. For equal stages the sum is the plan's step time exactly. For unequal ones the plan uses a closed form, which
differs by what the simulated schedule loses or saves between the stages; `StepTimeline.plan_s` has that figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from superpod.planner import columns
from superpod.planner.arrays import Array
from superpod.planner.calibration import calibration
from superpod.planner.layout import MEGATRON_FSDP
from superpod.planner.planned_job import PlannedJob
from superpod.planner.timing import schedule, step_cost, steptime
from superpod.planner.timing.roofline import PHASES
from superpod.planner.timing.schedule import Event
from superpod.planner.timing.step_cost import StepCost

Parts = Mapping[str, float]
"""Seconds by term, in the order in which they are drawn."""

WORK = ("compute", "recompute")
COMM = ("tp", "cp", "ep", "dp")
"""Exposed communication inside a pass; `dp` only with ZeRO-2 and 3, which exchange for every micro-batch."""
IN_PASS = (*WORK, *COMM, "overhead", "pp_p2p")
"""Terms of a pass, in the order in which they are drawn. Inside a pass, the order means nothing."""
AFTER = ("dp", "optimizer", "overhead")
"""Terms that follow the last pass on every rank."""


@dataclass(frozen=True)
class StepTimeline:
    """One step of a run on its pipeline ranks; times in seconds from the start of the first pass."""

    events: Sequence[Event]
    """Every pass, in the order of their starts."""
    passes: Mapping[str, Sequence[Parts]]
    """Of `forward` and `backward`: seconds by term of one pass through one chunk, for each pipeline rank."""
    after: Parts
    """What follows the passes on every rank, `AFTER`."""
    plan_s: float
    """The step time of the plan, from its closed form."""

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.passes["forward"])

    @cached_property
    def span_s(self) -> float:
        """Seconds of the schedule: from the first pass to the last."""
        return schedule.span(self.events)

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.span_s + sum(self.after.values())

    @cached_property
    def bubble_s(self) -> list[float]:
        """Seconds that each rank waits for others during the schedule."""
        idle = [self.span_s] * self.ranks
        for event in self.events:
            idle[event.stage] -= event.end - event.start
        return idle


def of(job: PlannedJob) -> StepTimeline:
    """The step of a legal run.

    Raises:
        UserError: interleaved micro-batches that are no multiple of pp, which has no schedule here.
    """
    layout, m = job.layout, job.micro_batches
    terms = {key: float(part) for key, part in steptime.step(job, columns.of(job)).terms.items()}
    forward, backward = _of_ranks(job)
    vp, inside = layout.vp or 1, 0.0
    if layout.sharding in MEGATRON_FSDP and layout.pp == 1:  # gathered and reduced for every micro-batch
        inside, terms["dp"] = terms["dp"] / m, 0.0
    # The plan counts what messages expose over the whole step: spread over the passes of a pipeline's critical path.
    send = terms["pp_p2p"] / (2 * (m * vp + layout.pp - 1))
    slowest = max(range(layout.pp), key=lambda rank: sum(forward[rank].values()) + sum(backward[rank].values()))
    waiting = forward[slowest]["overhead"] + backward[slowest]["overhead"]
    fixed = max(0.0, terms["overhead"] - m * waiting)
    after = {"dp": terms["dp"], "optimizer": terms["optimizer"], "overhead": fixed}
    passes: dict[str, list[Parts]] = {
        "forward": [_one_pass(parts, vp, send, 0.0) for parts in forward],
        "backward": [_one_pass(parts, vp, send, inside) for parts in backward],
    }
    name = job.options.schedule
    return of_passes(passes, m, vp=vp, after=after, plan_s=sum(terms.values()) + inside * m, name=name)


def of_passes(
    passes: Mapping[str, Sequence[Parts]],
    micro_batches: int,
    *,
    vp: int = 1,
    after: Parts | None = None,
    plan_s: float = 0.0,
    name: str = "1f1b",
) -> StepTimeline:
    """The step of given passes: seconds by term through one chunk, for each pipeline rank. Raises as `of`."""
    whole = {kind: [vp * sum(parts.values()) for parts in ranks] for kind, ranks in passes.items()}
    events = schedule.timeline(whole["forward"], whole["backward"], micro_batches, vp=vp, name=name)
    return StepTimeline(events, passes, after or {}, plan_s)


def _one_pass(parts: Parts, vp: int, send: float, inside: float) -> Parts:
    """The terms of a pass through one chunk; those that are zero are left out."""
    seconds = {key: value / vp for key, value in parts.items()} | {"dp": inside, "pp_p2p": send}
    return {key: seconds[key] for key in IN_PASS if seconds[key] > 0}


def _of_ranks(job: PlannedJob) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Seconds by term of one micro-batch through all chunks of each pipeline rank: forward, backward.

    `steptime.price` gives the terms of a layout's slowest rank. Here every rank is a layout of its own, of one rank and
    one micro-batch; and a second time with the work of the forward pass only.
    """
    constants = {**calibration.constants(job), "step_s": 0.0, "tensor_s": 0.0}
    cost = _rank_by_rank(step_cost.of(job, columns.of(job)))
    only_forward = np.array([name == "forward" for name in PHASES])[:, None]
    both = _terms(steptime.price(cost, constants))
    forward = _terms(steptime.price(replace(cost, work=cost.work * only_forward), constants))
    ranks = range(len(both))
    # Where launches are waited for, the wait is of both passes together: shared as the GPU's time is.
    on_gpu = [[sum(parts[key] for key in parts if key != "overhead") for parts in (forward[r], both[r])] for r in ranks]
    for r in ranks:
        forward[r]["overhead"] = both[r]["overhead"] * on_gpu[r][0] / on_gpu[r][1] if on_gpu[r][1] else 0.0
    backward = [{key: max(0.0, both[r][key] - forward[r][key]) for key in both[r]} for r in ranks]
    return forward, backward


def _rank_by_rank(cost: StepCost) -> StepCost:
    """The cost of one layout as one layout for each of its pipeline ranks, with one micro-batch."""
    ranks = cost.blocks.shape[1]
    own = {
        "work": cost.work,
        "blocks": cost.blocks[0][:, None],
        "weight": np.ones((ranks, 1)),
        "recomputed_share": cost.recomputed_share[0][:, None],
        "micro_batches": np.ones(ranks),
    }
    rest = {key: np.repeat(value, ranks) for key, value in vars(cost).items() if key not in own}
    return replace(cost, **own, **rest)


def _terms(priced: Mapping[str, Array]) -> list[dict[str, float]]:
    """Of each rank, the terms that lie inside a pass."""
    keys = ("compute", "recompute", "tp", "cp", "ep", "overhead")
    return [dict(zip(keys, row, strict=True)) for row in zip(*(priced[key].tolist() for key in keys), strict=True)]
