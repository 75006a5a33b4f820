"""Selects fused attention backends with the rules of Transformer Engine's compiled part, from the planner's table."""

from __future__ import annotations

import os
from typing import Any

from superpod.planner.kernels.fused_attention import FusedAttention, fused_backend
from superpod.rehearsal.te import device
from superpod.rehearsal.te.compiled import enumerations

_ARGUMENTS = (
    *("is_training", "q_dtype", "kv_dtype", "qkv_layout", "bias", "mask", "softmax", "dropout", "heads", "groups"),
    *("seq_q", "seq_kv", "head_qk", "head_v", "window_left", "window_right", "max_logit"),
)
"""Arguments of get_fused_attn_backend, in order (transformer_engine/pytorch/csrc/extensions.h)."""
_DTYPES = {
    enumerations.DType.kBFloat16: "bf16",
    enumerations.DType.kFloat16: "fp16",
    enumerations.DType.kFloat8E4M3: "fp8",
    enumerations.DType.kFloat8E5M2: "fp8",
}
_PREFIXES = {"bias": "NVTE_", "softmax": "NVTE_", "qkv_layout": "NVTE_", "mask": "NVTE_"}
_SUFFIXES = {"softmax": "_SOFTMAX", "mask": "_MASK"}


def select_fused_backend(*arguments: Any) -> Any:
    """Return the fused attention backend of cuDNN for the arguments of TE's `get_fused_attn_backend`."""
    arguments_by_name = dict(zip(_ARGUMENTS, arguments, strict=True))
    dtype = _DTYPES.get(arguments_by_name.pop("q_dtype"), "other")
    del arguments_by_name["kv_dtype"]
    for name, prefix in _PREFIXES.items():
        arguments_by_name[name] = _to_planner_name(arguments_by_name[name].name, prefix, _SUFFIXES.get(name, ""))
    requested_backend = os.environ.get("NVTE_FUSED_ATTN_BACKEND")
    layer = FusedAttention(
        sm=device.current_gpu().major * 10 + device.current_gpu().minor,
        cudnn=device.CUDNN,
        dtype=dtype,
        wanted=int(requested_backend) if requested_backend else None,
        **arguments_by_name,
    )
    return enumerations.NVTE_Fused_Attn_Backend(int(fused_backend(layer)))


def _to_planner_name(name: str, prefix: str, suffix: str) -> str:
    """Convert a TE name such as `NVTE_PADDING_CAUSAL_MASK` to the planner's `padding_causal`."""
    short = name.removeprefix(prefix)
    if short != "NO_MASK":
        short = short.removesuffix(suffix)
    return {"OFF_BY_ONE": "off-by-one"}.get(short, short.lower())
