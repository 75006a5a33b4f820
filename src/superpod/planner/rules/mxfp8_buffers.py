"""List the parameters because of which Megatron-Core 0.15.3 corrupts MXFP8 parameters after their all-gather.

Each parameter starts at a multiple of 64 values in its buffer (distributed/param_and_grad_buffer.py:593), but is copied
back from the offset without this padding (:99-102). All parameters after one whose size is not a multiple of 64 are
corrupted from the first step on, without an error (tests/rehearsal/test_order_of_calls.py reproduces it). Matrices that
MXFP8 supports are multiples of 64 (`kernels/fp8_shapes.py`); the parameters listed here may not be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from superpod.planner.arrays import Integer
    from superpod.planner.models import ModelShape

ALIGNMENT = 64
"""Alignment of parameters in the buffer, in values."""


class Parameter(NamedTuple):
    """A parameter on one rank that is not an MXFP8 matrix."""

    name: str
    """Megatron's name."""
    size: Integer
    """Number of values."""


def non_matrix_parameters(m: ModelShape, tp: Integer = 1, etp: Integer = 1) -> Iterator[Parameter]:
    """Yield the parameters of each kind of block that are not MXFP8 matrices; tp and etp may be arrays."""
    yield Parameter("layernorm", m.hidden)
    if m.positions:
        yield Parameter("position_embeddings", m.positions * m.hidden)
    for kind in sorted(m.kinds):
        if kind in _BLOCKS:
            yield from _BLOCKS[kind](m, tp, etp)


def _attention(m: ModelShape, tp: Integer, _: Integer) -> Iterator[Parameter]:
    if m.qk_norm:
        yield Parameter("q_layernorm", m.channels)
    if m.sink:
        yield Parameter("softmax_offset", m.heads // tp)
    if m.bias or m.qkv_bias:
        queries = m.heads * m.channels * (2 if m.attention_gate else 1)
        yield Parameter("linear_qkv.bias", (queries + 2 * m.groups * m.channels) // tp)


def _mla(m: ModelShape, _: Integer, __: Integer) -> Iterator[Parameter]:
    yield Parameter("kv_layernorm", m.kv_lora)
    if m.q_lora:
        yield Parameter("q_layernorm", m.q_lora)


def _mlp(m: ModelShape, tp: Integer, _: Integer) -> Iterator[Parameter]:
    if m.bias:
        for ffn in sorted(set(m.widths) - {0}):
            yield Parameter("linear_fc1.bias", ffn * (2 if m.gated else 1) // tp)


def _moe(m: ModelShape, _: Integer, etp: Integer) -> Iterator[Parameter]:
    yield Parameter("router.weight", m.experts * m.hidden)
    if m.bias:
        yield Parameter("router.bias", m.experts)
        yield Parameter("experts.linear_fc1.bias", m.expert_ffn * (2 if m.gated else 1) // etp)


def _mamba(m: ModelShape, tp: Integer, _: Integer) -> Iterator[Parameter]:
    inner, states = m.mamba_heads * m.mamba_head_dim, 2 * m.mamba_groups * m.mamba_state
    yield Parameter("A_log", m.mamba_heads // tp)
    yield Parameter("conv1d.bias", (inner + states) // tp)
    yield Parameter("mixer.norm", inner // tp)


_BLOCKS = {"attention": _attention, "mla": _mla, "mlp": _mlp, "moe": _moe, "mamba": _mamba}
