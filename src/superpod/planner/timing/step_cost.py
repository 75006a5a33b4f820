"""Compute the cost of one step on each pipeline rank before calibration, which `steptime.py` converts to seconds.

`from_job` is the only part of the time model that reads the job. `stack` concatenates the tables of several jobs, so
that `benchmarks/fit_steptime.py` can compute a thousand runs at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from superpod.planner import memory
from superpod.planner.arrays import Array, Column
from superpod.planner.calibration import corrections
from superpod.planner.columns import Columns
from superpod.planner.models import counts
from superpod.planner.planned_job import PlannedJob
from superpod.planner.timing import collectives, roofline
from superpod.planner.timing.blocks import work as block_work
from superpod.planner.timing.roofline import KINDS, KernelUnits

LORA_SHARE = 0.01 / 32
"""Adapter parameters per LoRA rank as a fraction of all parameters; 0.3 to 1.5 % in total at ranks 16 to 64."""
DEGREES = (
    *("tp", "pp", "vp", "cp", "ep", "etp", "dp", "sp", "mbs", "micro_batches"),
    *("recompute", "recompute_block", "recompute_layers", "modules", "sharding"),
)
"""Columns that do not depend on the rank."""


@dataclass(frozen=True)
class UnitCosts:
    """Cost of one block of each kind for the distinct units of a table of layouts, as in `StepCost`."""

    work: Array
    repeated: Array
    unit: Column
    variant: Column
    parameters: Array
    """[U, K, 2], parameters on one rank: dense, routed experts."""

    def rows(self, at: Column) -> UnitCosts:
        """Return the units of some of the layouts."""
        return replace(self, unit=self.unit[at], variant=self.variant[..., at])


@dataclass(frozen=True)
class StepCost:
    """Cost of L layouts with R distinct pipeline ranks, U units and K kinds of blocks; from `micro_batches` on, [L].

    Values that depend on recomputation or sharding may have further axes before L (`Columns`).
    """

    work: Array
    """[U, K, PASSES, RESOURCES], `blocks.work`."""
    unit: Column
    """[L], index of the layout's unit in `work`."""
    repeated: Array
    """[V, K, RESOURCES], work that is recomputed in the backward pass, of each unit with each kind of recomputation."""
    variant: Column
    """[..., L], index in `repeated`."""
    blocks: Array
    """[L, R, K], number of blocks."""
    weight: Array
    """[L, R], number of pipeline ranks that an entry represents."""
    recomputed_share: Array
    """[..., L, R], fraction of the recomputable work that the rank recomputes."""
    micro_batches: Array
    pp: Array
    vp: Array
    tp: Array
    send_near: Array
    """Seconds at nominal bandwidth to send the activations of a micro-batch to the next stage."""
    send_far: Array
    sends_far: Array
    """1 if pipeline stages are in different NVLink domains, else 0."""
    reduce_near: Array
    """s at nominal bandwidth to reduce-scatter the gradients, on the rank with the most parameters."""
    reduce_far: Array
    gather_near: Array
    """s at nominal bandwidth to all-gather the parameters."""
    gather_far: Array
    dp_steps: Array
    """Number of latencies of one of these collectives."""
    states: Array
    """s at HBM bandwidth to read and write a rank's shard of the optimizer states."""
    grads: Array
    """s at HBM bandwidth to read a rank's unsharded gradients and parameters once."""
    copies: Array
    """s at HBM bandwidth to copy and scale the gradients that are exchanged."""
    layers: Array
    """Maximum number of layers per rank, to which the number of parameter tensors is proportional."""
    zero: Array
    """ZeRO stage: from 2 on, gradients are reduced per micro-batch; at 3, parameters are gathered per pass."""
    host: Array
    """s of the optimizer step in host memory: gradients and weights over PCIe, Adam on the CPU."""
    overlap_grads: Array
    overlap_params: Array
    overlap_p2p: Array
    overlap_tp: Array
    overlap_experts: Array
    graphs: Array
    full: Array
    """Fraction of the usable memory that is reserved on the rank with the highest peak; 0 if no calibration uses it."""


def unit_costs(job: PlannedJob, one: Mapping[str, Column]) -> UnitCosts:
    """Return the cost of the units of layouts; `one`: the columns in `DEGREES`."""
    units, unit, variant = _units(one)
    work, repeated = block_work(job, units)
    return UnitCosts(work, repeated.reshape(-1, *repeated.shape[-2:]), unit, variant, _parameters(job, units))


