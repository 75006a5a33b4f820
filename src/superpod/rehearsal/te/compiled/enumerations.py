"""Enumerations of `transformer_engine_torch` that Transformer Engine's Python package reads.

Source of names and values: NVIDIA/TransformerEngine v2.9, transformer_engine/common/include/transformer_engine/*.h and
transformer_engine/pytorch/csrc/extensions/pybind.cpp.
"""

from __future__ import annotations

from enum import IntEnum
from typing import cast


def _create(name: str, *members: str, start: int = 0) -> type[IntEnum]:
    return cast(type[IntEnum], IntEnum(name, {member: number for number, member in enumerate(members, start)}))


class DType(IntEnum):
    """Number formats (transformer_engine.h, NVTEDType)."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


# Indices of a layer's tensors in its scales (pytorch/csrc/common.h): three GEMMs forward, three backward.
FP8FwdTensors = _create(
    "FP8FwdTensors", *(f"GEMM{gemm}_{tensor}" for gemm in (1, 2, 3) for tensor in ("INPUT", "WEIGHT", "OUTPUT"))
)
FP8BwdTensors = _create(
    "FP8BwdTensors", *(f"GRAD_{tensor}{gemm}" for gemm in (1, 2, 3) for tensor in ("OUTPUT", "INPUT"))
)
NVTE_Bias_Type = _create("NVTE_Bias_Type", "NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI")
NVTE_Mask_Type = _create(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK",
    "NVTE_PADDING_MASK",
    "NVTE_CAUSAL_MASK",
    "NVTE_PADDING_CAUSAL_MASK",
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _create(
    "NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX", "NVTE_OFF_BY_ONE_SOFTMAX", "NVTE_LEARNABLE_SOFTMAX"
)
NVTE_Fused_Attn_Backend = _create(
    "NVTE_Fused_Attn_Backend",
    "NVTE_No_Backend",
    "NVTE_F16_max512_seqlen",
    "NVTE_F16_arbitrary_seqlen",
    "NVTE_FP8",
    start=-1,
)
NVTE_QKV_Format = _create(
    "NVTE_QKV_Format",
    "NVTE_SBHD",
    "NVTE_BSHD",
    "NVTE_THD",
    "NVTE_BSHD_2SBHD",
    "NVTE_SBHD_2BSHD",
    "NVTE_THD_2BSHD",
    "NVTE_THD_2SBHD",
)
NVTE_QKV_Layout = _create(
    "NVTE_QKV_Layout",
    *("NVTE_SB3HD", "NVTE_SBH3D", "NVTE_SBHD_SB2HD", "NVTE_SBHD_SBH2D", "NVTE_SBHD_SBHD_SBHD"),
    *("NVTE_BS3HD", "NVTE_BSH3D", "NVTE_BSHD_BS2HD", "NVTE_BSHD_BSH2D", "NVTE_BSHD_BSHD_BSHD"),
    *("NVTE_T3HD", "NVTE_TH3D", "NVTE_THD_T2HD", "NVTE_THD_TH2D", "NVTE_THD_THD_THD"),
    *("NVTE_SBHD_BSHD_BSHD", "NVTE_BSHD_SBHD_SBHD", "NVTE_THD_BSHD_BSHD", "NVTE_THD_SBHD_SBHD"),
    *("NVTE_Paged_KV_BSHD_BSHD_BSHD", "NVTE_Paged_KV_BSHD_SBHD_SBHD", "NVTE_Paged_KV_SBHD_BSHD_BSHD"),
    *("NVTE_Paged_KV_SBHD_SBHD_SBHD", "NVTE_Paged_KV_THD_BSHD_BSHD", "NVTE_Paged_KV_THD_SBHD_SBHD"),
)
Float8BlockScaleTensorFormat = _create("Float8BlockScaleTensorFormat", "GEMM_READY", "COMPACT")
CommOverlapType = _create("CommOverlapType", "RS", "AG")
CommOverlapAlgo = _create(
    "CommOverlapAlgo",
    *("BULK_OVERLAP_AG", "BULK_OVERLAP_RS", "SPLIT_PIPELINED_AG_P2P", "SPLIT_PIPELINED_RS", "SPLIT_PIPELINED_RS_P2P"),
    *("ATOMIC_GEMM_RS", "ATOMIC_GEMM_AG_P2P", "ATOMIC_GEMM_RS_P2P", "EXTERNAL_BULK_OVERLAP_AG"),
)
ALL = {
    member.__name__: member
    for member in (
        *(DType, FP8FwdTensors, FP8BwdTensors, NVTE_Bias_Type, NVTE_Mask_Type, NVTE_Softmax_Type),
        *(NVTE_Fused_Attn_Backend, NVTE_QKV_Format, NVTE_QKV_Layout, Float8BlockScaleTensorFormat),
        *(CommOverlapType, CommOverlapAlgo),
    )
}
