"""Compute the peak memory of each rank: model states, activations, logits, buffers and temporary gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superpod.planner.arrays import Array, Flags, Number
from superpod.planner.memory import lora, model_states
from superpod.planner.memory.constants import MIB, constant
from superpod.planner.memory.in_flight import activations_in_flight
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.models import ModelShape


@dataclass(frozen=True)
class Moment:
    """Memory of each rank at its peak."""

    owners: dict[str, Array]
    """Category -> bytes in tensors."""
    set_aside: Array | float
    """Unused bytes in the memory pool of CUDA graphs."""


def peak_moment(u: MemoryUnits) -> Moment:
    """Return the bytes per category at the peak of each rank.

    The peak is the maximum of four moments: the loss (last stage), the backward pass of the last layer, the optimizer
    step, which has no activations, and the capture of CUDA graphs, which has no other activations.
    """
    own = model_states.rank_parameters(u)
    acts = activations_in_flight(u)
    logits, head = _logits_bytes(u), _head_bytes(u)
    backward = acts.recomputed + acts.backward + u.act_bytes * u.job.model.hidden * u.tokens * u.over_sp
    at_loss = u.c.last & (logits + head > backward)
    passes = acts.kept + np.where(at_loss, logits + head, backward)
    step = _optimizer_step_bytes(u, model_states.trained_parameters(u, own))
    at_step = step > passes
    pool = acts.graphs.kept + acts.graphs.backward
    has_graphs = np.any(pool)
    at_capture = has_graphs and pool > np.maximum(passes, step)
    during_passes = np.where(at_step | at_capture, 0.0, 1.0)
    transient = np.where(at_step, step, np.where(at_loss, head, backward))
    owners = {
        "activations": during_passes * acts.kept + np.where(at_capture, acts.graphs.kept, 0.0),
        "logits": during_passes * np.where(at_loss, logits, 0.0),
        "transient": np.where(at_capture, acts.graphs.backward, transient),
        "wgrad_dummies": _wgrad_dummy_bytes(u),
        "buffers": _buffer_bytes(u) + _gathered_bytes(u, own) + acts.graphs.static,
    }
    set_aside = np.minimum(pool, np.maximum(passes, step)) if has_graphs else 0.0
    return Moment(model_states.by_owner(u, own) | owners, set_aside)


def _logits_bytes(u: MemoryUnits) -> Array:
    """Return the bytes of logits during the loss and its backward pass, on the last stage.

    Transformer Engine's loss works in place on the BF16 logits. Megatron's loss keeps exp(logits) in fp32 in addition
    to BF16 logits, and overwrites fp32 logits (tensor_parallel/cross_entropy.py); when compiled, it makes another fp32
    copy, or two before 0.12 (fusions/fused_cross_entropy.py). Each multi-token-prediction layer has its own loss.
    PyTorch's loss keeps the logits, their fp32 copy and log-probabilities, and creates a gradient in fp32.
    """
    m, o = u.job.model, u.job.options
    elements = u.tokens * m.padded_vocab(u.tp) * u.over_tp
    if o.framework == "fsdp2":
        kept, temporary = u.act_bytes + 8, 4
    elif o.fused_loss and o.loss_impl == "te":
        kept, temporary = u.act_bytes, 0
    else:
        copies = o.fused_loss + (o.fused_loss and u.mcore < 0.12)
        kept, temporary = 4, 4 * copies + (u.act_bytes if u.act_bytes < 4 else 0)
    return (kept * (1 + m.mtp_layers) + temporary) * elements


def _head_bytes(u: MemoryUnits) -> Array:
    """Return the bytes of the final norm's input and output, and of the gradient of the output layer's input.

    The gradient is complete on every rank before it is scattered over tp.
    """
    size = u.act_bytes * u.job.model.hidden * u.tokens
    return size * (2 * u.over_sp + np.where(u.column("tp") > 1, 1 + u.over_sp, 1.0))


def _wgrad_dummy_bytes(u: MemoryUnits) -> Array:
    """Return the bytes of dummy weight gradients for autograd, one per shape, allocated for the entire run.

    With gradient accumulation fusion, the GEMM accumulates into the main gradient, and autograd gets an unused tensor
    of the weight's shape (Transformer Engine, `get_dummy_wgrad`; megatron-core, tensor_parallel/layers.py).
    """
    o = u.job.options
    if o.framework != "megatron" or not o.grad_fusion or o.impl != "te" or u.job.task == "lora":
        return np.zeros(u.c.rank.shape)
    m = u.job.model
    # One tensor per shape, on the ranks that have such a weight.
    shapes: dict[tuple[str, int, int], Flags] = {}
    for kind, blocks in u.c.blocks.items():
        for shape in _weight_shapes(m, kind):
            shapes[shape] = shapes.get(shape, False) | (blocks > 0)
    fraction = {"tp": u.over_tp, "etp": 1.0 / u.column("etp"), "": 1.0}
    layers: Number = sum(
        is_present * (2.0 * rows * abs(columns) * fraction[dim]) for (dim, rows, columns), is_present in shapes.items()
    )
    return layers + u.c.last * 2.0 * m.padded_vocab(u.tp) * m.hidden * u.over_tp


def _weight_shapes(m: ModelShape, kind: str) -> list[tuple[str, int, int]]:
    """Return (tp, etp or "" = not sharded, rows, columns) of a block's weights; columns < 0 if these are sharded."""
    q, kv, wide = m.heads * m.channels, m.groups * m.channels, 1 + m.gated
    if kind == "attention":
        return [("tp", q * (1 + m.attention_gate) + 2 * kv, m.hidden), ("tp", m.hidden, -q)]
    if kind == "mla":
        qk, down = m.heads * (m.qk_nope_dim + m.qk_rope_dim), m.kv_lora + m.qk_rope_dim
        queries = [("", m.q_lora, m.hidden), ("tp", qk, m.q_lora)] if m.q_lora else [("tp", qk, m.hidden)]
        keys = [("", down, m.hidden), ("tp", m.heads * (m.qk_nope_dim + m.v_dim), m.kv_lora)]
        return [*queries, *keys, ("tp", m.hidden, -m.heads * m.v_dim)]
    if kind == "mlp":
        return [("tp", wide * m.ffn, m.hidden), ("tp", m.hidden, -m.ffn)]
    if kind == "moe":
        size = m.latent or m.hidden
        shared = [("tp", wide * m.shared_ffn, m.hidden), ("tp", m.hidden, -m.shared_ffn)] if m.shared_ffn else []
        return [("etp", wide * m.expert_ffn, size), ("etp", size, -m.expert_ffn), *shared]
    inner = m.mamba_heads * m.mamba_head_dim if kind == "mamba" else m.delta_value_heads * m.delta_value_dim
    return [("tp", 2 * inner, m.hidden), ("tp", m.hidden, -inner)]


