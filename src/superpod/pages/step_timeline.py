"""Simulate the pipeline schedule of a step: the times at which each pipeline rank computes and waits.

`schedule.py` orders the passes, and `steptime.py` provides their durations for each pipeline rank. For equal stages,
the simulated step time is exactly the planned one. For unequal stages, the plan uses a closed formula, from which the
simulation differs; `StepTimeline.plan_s` is the planned step time.
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
from superpod.planner.timing.roofline import PASSES
from superpod.planner.timing.schedule import Event
from superpod.planner.timing.step_cost import StepCost

Parts = Mapping[str, float]
"""Seconds by term, in drawing order."""

WORK = ("compute", "recompute")
COMM = ("tp", "cp", "ep", "dp")
"""Exposed communication within a pass; `dp` only for ZeRO-2 and 3, which communicate for every micro-batch."""
PASS_TERMS = (*WORK, *COMM, "overhead", "pp_p2p")
"""Terms of a pass in drawing order, which is not the order of execution."""
TERMS_AFTER = ("dp", "optimizer", "overhead")
"""Terms after the last pass, on every rank."""


@dataclass(frozen=True)
class StepTimeline:
    """A simulated step on its pipeline ranks; times in seconds from the start of the first pass."""

    events: Sequence[Event]
    """All passes in order of their start times."""
    passes: Mapping[str, Sequence[Parts]]
    """{`forward` or `backward`: for each pipeline rank, seconds by term of a pass through one chunk}."""
    after: Parts
    """Seconds by term after the last pass (`TERMS_AFTER`)."""
    plan_s: float
    """Planned step time, from the closed formula."""

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.passes["forward"])

    @cached_property
    def span_s(self) -> float:
        """Seconds from the start of the first pass to the end of the last one."""
        return schedule.span(self.events)

    @property
    def step_s(self) -> float:
        """Step time in seconds."""
        return self.span_s + sum(self.after.values())

    @cached_property
    def bubble_s(self) -> list[float]:
        """Idle time of each rank during the schedule, in seconds."""
        idle_s = [self.span_s] * self.ranks
        for event in self.events:
            idle_s[event.stage] -= event.end - event.start
        return idle_s


def simulate_step(job: PlannedJob) -> StepTimeline:
    """Simulate one training step of a job whose layout is legal.

    Raises:
        UserError: the number of micro-batches of an interleaved schedule is not a multiple of pp.
    """
    layout, m = job.layout, job.micro_batches
    terms = {key: float(part) for key, part in steptime.step(job, columns.from_job(job)).terms.items()}
    forward, backward = _rank_terms(job)
    vp, inside = layout.vp or 1, 0.0
    if layout.sharding in MEGATRON_FSDP and layout.pp == 1:  # parameters are gathered for every micro-batch
        inside, terms["dp"] = terms["dp"] / m, 0.0
    # The plan contains the exposed sends of an entire step; spread them over the passes on the critical path.
    send = terms["pp_p2p"] / (2 * (m * vp + layout.pp - 1))
    slowest = max(range(layout.pp), key=lambda rank: sum(forward[rank].values()) + sum(backward[rank].values()))
    waiting_s = forward[slowest]["overhead"] + backward[slowest]["overhead"]
    fixed_s = max(0.0, terms["overhead"] - m * waiting_s)
    terms_after = {"dp": terms["dp"], "optimizer": terms["optimizer"], "overhead": fixed_s}
    passes: dict[str, list[Parts]] = {
        "forward": [_pass_terms(parts, vp, send, 0.0) for parts in forward],
        "backward": [_pass_terms(parts, vp, send, inside) for parts in backward],
    }
    name = job.options.schedule
    return simulate_passes(passes, m, vp=vp, after=terms_after, plan_s=sum(terms.values()) + inside * m, name=name)


def simulate_passes(
    passes: Mapping[str, Sequence[Parts]],
    micro_batches: int,
    *,
    vp: int = 1,
    after: Parts | None = None,
    plan_s: float = 0.0,
    name: str = "1f1b",
) -> StepTimeline:
    """Simulate a step with passes of given durations and the pipeline schedule `name`.

    `passes`, `after` and `plan_s` are those of the resulting `StepTimeline`.

    Raises:
        UserError: the number of micro-batches of an interleaved schedule is not a multiple of pp.
    """
    all_chunks = {kind: [vp * sum(parts.values()) for parts in ranks] for kind, ranks in passes.items()}
    events = schedule.timeline(all_chunks["forward"], all_chunks["backward"], micro_batches, vp=vp, name=name)
    return StepTimeline(events, passes, after or {}, plan_s)


def _pass_terms(parts: Parts, vp: int, send_s: float, dp_s: float) -> Parts:
    """Return the seconds by term of a pass through one chunk, without zeros, from those through all `vp` chunks."""
    seconds = {key: value / vp for key, value in parts.items()} | {"dp": dp_s, "pp_p2p": send_s}
    return {key: seconds[key] for key in PASS_TERMS if seconds[key] > 0}


def _rank_terms(job: PlannedJob) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the seconds by term of the forward and of the backward passes of a micro-batch, for each pipeline rank.

    `steptime.price` returns the terms of the slowest rank of a layout. Therefore, each rank is priced as a separate
    layout with one rank and one micro-batch: once completely, and once with only the work of the forward pass.
    """
    constants = {**calibration.constants(job), "step_s": 0.0, "tensor_s": 0.0}
    cost = _split_ranks(step_cost.from_job(job, columns.from_job(job)))
    only_forward = np.array([name == "forward" for name in PASSES])[:, None]
    terms = _terms(steptime.price(cost, constants))
    forward = _terms(
        steptime.price(replace(cost, work=cost.work * only_forward, repeated=0 * cost.repeated), constants)
    )
    ranks = range(len(terms))
    # `overhead` is the wait for kernel launches in both passes; divide it in proportion to their GPU time.
    on_gpu = [
        [sum(parts[key] for key in parts if key != "overhead") for parts in (forward[r], terms[r])] for r in ranks
    ]
    for r in ranks:
        forward[r]["overhead"] = terms[r]["overhead"] * on_gpu[r][0] / on_gpu[r][1] if on_gpu[r][1] else 0.0
    backward = [{key: max(0.0, terms[r][key] - forward[r][key]) for key in terms[r]} for r in ranks]
    return forward, backward


def _split_ranks(cost: StepCost) -> StepCost:
    """Return the cost of a layout as costs of separate layouts, one per pipeline rank, each with one micro-batch."""
    ranks = cost.blocks.shape[1]
    rank_costs = {
        "work": cost.work,
        "repeated": cost.repeated,
        "blocks": cost.blocks[0][:, None],
        "weight": np.ones((ranks, 1)),
        "recomputed_share": cost.recomputed_share[0][:, None],
        "micro_batches": np.ones(ranks),
    }
    shared_costs = {key: np.repeat(value, ranks) for key, value in vars(cost).items() if key not in rank_costs}
    return replace(cost, **rank_costs, **shared_costs)


def _terms(prices: Mapping[str, Array]) -> list[dict[str, float]]:
    """Return the seconds by term of each rank, from arrays by term."""
    keys = ("compute", "recompute", "tp", "cp", "ep", "overhead")
    return [dict(zip(keys, row, strict=True)) for row in zip(*(prices[key].tolist() for key in keys), strict=True)]
