"""Seconds of one training step: compute roofline + exposed communication + pipeline schedule.

    step_cost.py  what a step costs at nominal peaks and bandwidths         (arithmetic)
    calibration   what hardware and software reach of the nominal           (data/calibration/*.toml)
    here          prices, overlap, the pipeline                             (arithmetic)

>>> from superpod.planner import columns
>>> from superpod.planner.timing import steptime
>>> steptime.step(job, columns.from_job(job)).seconds
array(11.2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from superpod.planner.arrays import Array, Number
from superpod.planner.calibration import calibration
from superpod.planner.columns import Columns
from superpod.planner.planned_job import PlannedJob
from superpod.planner.timing import schedule, step_cost
from superpod.planner.timing.roofline import INDEX, KINDS, PHASES, RESOURCES
from superpod.planner.timing.step_cost import StepCost

Constants: TypeAlias = Mapping[str, float] | Mapping[str, Array]
"""Constants of `calibration` by name: numbers, or arrays [L] where layouts are of several jobs."""
GROUPS = ("compute", "launch", "tp", "cp", "ep")
TERMS = (
    *("compute", "recompute", "overhead", "tp", "cp", "ep"),
    *("pp_bubble", "pp_p2p", "dp", "optimizer"),
)
"""Keys of `Step.terms`."""


LEAST_DISPATCH = 0.1
"""Share of the experts' dispatch that another micro-batch's computation leaves exposed at least; an assumption."""
EDGE = 0.01
"""Share of the memory over which a GPU becomes full."""


@dataclass(frozen=True)
class Step:
    """Seconds of one step; arrays of the table's shape without its last axis (that of the ranks)."""

    seconds: Array
    terms: dict[str, Array]
    """Exposed seconds by term; they add up to `seconds`.

    compute, recompute, overhead (launches and memory that the GPU waits for, and the fixed cost of a step), tp, cp, ep:
    of the slowest pipeline rank. pp_bubble: its wait for the other stages. pp_p2p, dp, optimizer: the part that is not
    hidden.
    """


def step(job: PlannedJob, c: Columns) -> Step:
    """Seconds of one step for every layout of a table; columns of shape [..., ranks].

    The job's own layout and number of GPUs do not count: the columns give them.
    """
    shape = np.broadcast_shapes(c.weight.shape, c.tp.shape)[:-1]
    terms = price(step_cost.from_job(job, c), calibration.constants(job))
    terms = {key: part.reshape(shape) for key, part in terms.items()}
    return Step(sum(terms.values(), np.zeros(shape)), terms)


def price(d: StepCost, k: Constants) -> dict[str, Array]:
    """Exposed seconds [L] of each term. Constants are numbers, or arrays [L] where layouts are of several jobs."""
    forward, backward, recomputed = _phases(d, k)
    compute, launch = forward[..., 0] + backward[..., 0], forward[..., 1] + backward[..., 1]
    redone = recomputed[..., 0] * d.recomputed_share
    launched = (launch + recomputed[..., 1] * d.recomputed_share) * np.where(d.graphs > 0, _wide(k["graphed"]), 1.0)[
        :, None
    ]
    # CPUs of a TP group do not launch at the same moment, and the group waits for the last one.
    late = k["jitter"] + k.get("late_senders", 0.0) * d.sends_far
    launched = launched * (1 + late * (d.tp - 1))[:, None]
    hidden = {
        "tp": _wide(k["tp_hidden"]) * d.overlap_tp * k.get("overlap_tp", 1.0),
        "cp": _wide(k["cp_hidden"]),
    }
    communication = {}
    for i, group in enumerate(("tp", "cp", "ep"), start=2):
        every = forward[..., i] + backward[..., i] + recomputed[..., i] * d.recomputed_share
        if group == "ep":  # beside the computation of another micro-batch
            under = (_wide(k["ep_under"]) * d.overlap_experts)[:, None] * compute
            communication[group] = _rest(every, under, np.where(d.overlap_experts > 0, LEAST_DISPATCH, 1.0)[:, None])
        else:
            communication[group] = every * (1 - hidden[group] * np.ones(len(every)))[:, None]
    gpu = compute + redone + sum(communication.values())
    # The GPU waits where the CPU launches slower than it computes, and where a stage waits for memory.
    per_rank = _larger(gpu, launched, k["queue"]) + _retries(d, k)[:, None]
    waiting = per_rank - gpu
    slowest = np.where(d.weight > 0, per_rank, -1.0).argmax(axis=1)
    pick = np.arange(len(slowest)), slowest
    m = d.micro_batches
    terms = {
        "compute": m * compute[pick],
        "recompute": m * redone[pick],
        "overhead": m * waiting[pick] + k["step_s"] + k["tensor_s"] * d.layers,
        **{group: m * part[pick] for group, part in communication.items()},
    }
    terms["pp_bubble"] = schedule.bubble(per_rank, d.weight, d.vp)
    terms["pp_p2p"] = _messages(d, k)
    terms["dp"] = _exposed(d, k, forward[pick][:, 0], backward[pick][:, 0]) + d.copies * k["copies"]
    terms["optimizer"] = d.host + d.states * k["states"] + d.grads * k["grads"]
    return terms


def _retries(d: StepCost, k: Constants) -> Array:
    """Seconds of a micro-batch in which the stages of a pipeline wait for memory where a GPU is nearly full."""
    above = 1 / (1 + np.exp(np.clip((k.get("full_from", 1.0) - d.full) / EDGE, -50, 50)))
    return k.get("alloc_retries", 0.0) * above * (1 - 1 / d.pp)


