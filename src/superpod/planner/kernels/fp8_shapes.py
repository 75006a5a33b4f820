"""Size requirements of FP8: divisibility of the rows and columns of weights on a rank, and of tokens, per scaling type.

There is no fallback to BF16 if a size is not divisible. Transformer Engine 2.9 raises an assertion at the first forward
pass (pytorch/utils.py:438-456, called by module/linear.py:168, layernorm_linear.py:150), or its compiled GEMM does at
the first backward pass (common/gemm/cublaslt_gemm.cu, CanonicalizeGemmInput: "Leading dimension requirement on A for
FP8 GEMM. Caller must pad."). Megatron-Core 0.15.3 pads only the tokens of routed experts (transformer/moe/experts.py:
1054 and TEGroupedMLP). In an FP8 run, the embedding, output layer, router, and the first and last layers selected by
`first_last_layers_bf16` are in BF16 (megatron fp8_utils.py:409).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from superpod.planner.arrays import Boolean, Integer
    from superpod.planner.models import ModelShape


class SizeRequirement(NamedTuple):
    """Divisors required by one type of FP8 scaling.

    They apply to all three GEMMs of a training step, in which each size is the leading dimension once: the columns of
    the weight (forward), its rows (input gradient), and the tokens (weight gradient).
    """

    weight: int
    """Divisor of the rows and columns of a weight."""
    tokens: int
    """Divisor of the number of tokens in a GEMM."""
    local: int
    """Divisor of a rank's number of tokens with sequence parallelism, before the all-gather."""
    gathered: int
    """Divisor of the width of activations that are gathered in FP8 with sequence parallelism."""
    lines: str
    """Source files and lines."""


TENSOR = SizeRequirement(16, 16, 8, 16, "pytorch/utils.py:442; cublaslt_gemm.cu CanonicalizeGemmInput: lda % 16")
REQUIREMENTS = {
    "fp8ds": TENSOR,
    "fp8cs": TENSOR,
    "fp8": TENSOR,
    "fp8bw": SizeRequirement(
        *(16, 16, 128, 128),
        "cublaslt_gemm.cu, NVTE_BLOCK_SCALING: lda % 16, m % 8; scales are padded: "
        "tensor/float8_blockwise_tensor.py:112-170; gathered tensors consist of whole blocks of 128: 203-211",
    ),
    "mxfp8": SizeRequirement(
        *(32, 32, 32, 32),
        "tensor/mxfp8_tensor.py:78-86 and 101-107; common/cast: tensor rows and columns a multiple of 32",
    ),
}
"""Precision -> its requirements; files and lines are those of transformer_engine 2.9.0."""


class Weight(NamedTuple):
    """A weight on one rank, in Transformer Engine's order: [rows, columns] = [out, in]."""

    name: str
    """Megatron's name of the layer."""
    rows: Integer
    columns: Integer
    gathers: bool = False
    """Whether its input is gathered with sequence parallelism (column-parallel layers)."""


def weights(m: ModelShape, tp: Integer = 1, etp: Integer = 1) -> Iterator[Weight]:
    """Yield the weights that are GEMM inputs in FP8, for each kind of block in a model; tp and etp may be arrays."""
    for kind in sorted(m.kinds):
        yield from _BLOCKS[kind](m, tp, etp)
    if m.mtp_layers:
        yield Weight("eh_proj", m.hidden // tp, 2 * m.hidden)


def _attention(m: ModelShape, tp: Integer, _: Integer) -> Iterator[Weight]:
    queries = m.heads * m.channels
    wide = queries * (2 if m.attention_gate else 1) + 2 * m.groups * m.channels
    yield Weight("linear_qkv", wide // tp, m.hidden, True)
    yield Weight("linear_proj", m.hidden, queries // tp)


def _mla(m: ModelShape, tp: Integer, _: Integer) -> Iterator[Weight]:
    queries = m.heads * (m.qk_nope_dim + m.qk_rope_dim)
    if m.q_lora:
        yield Weight("linear_q_down_proj", m.q_lora, m.hidden)
        yield Weight("linear_q_up_proj", queries // tp, m.q_lora, True)
    else:
        yield Weight("linear_q_proj", queries // tp, m.hidden, True)
    yield Weight("linear_kv_down_proj", m.kv_lora + m.qk_rope_dim, m.hidden)
    yield Weight("linear_kv_up_proj", m.heads * (m.qk_nope_dim + m.v_dim) // tp, m.kv_lora, True)
    yield Weight("linear_proj", m.hidden, m.heads * m.v_dim // tp)


def _feed_forward(m: ModelShape, name: str, width: int, ffn: Integer, gathers: bool) -> Iterator[Weight]:
    yield Weight(f"{name}linear_fc1", ffn * (2 if m.gated else 1), width, gathers)
    yield Weight(f"{name}linear_fc2", width, ffn)


def _mlp(m: ModelShape, tp: Integer, _: Integer) -> Iterator[Weight]:
    for ffn in sorted(set(m.widths) - {0}):
        yield from _feed_forward(m, "", m.hidden, ffn // tp, True)


def _moe(m: ModelShape, tp: Integer, etp: Integer) -> Iterator[Weight]:
    yield from _feed_forward(m, "experts.", m.latent or m.hidden, m.expert_ffn // etp, False)
    if m.shared_ffn:
        yield from _feed_forward(m, "shared_experts.", m.hidden, m.shared_ffn // tp, True)
    if m.latent:
        yield Weight("fc1_latent_proj", m.latent, m.hidden)
        yield Weight("fc2_latent_proj", m.hidden, m.latent)


def _mamba(m: ModelShape, tp: Integer, _: Integer) -> Iterator[Weight]:
    if m.approximate:
        return  # Hyena's convolutions are planned as Mamba mixers, but have different matrices
    inner, states = m.mamba_heads * m.mamba_head_dim, 2 * m.mamba_groups * m.mamba_state
    yield Weight("in_proj", (2 * inner + states + m.mamba_heads) // tp, m.hidden, True)
    yield Weight("out_proj", m.hidden, inner // tp)


def _delta(m: ModelShape, tp: Integer, _: Integer) -> Iterator[Weight]:
    keys, values = m.delta_key_heads * m.delta_key_dim, m.delta_value_heads * m.delta_value_dim
    yield Weight("in_proj", (2 * keys + 2 * values + 2 * m.delta_value_heads) // tp, m.hidden, True)
    yield Weight("out_proj", m.hidden, values // tp)


_BLOCKS = {"attention": _attention, "mla": _mla, "mlp": _mlp, "moe": _moe, "mamba": _mamba, "delta": _delta}


def weight_misfits(steps: SizeRequirement, weight: Weight, sp: Boolean) -> Boolean:
    """Return whether the rows or columns of a weight violate the requirements; `sp`: with sequence parallelism."""
    is_misfit = (weight.rows % steps.weight != 0) | (weight.columns % steps.weight != 0)
    return is_misfit | (sp & weight.gathers & (weight.columns % steps.gathered != 0))


def tokens_misfit(steps: SizeRequirement, tokens: Integer, tp: Integer, sp: Boolean) -> Boolean:
    """Return whether the number of tokens of a micro-batch on a context-parallel rank violates the requirements."""
    local = tokens // tp
    return (tokens % steps.tokens != 0) | (sp & (local % steps.local != 0))
