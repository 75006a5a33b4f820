"""Configurations of Transformer Engine's own tests of attention, as the planner's rules see them.

NVIDIA/TransformerEngine, tests/pytorch/attention/test_attention.py at commit 368117b6 and test_attention_with_cp.py at
commit 00d14cd0: the numbers of each `ModelConfig`, under its name. What each must come to is what the test says where
it says it (a skip with a reason, "Hopper+", "# skipped" = fewer than two backends to compare), and in all cases the
answer of 2.9.0's `get_attention_backend` over its compiled library (compiled_te.py beside this file).
"""

from __future__ import annotations

from typing import Any, NamedTuple

CAUSAL, PADDED, PADDED_CAUSAL = {"mask": "causal"}, {"mask": "padding"}, {"mask": "padding_causal"}
CORNER, PADDED_CORNER = {"mask": "causal_bottom_right"}, {"mask": "padding_causal_bottom_right"}
SMALL = {"heads": 16, "groups": 16, "seq_q": 128, "seq_kv": 128, "head_qk": 64, "head_v": 64, "qkv_layout": "sb3hd"}
WIDE = {"heads": 24, "groups": 24, "seq_q": 2048, "seq_kv": 2048, "head_qk": 128, "head_v": 128, "qkv_layout": "sb3hd"}
HALF = {**SMALL, "seq_q": 2048, "seq_kv": 2048}
CROSS = {"seq_kv": 4096, "qkv_layout": "bshd_bs2hd"}
APART = {"qkv_layout": "sbhd_sbhd_sbhd"}
ONE_GROUP, FOUR_GROUPS = {"groups": 1, **APART}, {"groups": 4, **APART}
BIAS = {"bias": "post_scale_bias", "bias_grad": True}
ALIBI = {"bias": "alibi"}
PACKED = {"qkv_layout": "thd_thd_thd"}
NO_MASK = {"mask": "no_mask", "window_right": -1}


class Case(NamedTuple):
    """One configuration of a test, on one architecture."""

    test: str
    sm: int
    values: dict[str, Any]
    available: str
    """Backends that can take it: flash, fused, unfused."""
    asserts: bool = False
    """Context parallelism refuses it once a backend is chosen."""


def case(test: str, sm: int, *parts: dict[str, Any], available: str, asserts: bool = False) -> Case:
    values: dict[str, Any] = dict(NO_MASK)
    for part in parts:
        values |= part
    if "window_left" not in values and "causal" in values["mask"]:
        values["window_right"] = 0  # check_set_window_size
    return Case(test, sm, values, available, asserts)


