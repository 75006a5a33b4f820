"""Predict the step time: compute roofline, exposed communication and pipeline schedule.

    step_cost.py  cost of a step at nominal peaks and bandwidths            (arithmetic)
    calibration   achieved relative to nominal performance                  (data/calibration.toml)
    this module   applies the calibration, overlap, and the pipeline        (arithmetic)

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

from superpod.planner.arrays import Array, Column, Number
from superpod.planner.calibration import calibration
from superpod.planner.columns import Columns
from superpod.planner.planned_job import PlannedJob
from superpod.planner.timing import schedule, step_cost
from superpod.planner.timing.roofline import INDEX, KINDS, PASSES, RESOURCES
from superpod.planner.timing.step_cost import StepCost, UnitCosts

Constants: TypeAlias = Mapping[str, float] | Mapping[str, Array]
"""Name -> constant of `calibration`: numbers, or arrays [L] for layouts of several jobs."""
GROUPS = ("compute", "launch", "tp", "cp", "ep")
TERMS = (
    *("compute", "recompute", "overhead", "tp", "cp", "ep"),
    *("pp_bubble", "pp_p2p", "dp", "optimizer"),
)
"""Keys of `Step.terms`."""


MIN_EXPOSED_DISPATCH = 0.5
"""Minimum exposed fraction of expert dispatch that overlaps with another micro-batch: overlap hid less than half of the
dispatch of Qwen3 235B on H100 (yanring/Megatron-MoE-ModelZoo, best_practice/qwen3/readme.md)."""
EDGE = 0.01
"""Width of the transition to full memory, as a fraction of the memory."""


@dataclass(frozen=True)
class Step:
    """Predicted step times in seconds; arrays have the shape of the columns without the axis of ranks."""

    seconds: Array
    terms: dict[str, Array]
    """Term -> exposed seconds; the sum is `seconds`.

    compute, recompute, overhead (waiting for launches and memory, and the constant part of a step), tp, cp, ep: of the
    slowest pipeline rank. pp_bubble: its wait for the other stages. pp_p2p, dp, optimizer: the part that does not
    overlap.
    """


@dataclass(frozen=True)
class UnitSeconds:
    """Seconds of one block per micro-batch, for the distinct units of a table of layouts."""

    kinds: Column
    """Kinds of blocks that have work."""
    passes: Array
    """[U, kinds, PASSES x GROUPS]"""
    repeated: Array
    """[V, kinds, GROUPS], of each unit with each kind of recomputation."""


def step(job: PlannedJob, c: Columns, units: UnitCosts | None = None, seconds: UnitSeconds | None = None) -> Step:
    """Return the step times of all layouts of a table; columns have shape [..., ranks].

    Layout and number of GPUs are taken from the columns, not from the job. A search, which computes a table in parts,
    passes `units` (those of the part) and `seconds` (those of the whole table).
    """
    shape = c.shape[:-1]
    terms = price(step_cost.from_job(job, c, units), calibration.constants(job), seconds)
    terms = {key: np.broadcast_to(part, shape or (1,)).reshape(shape) for key, part in terms.items()}
    return Step(sum(terms.values(), np.zeros(shape)), terms)


def price(d: StepCost, k: Constants, seconds: UnitSeconds | None = None) -> dict[str, Array]:
    """Return term -> exposed seconds [..., L]. Constants are numbers, or arrays [L] for layouts of several jobs.

    `seconds` is the result of `unit_seconds`, if it is known.
    """
    forward, backward, recomputed = _phases(d, seconds or unit_seconds(d, k))
    compute, launch = forward[0] + backward[0], forward[1] + backward[1]
    redone = recomputed[0] * d.recomputed_share
    launched = (launch + recomputed[1] * d.recomputed_share) * np.where(d.graphs > 0, _wide(k["graphed"]), 1.0)[
        ..., None
    ]
    # The CPUs of a TP group do not launch at the same time, and the group waits for the last one.
    late = k["jitter"] + k.get("late_senders", 0.0) * d.sends_far
    launched = launched * (1 + late * (d.tp - 1))[..., None]
    hidden = {
        "tp": _wide(k["tp_hidden"]) * d.overlap_tp * k.get("overlap_tp", 1.0),
        "cp": _wide(k["cp_hidden"]),
    }
    communication = {}
    for i, group in enumerate(("tp", "cp", "ep"), start=2):
        every = forward[i] + backward[i] + recomputed[i] * d.recomputed_share
        if group == "ep":  # overlaps with the computation of another micro-batch
            under = (_wide(k["ep_under"]) * d.overlap_experts)[..., None] * compute
            communication[group] = _exposed_part(
                every, under, np.where(d.overlap_experts > 0, MIN_EXPOSED_DISPATCH, 1.0)[..., None]
            )
        else:
            communication[group] = every * (1 - hidden[group])[..., None]
    gpu = compute + redone + sum(communication.values())
    # The GPU waits if the CPU launches kernels more slowly than they run, and if a stage retries allocations.
    per_rank = _smooth_maximum(gpu, launched, k["queue"]) + _retries(d, k)[..., None]
    waiting = per_rank - gpu
    slowest = np.where(d.weight > 0, per_rank, -1.0).argmax(axis=-1)[..., None]

    def pick(part: Array) -> Array:
        return np.take_along_axis(np.broadcast_to(part, per_rank.shape), slowest, axis=-1)[..., 0]

    m = d.micro_batches
    terms = {
        "compute": m * pick(compute),
        "recompute": m * pick(redone),
        "overhead": m * pick(waiting) + k["step_s"] + k["tensor_s"] * d.layers,
        **{group: m * pick(part) for group, part in communication.items()},
    }
    terms["pp_bubble"] = schedule.bubble_seconds(per_rank, d.weight, d.vp)
    terms["pp_p2p"] = _messages(d, k)
    terms["dp"] = _exposed_dp(d, k, pick(forward[0]), pick(backward[0])) + d.copies * k["copies"]
    terms["optimizer"] = d.host + d.states * k["states"] + d.grads * k["grads"]
    return terms


def _retries(d: StepCost, k: Constants) -> Array:
    """Return the seconds per micro-batch that a pipeline spends on allocation retries when memory is almost full."""
    above = 1 / (1 + np.exp(np.clip((k.get("full_from", 1.0) - d.full) / EDGE, -50, 50)))
    return k.get("alloc_retries", 0.0) * above * (1 - 1 / d.pp)


def unit_seconds(d: StepCost | UnitCosts, k: Constants) -> UnitSeconds:
    """Return the seconds of one block of each kind."""
    kinds = np.flatnonzero(d.work.any(axis=(0, 2, 3)))  # most models have three or four of the eight kinds
    coefficients = np.zeros(
        (*np.broadcast_shapes(*(np.shape(k[name]) for name in PRICES)), len(RESOURCES), len(GROUPS))
    )
    for name, group in PRICES.items():
        coefficients[..., INDEX[name], GROUPS.index(group)] = k[name]
    for name in ("kernels", "expert_kernels"):
        coefficients[..., INDEX[name], 0] = k["gap"]  # idle time of the GPU between two kernels
    work = d.work[:, kinds].reshape(len(d.work), -1, len(RESOURCES)) @ coefficients
    repeated = d.repeated[:, kinds] @ coefficients
    passes = work.reshape(len(d.work), len(kinds), len(PASSES) * len(GROUPS))
    return UnitSeconds(kinds, passes, repeated)


def _phases(d: StepCost, seconds: UnitSeconds) -> list[Array]:
    """Return the seconds per micro-batch of each rank: forward, backward and recomputed, [GROUPS, ..., L, R] each."""
    blocks = d.blocks[..., seconds.kinds]
    passes, repeated = np.matmul(blocks, seconds.passes[d.unit]), np.matmul(blocks, seconds.repeated[d.variant])
    return [*np.split(_layouts_contiguous(passes), len(PASSES)), _layouts_contiguous(repeated)]


def _layouts_contiguous(parts: Array) -> Array:
    """Return an array [..., L, R, GROUPS] as [GROUPS, ..., L, R], with contiguous layouts as in the columns."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(parts, (-1, -2), (0, 1))), 1, -1)