def _phases(d: StepCost, k: Constants) -> list[Array]:
    """Seconds of a rank for one micro-batch: forward, backward and recomputed, [L, R, GROUPS] each."""
    kinds = np.flatnonzero(d.work.any(axis=(0, 2, 3)))  # most models have three or four of the eight kinds
    coefficients = np.zeros(
        (*np.broadcast_shapes(*(np.shape(k[name]) for name in PRICES)), len(RESOURCES), len(GROUPS))
    )
    for name, group in PRICES.items():
        coefficients[..., INDEX[name], GROUPS.index(group)] = k[name]
    coefficients[..., INDEX["kernels"], 0] = k["gap"]  # the pause of the GPU between two kernels
    coefficients[..., 0] *= _wide(k["software"])[..., None]
    work = d.work[:, kinds].reshape(len(d.work), -1, len(RESOURCES)) @ coefficients
    units = work.reshape(len(d.work), len(kinds), len(PHASES) * len(GROUPS))
    ranks = np.matmul(d.blocks[..., kinds], units[d.unit])
    ranks = ranks.reshape(*ranks.shape[:2], len(PHASES), len(GROUPS))
    return [ranks[:, :, i] for i in range(len(PHASES))]


PRICES = {
    **dict.fromkeys(
        ("matmul", "plain", "router", "expert", "attention", "unfused", "scan", "delta", "misaligned"), "compute"
    ),
    **dict.fromkeys(("main_grads", "stream", "scores", "loss", "cast", "expert_cast", "sorting"), "compute"),
    **dict.fromkeys(("kernels", "expert_kernels"), "launch"),
    **{f"{group}_{part}": group for group in ("tp", "cp", "ep") for part in ("near", "far", "steps", "hops")},
}
"""Resources of `roofline.py` and their groups. The constant of that name prices a second of it, or one piece."""


def _messages(d: StepCost, k: Constants) -> Array:
    """Activations and their gradients sent between stages: hidden in part while the pipeline is full."""
    one = d.send_near * k["send_near"] + d.send_far * k["send_far"]
    one = one + np.where(d.send_far > 0, k["send_far_s"], k["send_near_s"])
    full = 2 * d.micro_batches * d.vp * (1 - k["send_hidden"] * d.overlap_p2p * k.get("overlap_pp", 1.0))
    return np.where(d.pp > 1, one * (full + 2 * (d.pp - 1)), 0.0)


def _exposed(d: StepCost, k: Constants, forward: Array, backward: Array) -> Array:
    """Seconds of data-parallel collectives that the passes beside them do not hide."""
    steps = d.dp_steps * k["dp_step_s"]
    reduce = d.reduce_near * k["dp_near"] + d.reduce_far * k["dp_far"] + steps
    gather = d.gather_near * k["dp_near"] + d.gather_far * k["dp_far"] + steps
    tail = k["dp_tail"] / np.maximum(d.layers, 1)
    passes = np.where(d.vp > 1, np.minimum(d.pp, d.micro_batches), 1.0)  # chunks are done one after another
    grads_under, params_under = d.overlap_grads * k.get("overlap_grads", 1.0), k.get("overlap_params", 1.0)
    after = _rest(reduce, grads_under * passes * backward * k["dp_under"], tail)
    before = _rest(gather, d.overlap_params * params_under * passes * forward * k["dp_under"], tail)
    once = after + before
    # ZeRO-3 gathers weights in both passes and reduces gradients in the backward pass, for every micro-batch.
    whole_pass = _rest(gather, forward * k["dp_under"], tail) + _rest(gather + reduce, backward * k["dp_under"], tail)
    three = d.micro_batches * (whole_pass + k["dp_slows"] * (2 * gather + reduce))
    per_micro_batch = _rest(reduce, grads_under * backward * k["dp_under"], tail) + k["dp_slows"] * reduce
    two = d.micro_batches * per_micro_batch + before + k["dp_slows"] * gather
    return np.select([d.zero == 3, d.zero == 2], [three, two], once + k["dp_slows"] * (gather + reduce))


def _rest(communication: Array, under: Array, tail: Number) -> Array:
    """Communication that outlasts the computation beside it; the last bucket has none beside it."""
    return np.maximum(communication * np.minimum(tail, 1.0), communication - under)


def _larger(a: Array, b: Array, power: Number) -> Array:
    """A smooth maximum: where the two are near, kernels differ and queues run empty at times."""
    power = _wide(power)[..., None]
    return (a**power + b**power) ** (1 / power)  # the p-norm


def _wide(value: Number) -> Array:
    return np.asarray(value, dtype=float)


def mfu(job: PlannedJob, seconds: float) -> float:
    """Model FLOP/s over the peak of the job's precision; attention counted causal, nothing recomputed.

    LoRA's frozen weights have no gradient: a forward and one backward product, two thirds.
    """
    flops = job.model.flops_per_token(job.seq, causal=True) * job.tokens * (2 / 3 if job.task == "lora" else 1)
    return flops / seconds / job.gpus / (job.node.gpu.tflops(job.precision) * 1e12)


def hfu(job: PlannedJob, seconds: float) -> float:
    """As `mfu`, with the forward passes counted that full recomputation repeats."""
    layout, layers = job.layout, job.model.layers
    share = 1.0 if layout.recompute == "full" else 0.0
    if layout.recompute == "full" and layout.recompute_method == "block":
        share = min(1.0, layout.recompute_layers * layout.pp * (layout.vp or 1) / layers)
    head = 6.0 * job.model.vocab * job.model.hidden / job.model.flops_per_token(job.seq, causal=True)
    return mfu(job, seconds) * (1 + share * (1 - head) / 3)


def tokens_per_s_per_gpu(job: PlannedJob, seconds: float) -> float:
    """Throughput of one GPU."""
    return job.tokens / seconds / job.gpus


__all__ = ["KINDS", "Step", "hfu", "mfu", "price", "step", "tokens_per_s_per_gpu"]