def from_job(job: PlannedJob, c: Columns, units: UnitCosts | None = None) -> StepCost:
    """Return the cost of a table of layouts of one job; the ranks of a single layout are a table of L = 1.

    `units` are the `unit_costs` of these layouts, if they are known.
    """
    one = {key: np.atleast_1d(getattr(c, key)[..., 0]) for key in DEGREES}
    units = units or unit_costs(job, one)
    weight, layers = map(np.atleast_2d, (c.weight, c.layers))
    first, last = map(np.atleast_2d, (c.first, c.last))
    blocks = np.zeros((*weight.shape, len(KINDS)))
    m = job.model
    for kind in m.kinds:
        held = c.blocks.get(kind, 0)
        blocks[..., KINDS.index(kind)] = held + last * (m.mtp_layers * m.mtp_blocks.count(kind))
    blocks[..., KINDS.index("embedding")] = first
    blocks[..., KINDS.index("head")] = last * (1 + m.mtp_layers)
    count = len(units.unit)
    return StepCost(
        **{key: getattr(units, key) for key in ("work", "unit", "repeated", "variant")},
        blocks=blocks,
        weight=weight.astype(float),
        recomputed_share=_recomputed_share(one, layers),
        **{key: one[key].astype(float) for key in ("micro_batches", "pp", "vp", "tp")},
        **_sends(job, one),
        **_states(job, one, units.parameters[units.unit], blocks * (weight > 0)[..., None]),
        layers=layers.max(axis=1).astype(float),
        zero=one["sharding"].astype(float),
        **{key: np.full(count, float(getattr(job.options, key))) for key in OVERLAPS},
        graphs=np.full(count, float(job.options.cuda_graphs)),
        full=np.atleast_1d(full(job, c))
        if corrections.includes_retries(job.node.gpu.calibrated_as)
        else np.zeros(count),
    )


def full(job: PlannedJob, c: Columns) -> Array:
    """Return the peak reserved memory of each layout as a fraction of the GPU's usable memory, ignoring memory caps."""
    reserved = np.where(c.weight > 0, memory.peak(job, c).reserved, 0)
    return reserved.max(axis=-1) / memory.usable(job.node.gpu)


GATHERED_AS_FP8 = ("fp8", "fp8ds", "fp8cs")
"""Precisions in which fp8_param_gather sends one byte per parameter. MXFP8 weights, with row-wise and column-wise
scales, are sent in BF16 through the gradient buffer, and quantized by the receiver (megatron-core 0.15.3,
core/distributed/param_and_grad_buffer.py:695-711)."""
STATE_TRAFFIC = 28.0
"""Bytes that Adam reads and writes per parameter: FP32 gradient, weight and two moments, and the BF16 weight."""
HOST_BYTES_PER_S = 40e9
"""Host memory bandwidth per GPU: 16 channels of DDR5-4800 have 614 GB/s for 8 GPUs; half of it is assumed."""

OVERLAPS = ("overlap_grads", "overlap_params", "overlap_p2p", "overlap_tp", "overlap_experts")


def stack(costs: Sequence[StepCost]) -> StepCost:
    """Concatenate the costs of several jobs along L, padded with ranks of weight 0."""
    ranks = max(d.weight.shape[1] for d in costs)
    offsets = np.cumsum([0, *(len(d.work) for d in costs)])
    columns: dict[str, Any] = {}
    for f in fields(StepCost):
        parts = [getattr(d, f.name) for d in costs]
        if f.name in ("blocks", "weight", "recomputed_share"):
            parts = [np.pad(p, [(0, 0), (0, ranks - p.shape[1])] + [(0, 0)] * (p.ndim - 2)) for p in parts]
        if f.name in ("unit", "variant"):  # each job has one unit, with one kind of recomputation
            parts = [part + offset for part, offset in zip(parts, offsets, strict=False)]
        columns[f.name] = np.concatenate(parts)
    return StepCost(**columns)


def _units(one: Mapping[str, Column]) -> tuple[KernelUnits, Column, Column]:
    """Return the distinct combinations of fields that determine the work of a block, and two indices per layout.

    The first index is that of the combination, the second that of the combination with its kind of recomputation. If
    recomputation has its own axis, each combination is combined with each kind.
    """
    degrees = {name: one[name] for name in ("tp", "cp", "ep", "etp", "sp", "mbs")}
    recomputation = {"modules": one["modules"], "full": np.where(one["recompute"] == 2, 1, 0)}
    if one["modules"].ndim == 1:
        values, unit = _distinct(degrees | recomputation)
        variants, variant = {name: values.pop(name) for name in recomputation}, unit
    else:
        values, unit = _distinct(degrees)
        variants, kind = _distinct({name: column.reshape(-1) for name, column in recomputation.items()})
        variants = {name: column[:, None] for name, column in variants.items()}
        variant = kind.reshape(one["modules"].shape) * len(values["tp"]) + unit
    floats = {name: column.astype(float) for name, column in values.items()}
    return KernelUnits(**floats, modules=variants["modules"], full=variants["full"] > 0), unit, variant


def _distinct(columns: Mapping[str, Column]) -> tuple[dict[str, Column], Column]:
    """Return the distinct rows of a table, and the index of each row among them."""
    key = np.zeros(1, dtype=np.int64)  # one number per combination: np.unique(axis=0) is slower
    for column in columns.values():
        values, index = np.unique(column, return_inverse=True)
        key = key * len(values) + index
    _, at, places = np.unique(key, return_index=True, return_inverse=True)
    return {name: column[at] for name, column in columns.items()}, places.reshape(-1)


def _recomputed_share(one: Mapping[str, Column], layers: Column) -> Array:
    """Return the fraction of its layers that each rank recomputes: with the block method recompute_layers per chunk."""
    recomputed_layers = one["recompute_layers"] * one["vp"]
    block = (one["recompute"] == 2) & (one["recompute_block"] == 1)
    return np.where(block[..., None], np.minimum(1.0, recomputed_layers[..., None] / np.maximum(layers, 1)), 1.0)