PRICES = {
    **dict.fromkeys(
        ("matmul", "plain", "router", "expert", "fill", "attention", "unfused", "scan", "delta", "misaligned"),
        "compute",
    ),
    **dict.fromkeys(("main_grads", "stream", "scores", "loss", "cast", "expert_cast", "sorting"), "compute"),
    **dict.fromkeys(("kernels", "expert_kernels"), "launch"),
    **{f"{group}_{part}": group for group in ("tp", "cp", "ep") for part in ("near", "far", "steps", "hops")},
}
"""Resource of `roofline.py` -> group. Its cost is multiplied by the calibration constant of the same name."""


def _messages(d: StepCost, k: Constants) -> Array:
    """Return the exposed seconds per step of sends between stages, which partly overlap while the pipeline is full."""
    one = d.send_near * k["send_near"] + d.send_far * k["send_far"]
    one = one + np.where(d.send_far > 0, k["send_far_s"], k["send_near_s"])
    full = 2 * d.micro_batches * d.vp * (1 - k["send_hidden"] * d.overlap_p2p * k.get("overlap_pp", 1.0))
    return np.where(d.pp > 1, one * (full + 2 * (d.pp - 1)), 0.0)


def _exposed_dp(d: StepCost, k: Constants, forward: Array, backward: Array) -> Array:
    """Return the seconds per step of data-parallel collectives that do not overlap with computation."""
    steps = d.dp_steps * k["dp_step_s"]
    reduce = d.reduce_near * k["dp_near"] + d.reduce_far * k["dp_far"] + steps
    gather = d.gather_near * k["dp_near"] + d.gather_far * k["dp_far"] + steps
    tail = k["dp_tail"] / np.maximum(d.layers, 1)
    passes = np.where(d.vp > 1, np.minimum(d.pp, d.micro_batches), 1.0)  # chunks finish one after another
    grads_under, params_under = d.overlap_grads * k.get("overlap_grads", 1.0), k.get("overlap_params", 1.0)
    after = _exposed_part(reduce, grads_under * passes * backward * k["dp_under"], tail)
    before = _exposed_part(gather, d.overlap_params * params_under * passes * forward * k["dp_under"], tail)
    once = after + before
    # ZeRO-3 gathers weights in both passes and reduces gradients in the backward pass, for every micro-batch.
    whole_pass = _exposed_part(gather, forward * k["dp_under"], tail) + _exposed_part(
        gather + reduce, backward * k["dp_under"], tail
    )
    three = d.micro_batches * (whole_pass + k["dp_slows"] * (2 * gather + reduce))
    per_micro_batch = _exposed_part(reduce, grads_under * backward * k["dp_under"], tail) + k["dp_slows"] * reduce
    two = d.micro_batches * per_micro_batch + before + k["dp_slows"] * gather
    return np.select([d.zero == 3, d.zero == 2], [three, two], once + k["dp_slows"] * (gather + reduce))