def _gathered_bytes(u: MemoryUnits, own: model_states.RankParameters) -> Array:
    """Return the bytes of tensors that ZeRO-2 and ZeRO-3 gather temporarily.

    These are the weights of the current and the next layer, embedding and output layer, and the gradients of two layers
    before their reduction (torch FSDP2 prefetch; Megatron-FSDP double buffering).
    """
    stage = u.column("sharding")
    if not np.any(stage >= 2):
        return np.zeros(u.c.rank.shape)
    layer = (own.dense + own.experts - own.ends) / np.maximum(1, u.c.layers)
    weights = u.act_bytes * (2 * layer + own.ends) * (stage >= 3)
    return weights + model_states.gradient_bytes(u) * 2 * layer * (stage >= 2)


def _buffer_bytes(u: MemoryUnits) -> Array:
    """Return the bytes of cuBLAS workspaces, sequence parallelism's gather buffer and pipeline receive buffers."""
    size = u.act_bytes * u.job.model.hidden * u.tokens
    gathered = size * ((u.column("sp") > 0) & u.c.last)
    received = size * u.over_sp * ((u.column("pp") > 1) & ~u.c.first)
    return _workspace_bytes(u) + gathered + received


def _workspace_bytes(u: MemoryUnits) -> float:
    """Return the bytes of cuBLAS workspaces.

    PyTorch has one per thread (forward and backward pass); Transformer Engine has one, and more for the streams of
    grouped GEMMs. Deterministic mode has eight of 4 MiB (CUBLAS_WORKSPACE_CONFIG=:4096:8).
    """
    o, gpu = u.job.options, u.job.node.gpu
    torch = constant("buffers", "cublas_deterministic_mib") if o.deterministic else gpu.cublas_workspace_mib
    grouped = constant("buffers", "cublas_te_streams") * (u.job.model.is_moe and o.impl == "te" and o.grouped_gemm)
    return (2 * torch + gpu.te_workspace_mib * (1 + grouped)) * MIB


def _optimizer_step_bytes(u: MemoryUnits, trained: model_states.RankParameters | lora.Adapters) -> Array:
    """Return the bytes of the fp32 copies of 2-byte gradients that the optimizer step creates.

    Source: distrib_optimizer.py, `_copy_model_grads_to_main_grads`.
    """
    if model_states.gradient_bytes(u) == 4 or u.job.precision == "fp16" or u.job.options.moments != "fp32":
        return np.zeros(u.c.rank.shape)
    degree = np.where(u.column("sharding") >= 1, u.data_parallel, 1)
    experts = np.where(u.column("sharding") >= 1, u.expert_data_parallel, 1)
    return 4.0 * (trained.dense / degree + trained.experts / experts)
