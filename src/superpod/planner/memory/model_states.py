"""Bytes of weights, gradients and optimizer states per pipeline rank.

Bytes per parameter in BF16 with fp32 gradients: 18, or 6 + 12/d with the distributed optimizer (ZeRO-1), where d is dp
x cp for dense parameters and the expert data-parallel size for experts. Source: dist_optimizer.md in Megatron-LM's user
guide, verified with measured runs of a 405B model at three data-parallel sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superpod.planner.arrays import Array, Column, Number
from superpod.planner.memory import lora
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.models import counts
from superpod.planner.models.counts import Parameters

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class RankParameters:
    """Parameters on each pipeline rank."""

    dense: Array | Column
    """All except routed experts."""
    experts: Array | Column
    ends: Array | Column
    """Embedding and output layer, included in `dense`; never in FP8."""
    small: Array | Column
    """Norms and routers, included in `dense`; never in FP8."""

    @property
    def quantized(self) -> Array | Column:
        """Parameters that are quantized in FP8: the matrices of transformer layers."""
        return self.dense + self.experts - self.ends - self.small


def rank_parameters(u: MemoryUnits) -> RankParameters:
    """Return the exact number of parameters of each rank; a vectorized `models.counts.stage_parameters`."""
    m, c = u.job.model, u.c
    tp, ep, etp = u.tp, u.column("ep"), u.column("etp")
    dense: Number = 0
    experts: Number = 0
    small: Number = 0
    for kind, blocks in c.blocks.items():
        block = counts.block_parameters(m, kind, tp, ep, etp)
        dense = dense + blocks * block.dense
        experts = experts + blocks * block.experts
        small = small + blocks * (block.norms + block.router)
    matrix = m.padded_vocab(tp) * m.hidden // tp
    joined = _mtp(u)
    embedding = (c.first | (c.last & (m.mtp_layers > 0))) * (matrix + m.positions * m.hidden)
    head = c.last * np.where(m.tied & c.first, 0, matrix)
    norms = m.hidden * (1 if m.norm == "rms" else 2)
    ends = embedding + head
    return RankParameters(
        dense=dense + ends + c.last * (norms + joined.dense),
        experts=experts + c.last * joined.experts,
        ends=ends,
        small=small + c.last * norms,
    )


def _mtp(u: MemoryUnits) -> Parameters:
    m = u.job.model
    return counts.mtp_layer(m, u.tp, u.column("ep"), u.column("etp")) * m.mtp_layers if m.mtp_layers else Parameters()


def trained_parameters(u: MemoryUnits, own: RankParameters) -> RankParameters | lora.Adapters:
    """Return the parameters that require gradients: all, or LoRA's adapters."""
    return lora.adapters(u) if u.job.task == "lora" else own


def by_owner(u: MemoryUnits, own: RankParameters) -> dict[str, Array]:
    """Return the bytes of parameters, gradients, optimizer states and FP8 copies on each rank."""
    learns = trained_parameters(u, own)
    weight = _weight_bytes(u, own) + (2 * (learns.dense + learns.experts) if u.job.task == "lora" else 0)
    stage = u.column("sharding")
    keep = [_sharded_fraction(u.data_parallel, stage, least) for least in (1, 2, 3)]
    keep_experts = [_sharded_fraction(u.expert_data_parallel, stage, least) for least in (1, 2, 3)]
    # Weights are counted together, and split here into dense weights and experts, which are sharded over other groups.
    fraction = np.where(own.dense + own.experts > 0, own.dense / np.maximum(1, own.dense + own.experts), 1.0)
    optimizer, gradient = _optimizer_bytes(u), gradient_bytes(u)
    return {
        "parameters": weight * (fraction * keep[2] + (1 - fraction) * keep_experts[2]),
        "gradients": gradient * (learns.dense * keep[1] + learns.experts * keep_experts[1]),
        "optimizer": optimizer * (learns.dense * keep[0] + learns.experts * keep_experts[0]),
        "fp8_copies": _copies(u, own),
    }


def _sharded_fraction(degree: Array, stage: Column, least: int) -> Array:
    """Return the fraction of a tensor on each rank, for tensors that are sharded from ZeRO stage `least` on."""
    return np.where(stage >= least, 1.0 / degree, 1.0)


def _weight_bytes(u: MemoryUnits, own: RankParameters) -> Array | Column:
    total = own.dense + own.experts
    if u.job.options.fp8_params and u.is_fp8:
        return u.wide * (total - own.quantized) + u.fp8_copies * u.narrow * own.quantized
    return (4 if _has_fp32_weights(u) else u.wide) * total


def _copies(u: MemoryUnits, own: RankParameters) -> Array:
    """Return the bytes of weights that are quantized once per step for all micro-batches (TE's `is_first_microbatch`).

    With ZeRO-3, weights and their copies exist unsharded for two layers at a time.
    """
    if not u.is_fp8 or u.job.options.fp8_params or u.job.options.framework == "fsdp2":
        return np.zeros_like(own.dense, dtype=float)
    whole = np.where(u.column("sharding") >= 3, np.minimum(1.0, 2.0 / np.maximum(1, u.c.layers)), 1.0)
    return u.fp8_copies * u.narrow * own.quantized * whole


def _has_fp32_weights(u: MemoryUnits) -> bool:
    """Return whether weights are fp32: with FSDP2, unless the moments are BF16.

    Automodel then keeps all states in BF16.
    """
    return u.job.options.framework == "fsdp2" and u.job.options.moments == "fp32"


def gradient_bytes(u: MemoryUnits) -> int:
    """Return the bytes per parameter of the main gradient."""
    if u.job.precision == "fp16":
        return 2
    return 4 if u.job.options.grads == "fp32" or u.wide == 4 else 2


def _optimizer_bytes(u: MemoryUnits) -> float:
    """Return the bytes per parameter of two moments, and of fp32 master weights if the weights are not fp32.

    FSDP2 has no master weights. NeMo 24 used Apex's distributed Adam, which stores only the 16 bits that are missing in
    a BF16 weight (store_param_remainders).
    """
    options = u.job.options
    master = 0 if u.wide == 4 or options.framework == "fsdp2" else 2 if options.release.startswith("NeMo 24") else 4
    if u.job.precision == "fp16":
        master += 4  # Megatron casts FP16 gradients to a second, fp32 buffer: 20 bytes in all
    return (1 - options.offload) * (master + 2 * MOMENT_BYTES[options.moments])