def _exposed_part(communication: Array, under: Array, tail: Number) -> Array:
    """Return the seconds of communication beyond the `under` seconds that hide it; the share `tail` is never hidden."""
    return np.maximum(communication * np.minimum(tail, 1.0), communication - under)


def _smooth_maximum(a: Array, b: Array, power: Number) -> Array:
    """Return a smooth maximum (p-norm): if both times are similar, the launch queue is sometimes empty."""
    power = _wide(power)[..., None]
    return (a**power + b**power) ** (1 / power)  # the p-norm


def _wide(value: Number) -> Array:
    return np.asarray(value, dtype=float)


def mfu(job: PlannedJob, seconds: float) -> float:
    """Return the model FLOPs utilization, relative to the peak of the job's precision, with causal attention.

    With LoRA, frozen weights have no weight gradient, so only two of three GEMMs count.
    """
    flops = job.model.flops_per_token(job.seq, causal=True) * job.tokens * (2 / 3 if job.task == "lora" else 1)
    return flops / seconds / job.gpus / (job.node.gpu.tflops(job.precision) * 1e12)


def hfu(job: PlannedJob, seconds: float) -> float:
    """Return the hardware FLOPs utilization: `mfu` plus the forward passes that full recomputation repeats."""
    layout, layers = job.layout, job.model.layers
    share = 1.0 if layout.recompute == "full" else 0.0
    if layout.recompute == "full" and layout.recompute_method == "block":
        share = min(1.0, layout.recompute_layers * layout.pp * (layout.vp or 1) / layers)
    head = 6.0 * job.model.vocab * job.model.hidden / job.model.flops_per_token(job.seq, causal=True)
    return mfu(job, seconds) * (1 + share * (1 - head) / 3)


def tokens_per_s_per_gpu(job: PlannedJob, seconds: float) -> float:
    """Return the throughput in tokens/s per GPU of a job with a step time of `seconds`."""
    return job.tokens / seconds / job.gpus


__all__ = ["KINDS", "Step", "hfu", "mfu", "price", "step", "tokens_per_s_per_gpu"]