CASES = (
    case("test_attention.py::base_1_0", 80, SMALL, available="flash fused unfused"),
    case("test_attention.py::base_1_0", 90, SMALL, available="flash fused unfused"),
    case("test_attention.py::base_1_0", 100, SMALL, available="flash fused unfused"),
    case("test_attention.py::base_2_0", 80, WIDE, available="flash fused unfused"),
    case("test_attention.py::base_2_0", 90, WIDE, available="flash fused unfused"),
    case("test_attention.py::base_2_1", 90, WIDE, CROSS, available="flash fused unfused"),
    case(
        "test_attention.py::base_4_1",
        90,
        {**SMALL, "head_qk": 192, "head_v": 192, "seq_kv": 2048, "qkv_layout": "bshd_bs2hd"},
        available="flash fused unfused",
    ),
    case(
        "test_attention.py::base_4_1",
        100,
        {**SMALL, "head_qk": 192, "head_v": 192, "seq_kv": 2048, "qkv_layout": "bshd_bs2hd"},
        available="flash unfused",
    ),
    case(
        "test_attention.py::base_5_1",
        90,
        {**SMALL, "head_qk": 512, "head_v": 512, "seq_kv": 2048, "qkv_layout": "bshd_bs2hd"},
        available="unfused",
    ),
    case("test_attention.py::mla_1_0", 80, SMALL, APART, {"head_v": 128}, available="fused unfused"),
    case("test_attention.py::mla_1_0", 90, SMALL, APART, {"head_v": 128}, available="fused unfused"),
    case(
        "test_attention.py::mla_1_2",
        90,
        SMALL,
        {"head_qk": 192, "head_v": 128, "seq_kv": 256, "qkv_layout": "bshd_bshd_bshd"},
        available="fused unfused",
    ),
    case("test_attention.py::mla_2_0", 80, WIDE, APART, CAUSAL, {"head_v": 64}, available="fused unfused"),
    case("test_attention.py::mla_2_0", 90, WIDE, APART, CAUSAL, {"head_v": 64}, available="fused unfused"),
    case("test_attention.py::mla_2_0", 100, WIDE, APART, CAUSAL, {"head_v": 64}, available="fused unfused"),
    case(
        "test_attention.py::mla_2_2",
        80,
        WIDE,
        CAUSAL,
        {"head_qk": 192, "head_v": 128, "seq_kv": 4096, "qkv_layout": "bshd_bshd_bshd"},
        available="unfused",
    ),
    case(
        "test_attention.py::mla_2_2",
        90,
        WIDE,
        CAUSAL,
        {"head_qk": 192, "head_v": 128, "seq_kv": 4096, "qkv_layout": "bshd_bshd_bshd"},
        available="fused unfused",
    ),
    case(
        "test_attention.py::mla_2_2",
        100,
        WIDE,
        CAUSAL,
        {"head_qk": 192, "head_v": 128, "seq_kv": 4096, "qkv_layout": "bshd_bshd_bshd"},
        available="fused unfused",
    ),
    case("test_attention.py::mask_1_0", 80, HALF, CAUSAL, available="flash fused unfused"),
    case("test_attention.py::mask_1_0", 90, HALF, CAUSAL, available="flash fused unfused"),
    case("test_attention.py::mask_1_1", 80, WIDE, ONE_GROUP, CAUSAL, available="flash fused unfused"),
    case("test_attention.py::mask_1_1", 90, WIDE, ONE_GROUP, CAUSAL, available="flash fused unfused"),
    case("test_attention.py::mask_1_2", 90, WIDE, CROSS, CAUSAL, available="fused unfused"),
    case("test_attention.py::mask_2_0", 90, HALF, CORNER, available="flash fused unfused"),
    case("test_attention.py::mask_2_2", 90, WIDE, CROSS, CORNER, available="flash fused unfused"),
    case("test_attention.py::mask_3_0", 80, HALF, PADDED, available="flash fused unfused"),
    case("test_attention.py::mask_3_0", 90, HALF, PADDED, available="flash fused unfused"),
    case("test_attention.py::mask_3_2", 90, WIDE, CROSS, PADDED, available="flash fused unfused"),
    case("test_attention.py::mask_4_1", 90, WIDE, ONE_GROUP, PADDED_CAUSAL, available="flash fused unfused"),
    case("test_attention.py::mask_5_0", 90, HALF, PADDED_CORNER, available="flash fused unfused"),
    case("test_attention.py::bias_1_0", 90, SMALL, BIAS, available="fused unfused"),
    case("test_attention.py::bias_1_2", 80, WIDE, BIAS, available="fused unfused"),
    case("test_attention.py::bias_1_2", 90, WIDE, BIAS, available="fused unfused"),
    case("test_attention.py::bias_1_4", 90, WIDE, ALIBI, available="flash unfused"),
    case("test_attention.py::bias_2_0", 90, SMALL, PADDED, BIAS, available="fused unfused"),
    case("test_attention.py::bias_2_2", 90, WIDE, PADDED, BIAS, available="unfused"),
    case("test_attention.py::bias_2_4", 90, WIDE, PADDED, ALIBI, available="flash unfused"),
    case("test_attention.py::bias_3_2", 90, WIDE, CAUSAL, BIAS, available="fused unfused"),
    case("test_attention.py::bias_3_4", 80, WIDE, CAUSAL, ALIBI, available="flash unfused"),
    case("test_attention.py::bias_3_4", 90, WIDE, CAUSAL, ALIBI, available="flash fused unfused"),
    case("test_attention.py::bias_4_2", 90, WIDE, PADDED_CAUSAL, BIAS, available="unfused"),
    case("test_attention.py::bias_4_4", 90, WIDE, PADDED_CAUSAL, ALIBI, available="flash unfused"),
    case(
        "test_attention.py::swa_2_1",
        80,
        HALF,
        CAUSAL,
        {"window_left": 2, "window_right": 0},
        available="flash fused unfused",
    ),
    case(
        "test_attention.py::swa_2_1",
        90,
        HALF,
        CAUSAL,
        {"window_left": 2, "window_right": 0},
        available="flash fused unfused",
    ),
    case(
        "test_attention.py::swa_2_2",
        90,
        WIDE,
        FOUR_GROUPS,
        CAUSAL,
        {"window_left": 2, "window_right": 0},
        available="flash fused unfused",
    ),
    case(
        "test_attention.py::swa_4_1", 90, HALF, PADDED, {"window_left": 2, "window_right": 2}, available="flash unfused"
    ),
    case(
        "test_attention.py::swa_5_2",
        90,
        WIDE,
        FOUR_GROUPS,
        PADDED_CAUSAL,
        {"window_left": 2, "window_right": 0},
        available="flash fused unfused",
    ),
    case(
        "test_attention.py::layout_1_0(sbhd_sbh2d)",
        90,
        WIDE,
        {"qkv_layout": "sbhd_sbh2d"},
        available="flash fused unfused",
    ),
    case(
        "test_attention.py::layout_2_1(bs3hd)",
        80,
        WIDE,
        CAUSAL,
        BIAS,
        {"head_qk": 256, "head_v": 256, "qkv_layout": "bs3hd"},
        available="unfused",
    ),
    case(
        "test_attention.py::layout_2_1(bs3hd)",
        90,
        WIDE,
        CAUSAL,
        BIAS,
        {"head_qk": 256, "head_v": 256, "qkv_layout": "bs3hd"},
        available="fused unfused",
    ),
    case(
        "test_attention.py::layout_2_1(bs3hd)",
        100,
        WIDE,
        CAUSAL,
        BIAS,
        {"head_qk": 256, "head_v": 256, "qkv_layout": "bs3hd"},
        available="unfused",
    ),
    case("test_attention.py::layout_0_0(thd)", 80, HALF, PACKED, PADDED, available="flash"),
    case("test_attention.py::layout_0_0(thd)", 90, HALF, PACKED, PADDED, available="flash fused"),
    case("test_attention.py::layout_1_0(thd)", 80, HALF, PACKED, PADDED_CAUSAL, available="flash"),
    case("test_attention.py::layout_1_0(thd)", 90, HALF, PACKED, PADDED_CAUSAL, available="flash fused"),
    case("test_attention.py::layout_1_1(thd)", 90, WIDE, PACKED, PADDED_CAUSAL, {"groups": 1}, available="flash fused"),
    case(
        "test_attention.py::layout_1_0(thd, padded between)",
        80,
        HALF,
        PACKED,
        PADDED_CAUSAL,
        {"pad_between": True},
        available="",
    ),
    case(
        "test_attention.py::layout_1_0(thd, padded between)",
        90,
        HALF,
        PACKED,
        PADDED_CAUSAL,
        {"pad_between": True},
        available="fused",
    ),
    case(
        "test_attention.py::layout_3_0(thd)",
        90,
        HALF,
        PACKED,
        PADDED,
        {"window_left": 4, "window_right": 4},
        available="flash",
    ),
    case(
        "test_attention.py::layout_4_0(thd)",
        80,
        HALF,
        PACKED,
        PADDED_CAUSAL,
        {"window_left": 4, "window_right": 0},
        available="flash",
    ),
    case(
        "test_attention.py::layout_4_0(thd)",
        90,
        HALF,
        PACKED,
        PADDED_CAUSAL,
        {"window_left": 4, "window_right": 0},
        available="flash fused",
    ),
)
"""{file}::{configuration}, architecture, numbers."""
