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
    """Number of parameters on each pipeline rank."""

    dense: Array | Column
    """All except routed experts."""
    experts: Array | Column
    ends: Array | Column
    """Embedding and output layer, included in `dense`; never in FP8."""
    small: Array | Column
    """Norms and routers, included in `dense`; never in FP8."""

    @property
    def quantized(self) -> Array | Column:
        """Parameters that FP8 quantizes: the matrices of transformer layers."""
        return self.dense + self.experts - self.ends - self.small


def rank_parameters(u: MemoryUnits) -> RankParameters:
    """Return the exact number of parameters of each rank, equal to the sum of `models.counts.stage_parameters`."""
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
    mtp = counts.mtp_layer(m, tp, ep, etp) * m.mtp_layers if m.mtp_layers else Parameters()
    embedding = (c.first | (c.last & (m.mtp_layers > 0))) * (matrix + m.positions * m.hidden)
    head = c.last * np.where(m.tied & c.first, 0, matrix)
    norms = m.hidden * (1 if m.norm == "rms" else 2)
    ends = embedding + head
    return RankParameters(
        dense=dense + ends + c.last * (norms + mtp.dense),
        experts=experts + c.last * mtp.experts,
        ends=ends,
        small=small + c.last * norms,
    )


def trained_parameters(u: MemoryUnits, own: RankParameters) -> RankParameters | lora.Adapters:
    """Return the parameters that require gradients: with LoRA the adapters, else all (`own`)."""
    return lora.adapters(u) if u.job.task == "lora" else own


def by_owner(u: MemoryUnits, own: RankParameters) -> dict[str, Array]:
    """Return category -> bytes on each rank: parameters, gradients, optimizer, fp8_copies."""
    trained = trained_parameters(u, own)
    weight = _weight_bytes(u, own) + (2 * (trained.dense + trained.experts) if u.job.task == "lora" else 0)
    stage = u.column("sharding")
    keep = [_sharded_fraction(u.data_parallel, stage, least) for least in (1, 2, 3)]
    keep_experts = [_sharded_fraction(u.expert_data_parallel, stage, least) for least in (1, 2, 3)]
    # Dense weights and experts are sharded over different groups; `weight` has both.
    fraction = np.where(own.dense + own.experts > 0, own.dense / np.maximum(1, own.dense + own.experts), 1.0)
    optimizer, gradient = _optimizer_bytes(u), gradient_bytes(u)
    return {
        "parameters": weight * (fraction * keep[2] + (1 - fraction) * keep_experts[2]),
        "gradients": gradient * (trained.dense * keep[1] + trained.experts * keep_experts[1]),
        "optimizer": optimizer * (trained.dense * keep[0] + trained.experts * keep_experts[0]),
        "fp8_copies": _fp8_copy_bytes(u, own),
    }


def _sharded_fraction(degree: Array, stage: Column, least: int) -> Array:
    """Return the fraction of a state that each rank keeps: 1 / degree from ZeRO stage `least` on, else 1."""
    return np.where(stage >= least, 1.0 / degree, 1.0)


def _weight_bytes(u: MemoryUnits, own: RankParameters) -> Array | Column:
    """Return the bytes of unsharded weights, including FP8 copies if parameters are stored in FP8."""
    total = own.dense + own.experts
    if u.job.options.fp8_params and u.is_fp8:
        return u.act_bytes * (total - own.quantized) + u.fp8_copies * u.gemm_input_bytes * own.quantized
    if u.job.options.framework == "fsdp2" and u.job.options.moments == "fp32":  # Automodel has BF16 states and weights
        return 4 * total
    return u.act_bytes * total


def _fp8_copy_bytes(u: MemoryUnits, own: RankParameters) -> Array:
    """Return the bytes of FP8 weights that are quantized once per step (Transformer Engine's `is_first_microbatch`).

    With ZeRO-3, they exist for two layers at a time.
    """
    if not u.is_fp8 or u.job.options.fp8_params or u.job.options.framework == "fsdp2":
        return np.zeros_like(own.dense, dtype=float)
    resident = np.where(u.column("sharding") >= 3, np.minimum(1.0, 2.0 / np.maximum(1, u.c.layers)), 1.0)
    return u.fp8_copies * u.gemm_input_bytes * own.quantized * resident


def gradient_bytes(u: MemoryUnits) -> int:
    """Return the bytes per parameter of the gradient buffer."""
    if u.job.precision == "fp16":
        return 2
    return 4 if u.job.options.grads == "fp32" or u.act_bytes == 4 else 2


def _optimizer_bytes(u: MemoryUnits) -> float:
    """Return the bytes per parameter of two moments, and of fp32 master weights if the weights are not fp32.

    FSDP2 has no master weights. NeMo 24 used Apex's distributed Adam, which stores only the 16 bits that are missing in
    a BF16 weight (store_param_remainders).
    """
    options = u.job.options
    master = 2 if options.release.startswith("NeMo 24") else 4
    if u.act_bytes == 4 or options.framework == "fsdp2":
        master = 0
    if u.job.precision == "fp16":
        master += 4  # Megatron casts FP16 gradients to a second, fp32 buffer: 20 bytes in total
    return (1 - options.offload) * (master + 2 * MOMENT_BYTES[options.moments])
