"""Activations that the forward pass keeps for the backward pass: bytes per block, micro-batch and rank.

arXiv:2205.05198 counts 34 bytes per token and hidden unit for a GPT layer. With flash attention and modern blocks, it
is 8h + 4q + 4kv + 6f (SwiGLU; 4f GeLU) + 4a per token, and 2h for dropout masks. This module has these terms per
operation, as Megatron-Core 0.15.3 and Transformer Engine 2.x save them. h hidden, q = heads x head size, kv = groups x
head size, f ffn, a heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superpod.planner.arrays import Array, Number
from superpod.planner.memory.units import MemoryUnits

ROUTING_BYTES = 13
"""Bytes per token and expert: logits, probabilities and top-k in fp32 (3 x 4), and a mask of 1 (moe_utils.py)."""


@dataclass(frozen=True)
class Kept:
    """Activation memory of a block per micro-batch on a rank, in bytes."""

    bytes: Array
    """Kept from the forward to the backward pass, with the layout's selective recomputation."""
    recomputed: Array
    """Recomputed activations during the backward pass of the block."""
    backward: Array
    """Additional peak memory of the backward pass of the block."""


def blocks(u: MemoryUnits) -> dict[str, Kept]:
    """Return the activation memory of each kind of block in the model."""
    return {kind: _BLOCKS[kind](u) for kind in {*u.c.blocks, *(u.job.model.mtp_blocks * bool(u.job.model.mtp_layers))}}


def _split_recomputed(u: MemoryUnits, module: str, size: Number) -> tuple[Array, Array]:
    """Split `size` bytes into (kept, recomputed) bytes: recomputed if the layout selects `module` for recomputation."""
    freed = u.recomputes(module)
    return np.where(freed, 0.0, size), np.where(freed, size, 0.0)


def _norm(u: MemoryUnits, block: str, target: str, count: int = 1) -> tuple[Array, Array]:
    """Return (kept, recomputed) bytes of a norm and the GEMM after it: the norm's input, and the GEMM's input."""
    h, outside = u.job.model.hidden, u.tokens * u.over_sp
    kept = count * u.saved_input_bytes(target) * h * outside
    # A fused norm shares its output with the GEMM; a separate one can be recomputed.
    recomputed = 0.0 * kept
    if u.job.has_separate_norm(block):
        kept, recomputed = _split_recomputed(u, "layernorm", kept)
    return u.act_bytes * h * outside + kept, recomputed


def _residual(u: MemoryUnits) -> Array:
    """Return the bytes of the dropout mask before the residual addition, and of the input of Gemma's post-norm."""
    m, outside = u.job.model, u.tokens * u.over_sp
    return ((u.job.options.hidden_dropout > 0) + u.act_bytes * m.post_norms) * m.hidden * outside


def attention(u: MemoryUnits) -> Kept:
    """Return the activation memory of an attention block: norm, fused QKV, core attention, projection."""
    m, inside = u.job.model, u.tokens * u.over_tp
    q, kv = m.heads * m.channels, m.groups * m.channels
    norm, recomputed = _norm(u, "attention", "linear_qkv")
    inputs = u.act_bytes * (q + 2 * kv) * inside
    inputs = inputs + u.act_bytes * q * m.attention_gate * inside + u.act_bytes * (q + kv) * m.qk_norm * inside
    core, core_recomputed = _core(u, q)
    backward = u.act_bytes * (q + 2 * kv) * inside + _score_gradients(u)
    return Kept(norm + inputs + core + _residual(u), recomputed + core_recomputed, backward)


def mla(u: MemoryUnits) -> Kept:
    """Return the activation memory of multi-latent attention: low-rank Q, K, V; their heads; core; projection."""
    m, inside, outside = u.job.model, u.tokens * u.over_tp, u.tokens * u.over_sp
    qk, v = m.heads * (m.qk_nope_dim + m.qk_rope_dim), m.heads * m.v_dim
    norm, recomputed = _norm(u, "mla", "linear_kv_down_proj", count=2 if u.is_fp8 else 1)
    latent = (u.act_bytes + u.saved_input_bytes("linear_kv_up_proj")) * (m.q_lora + m.kv_lora) * outside
    latent = latent + u.act_bytes * m.qk_rope_dim * outside
    heads, heads_recomputed = _split_recomputed(u, "mla_up_proj", u.act_bytes * (2 * qk + v) * inside)
    core, core_recomputed = _core(u, v)
    kept = norm + latent + heads + core + _residual(u)
    backward = u.act_bytes * (2 * qk + v) * inside + _score_gradients(u)
    return Kept(kept, recomputed + heads_recomputed + core_recomputed, backward)


def _score_gradients(u: MemoryUnits) -> Array:
    """Return the bytes that unfused attention needs in its backward pass for gradients of scores and probabilities."""
    return u.unfused * u.score_gradients * u.job.model.heads * u.job.seq * u.tokens * u.over_tp


def _core(u: MemoryUnits, out: int) -> tuple[Array, Array]:
    """Return (kept, recomputed) bytes of core attention: its output of width `out`, softmax statistics or scores."""
    m, o, inside = u.job.model, u.job.options, u.tokens * u.over_tp
    output = u.act_bytes * out * inside
    projected = u.saved_input_bytes("linear_proj") * out * inside
    same = u.saved_input_bytes("linear_proj") == u.act_bytes  # the projection and attention keep the same tensor
    own = 0.0 * output if same else output
    if o.cp_comm == "a2a":  # attention and the projection have different heads, so both keep a tensor
        own = np.where(u.column("cp") > 1, output, own)
    inner = own + (u.scores * u.job.seq if u.unfused else 4) * m.heads * inside  # fused: one fp32 statistic per row
    # With soft capping, keys and values are repeated for each head.
    inner = inner + u.act_bytes * 2 * (m.heads - m.groups) * m.channels * m.soft_capped * inside
    kept, recomputed = _split_recomputed(u, "core_attn", inner)
    return projected + kept, recomputed


