"""Compute the pipeline schedule of one step: as simulated events, and as the closed form of the vectorized model.

`timeline` simulates a schedule of Megatron-Core (pipeline_parallel/schedules.py) with given durations: each rank runs
its passes in a fixed order, each as soon as the rank is free and its input has arrived. The search uses `closed_form`
for 100,000 layouts; for equal stages, both give the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from superpod.errors import UserError
from superpod.planner.arrays import Array

Kind = Literal["forward", "backward"]
Pass = tuple[Kind, int, int]
"""A pass as (kind, chunk, micro-batch)."""


@dataclass(frozen=True)
class Event:
    """A pass of a micro-batch through a model chunk of a pipeline rank; times in seconds."""

    stage: int
    chunk: int
    micro_batch: int
    kind: Kind
    start: float
    end: float


def order(stage: int, pp: int, vp: int, micro_batches: int, name: str = "1f1b") -> list[Pass]:
    """Return the passes of a pipeline rank in the order of a schedule: gpipe, 1F1B, or with vp > 1 interleaved 1F1B.

    Raises:
        UserError: the schedule is interleaved, and the number of micro-batches is not a multiple of pp.
    """
    total = micro_batches * vp
    if vp > 1 and micro_batches % pp:
        raise UserError(f"with vp {vp}, the number of micro-batches, {micro_batches}, must be a multiple of pp {pp}")
    # `warmup`: forward passes before the first backward pass (get_pp_rank_microbatches in schedules.py).
    if name == "gpipe":
        warmup = total
    elif vp > 1:
        warmup = total if micro_batches == pp else min(total, 2 * (pp - stage - 1) + (vp - 1) * pp)
    else:
        warmup = min(total, pp - stage - 1)
    turns = [_turn(i, pp, vp) for i in range(total)]
    forward: list[Pass] = [("forward", chunk, b) for chunk, b in turns]
    backward: list[Pass] = [("backward", vp - 1 - chunk, b) for chunk, b in turns]
    steady_passes = [one_pass for pair in zip(forward[warmup:], backward, strict=False) for one_pass in pair]
    return [*forward[:warmup], *steady_passes, *backward[total - warmup :]]


def _turn(i: int, pp: int, vp: int) -> tuple[int, int]:
    """Return (chunk, micro-batch) of a rank's i-th forward pass: pp micro-batches per chunk in turn."""
    if vp == 1:
        return 0, i
    group, place = divmod(i, pp * vp)
    return place // pp, group * pp + place % pp


def timeline(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    *,
    vp: int = 1,
    send: float = 0.0,
    name: str = "1f1b",
) -> list[Event]:
    """Simulate one training step, and return its passes sorted by start time.

    Args:
        forward: forward time in seconds of one micro-batch through all chunks of each pipeline rank.
        backward: the same for the backward pass, including recomputation.
        micro_batches: number of micro-batches on each data-parallel rank.
        vp: chunks per rank; a chunk takes 1/vp of its rank's time.
        send: duration in seconds of a message between neighboring ranks, during which both can compute.
        name: 1f1b or gpipe.

    Raises:
        UserError: an interleaved schedule has a number of micro-batches that is not a multiple of pp, or deadlocks.
    """
    pp = len(forward)
    pending_passes = [order(stage, pp, vp, micro_batches, name) for stage in range(pp)]
    seconds = {"forward": [t / vp for t in forward], "backward": [t / vp for t in backward]}
    done: dict[tuple[int, Pass], float] = {}
    free, place = [0.0] * pp, [0] * pp
    events: list[Event] = []
    while len(events) < 2 * pp * vp * micro_batches:
        before = len(events)
        for stage in range(pp):
            while place[stage] < len(pending_passes[stage]):
                one_pass = pending_passes[stage][place[stage]]
                ready = _ready(stage, one_pass, pp, vp, done, send)
                if ready is None:
                    break
                start = max(free[stage], ready)
                free[stage] = done[stage, one_pass] = start + seconds[one_pass[0]][stage]
                events.append(Event(stage, one_pass[1], one_pass[2], one_pass[0], start, free[stage]))
                place[stage] += 1
        if len(events) == before:
            raise UserError(f"the pipeline schedule deadlocks with pp {pp}, vp {vp} and {micro_batches} micro-batches")
    return sorted(events, key=lambda event: (event.start, event.stage))


def _ready(
    stage: int, one_pass: Pass, pp: int, vp: int, done: Mapping[tuple[int, Pass], float], send: float
) -> float | None:
    """Return the time in seconds at which a pass has its input; None if the pass that produces it has not run yet."""
    kind, chunk, micro_batch = one_pass
    step = 1 if kind == "forward" else -1
    position = chunk * pp + stage - step
    if position < 0:
        return 0.0
    if position >= pp * vp:  # the loss: its own forward pass
        return done.get((stage, ("forward", chunk, micro_batch)))
    sent_at = done.get((position % pp, (kind, position // pp, micro_batch)))
    return None if sent_at is None else sent_at + send * (pp > 1)


def span(events: Sequence[Event]) -> float:
    """Return the duration of a step in seconds, from the first start to the last end."""
    return max(event.end for event in events) - min(event.start for event in events)


def closed_form(forward: Sequence[float], backward: Sequence[float], micro_batches: int, *, vp: int = 1) -> float:
    """Return the duration of a step in seconds, without messages: time of the slowest rank plus bubble."""
    per_rank = np.add(forward, backward)
    return float(micro_batches * per_rank.max() + bubble_seconds(per_rank, np.ones(len(per_rank)), np.array(vp)))


def bubble_seconds(seconds_per_rank: Array, rank_counts: Array, vp: Array) -> Array:
    """Return the pipeline bubble in seconds per step, of shape [...] for arrays of shape [..., ranks].

    Args:
        seconds_per_rank: forward and backward seconds of one micro-batch through all chunks of each (distinct) rank.
        rank_counts: number of pipeline ranks that an entry represents.
        vp: chunks per rank; the bubble is divided by it.

    The slowest rank is idle only while the pipeline fills and drains: the step takes (m - 1) x slowest + sum over all
    ranks. For equal ranks, the bubble is (p - 1)(f + b) / v (arXiv:2104.04473, section 2.2).
    """
    seconds = np.where(rank_counts > 0, seconds_per_rank, 0.0)
    return ((rank_counts * seconds).sum(axis=-1) - seconds.max(axis=-1)) / vp