def _sends(job: PlannedJob, one: Mapping[str, Column]) -> dict[str, Array]:
    """Return the cost of sending a micro-batch's activations to the next stage: tokens x hidden (/ tp with SP)."""
    tokens = one["mbs"] * job.seq / one["cp"] / np.where(one["sp"] == 1, one["tp"], 1)
    size = tokens * job.model.hidden * 2.0
    # Distance of neighboring stages in global ranks: pp is the outermost dimension.
    inner = one["tp"] * one["cp"] * one["dp"]
    near_ranks = np.where(inner < job.node.nvlink_domain, 2, 1)
    v = collectives.volumes("send", size, np.minimum(one["pp"], 2), near_ranks)
    crosses = (one["pp"] > 1) & (one["pp"] * inner > job.node.nvlink_domain)
    return {
        "send_near": np.asarray(v.near / roofline.links_near(job)),
        "send_far": np.asarray(v.far / _far(job)),
        "sends_far": crosses.astype(float),
    }


def _far(job: PlannedJob) -> float:
    """Return the nominal bandwidth between NVLink domains per GPU, in bytes/s."""
    return collectives.inter_domain_gb_per_s(job.node, job.fabric) * 1e9


def _parameters(job: PlannedJob, units: KernelUnits) -> Array:
    """Return the number of parameters of one block of each kind on one rank: [U, K, (dense, experts)]."""
    tp, ep, etp = (column.astype(np.int64) for column in (units.tp, units.ep, units.etp))
    parameters = np.zeros((len(tp), len(KINDS), 2))
    for kind in job.model.kinds:
        p = counts.block_parameters(job.model, kind, tp, ep, etp)
        parameters[:, KINDS.index(kind), 0] = p.dense
        parameters[:, KINDS.index(kind), 1] = p.experts
    matrix = job.model.vocab * job.model.hidden / tp
    parameters[:, KINDS.index("embedding"), 0] = parameters[:, KINDS.index("head"), 0] = matrix
    return parameters


def _states(job: PlannedJob, one: Mapping[str, Column], parameters: Array, blocks: Array) -> dict[str, Array]:
    """Return the cost of data-parallel communication and the optimizer step, on the rank with the most parameters."""
    options = job.options
    kinds = np.flatnonzero(parameters.any(axis=(0, 2)))
    held = blocks[..., kinds] @ parameters[:, kinds]
    held = held[np.arange(len(held)), held.sum(axis=2).argmax(axis=1)]  # the rank with most parameters: [L, 2]
    trained = LORA_SHARE * options.lora_rank if job.task == "lora" else 1.0
    grad_bytes = 4.0 if options.grads == "fp32" and options.framework == "megatron" else 2.0
    weight_bytes = 1.0 if options.fp8_params and job.precision in GATHERED_AS_FP8 else 2.0
    none = np.zeros(len(held))
    near, far = {"reduce": none, "gather": none}, {"reduce": none, "gather": none}
    grid = one["tp"] * one["cp"] * one["dp"] // (one["ep"] * one["etp"])
    # 0: dense parameters, reduced over dp x cp; 1: routed experts, over the expert data-parallel group.
    shards = {0: one["cp"] * one["dp"], 1: np.maximum(1, grid)}
    strides = {0: one["tp"], 1: one["ep"] * one["etp"]}
    states, steps = none, none
    gathered = np.where(one["sharding"] == 3, 1.0, trained)  # ZeRO-3 also shards frozen weights
    for which, parameter_bytes in (("reduce", grad_bytes * trained), ("gather", weight_bytes * gathered)):
        for part, ranks in shards.items():
            near_ranks = np.clip(job.node.nvlink_domain / strides[part], 1, ranks)
            v = collectives.volumes("all_gather", held[:, part] * parameter_bytes, ranks, near_ranks)
            near[which] = near[which] + v.near / roofline.links_near(job)
            far[which] = far[which] + v.far / _far(job)
            steps = np.maximum(steps, v.near_steps + v.far_steps)
    hbm, pcie = job.node.gpu.hbm_tb_per_s * 1e12, job.node.gpu.pcie_gb_per_s * 1e9
    for part, ranks in shards.items():
        share = np.where(one["sharding"] > 0, 1.0 / ranks, 1.0)
        states = states + held[:, part] * share * STATE_TRAFFIC * trained
    return {
        **{f"{which}_near": seconds for which, seconds in near.items()},
        **{f"{which}_far": seconds for which, seconds in far.items()},
        "dp_steps": steps,
        "states": (1 - options.offload) * states / hbm,
        "host": options.offload * (states / HOST_BYTES_PER_S + states * 6 / STATE_TRAFFIC / pcie),
        "grads": held.sum(axis=1) * (grad_bytes + 2.0) * trained / hbm,
        "copies": (held * np.stack([shards[0] > 1, shards[1] > 1], axis=1)).sum(axis=1) * grad_bytes * trained / hbm,
    }