def mlp(u: MemoryUnits) -> Kept:
    """Return the activation memory of an MLP: norm, first GEMM, activation, second GEMM."""
    m, inside = u.job.model, u.tokens * u.over_tp
    first = u.act_bytes * m.ffn * (1 + m.gated) * inside
    normed, recomputed = _norm(u, "mlp", "linear_fc1")
    norm_input = u.act_bytes * m.hidden * u.tokens * u.over_sp  # always kept: recomputation starts from it
    recomputable = normed - norm_input + first + u.saved_input_bytes("linear_fc2") * m.ffn * inside
    body, body_recomputed = _split_recomputed(u, "mlp", recomputable)
    # The larger of the first GEMM's gradient, and the gradients of the second GEMM's input and gathered output.
    backward = np.maximum(first, u.act_bytes * m.ffn * inside + u.act_bytes * m.hidden * u.tokens)
    return Kept(norm_input + body + _residual(u), recomputed + body_recomputed, backward)


def moe(u: MemoryUnits) -> Kept:
    """Return the activation memory of an MoE layer: norm, router, dispatch, grouped experts, shared experts."""
    m, o, outside = u.job.model, u.job.options, u.tokens * u.over_sp
    rows = u.tokens * u.over_tp * m.topk * u.column("etp")
    rows = rows * (o.capacity if o.capacity else o.imbalance)  # padded to the capacity, or those of the busiest rank
    width, ffn = m.latent or m.hidden, m.expert_ffn / u.column("etp")
    norm, recomputed = _norm(u, "moe", "linear_fc1")

    routing = ROUTING_BYTES * m.experts * outside
    first = u.act_bytes * ffn * (1 + m.gated) * rows
    clamped = first * m.clamped  # the clamps keep their input, in addition to that of the next operation
    act, act_recomputed = _split_recomputed(u, "moe_act", u.saved_input_bytes("linear_fc2") * ffn * rows + clamped)
    experts = (
        routing
        + (u.saved_input_bytes("linear_fc1") * width + 8) * rows
        + first
        + act
        + _weighting(u, ffn, width) * rows
    )
    shared, shared_recomputed = _split_recomputed(u, "shared_experts", _shared_experts(u))
    latent = u.act_bytes * m.latent * outside
    body, body_recomputed = _split_recomputed(u, "moe", experts + shared + latent)
    backward = first + u.act_bytes * width * rows + u.act_bytes * m.hidden * outside
    return Kept(norm + body + _residual(u), recomputed + act_recomputed + shared_recomputed + body_recomputed, backward)


def _weighting(u: MemoryUnits, ffn: Array, width: int) -> Number:
    """Return the bytes per row that multiplication by the router's probability keeps.

    With SwiGLU, it is fused; otherwise it keeps the output of the activation function. Before Megatron-Core 0.12, it
    was applied to the output of the experts and kept that.
    """
    if u.mcore < 0.12:
        return u.act_bytes * width
    return 0.0 if u.job.model.gated else u.act_bytes * ffn


def _shared_experts(u: MemoryUnits) -> Array:
    """Return the bytes that the shared experts keep."""
    m, inside = u.job.model, u.tokens * u.over_tp
    if not m.shared_ffn:
        return 0.0 * inside
    quantised = u.saved_input_bytes("linear_fc1") * m.hidden * u.tokens * u.over_sp * u.is_fp8
    return (u.act_bytes * (1 + m.gated) + u.saved_input_bytes("linear_fc2")) * m.shared_ffn * inside + quantised


def mamba(u: MemoryUnits) -> Kept:
    """Return the activation memory of a Mamba mixer: outputs of in_proj and the scan; mamba_ssm recomputes the rest."""
    m, inside = u.job.model, u.tokens * u.over_tp
    inner, states = m.mamba_heads * m.mamba_head_dim, 2 * m.mamba_groups * m.mamba_state
    norm, recomputed = _norm(u, "mamba", "in_proj")
    mixed = u.act_bytes * (2 * inner + states + m.mamba_heads) * inside
    kept = norm + mixed + (u.act_bytes + u.gemm_input_bytes) * inner * inside + _residual(u)
    return Kept(kept, recomputed, mixed + u.act_bytes * (inner + states) * inside)


def delta(u: MemoryUnits) -> Kept:
    """Return the activation memory of a gated delta net: in_proj, convolution, recurrence (fla), gated norm."""
    m, inside = u.job.model, u.tokens * u.over_tp
    keys, values = m.delta_key_heads * m.delta_key_dim, m.delta_value_heads * m.delta_value_dim
    norm, recomputed = _norm(u, "delta", "in_proj")
    mixed = u.act_bytes * (2 * keys + 2 * values + 2 * m.delta_value_heads) * inside
    inner = u.act_bytes * (2 * keys + values) * inside + (2 * u.act_bytes + u.gemm_input_bytes) * values * inside
    return Kept(norm + mixed + inner + _residual(u), recomputed, mixed + inner)


_BLOCKS = {"attention": attention, "mla": mla, "mlp": mlp, "moe": moe, "mamba": mamba, "delta": delta}
