"""Every rule of the attention tables is needed: without it, some stored layer gets another answer than TE 2.9.0's."""

import pytest

from superpod.planner.kernels.attention import CP_ASSERTIONS, Attention, failed_assertions
from superpod.planner.kernels.fused_attention import FusedAttention
from tests.planner.kernels import near_cases
from tests.planner.kernels.near_cases import rules_of, without

ATTENTION = list(near_cases.read(near_cases.ATTENTION_ANSWERS, Attention))
KERNELS = list(near_cases.read(near_cases.KERNEL_ANSWERS, FusedAttention))
TABLES = (*near_cases.ATTENTION_TABLES, "ANY_FLASH", *near_cases.KERNEL_TABLES)

IMPLIED = {
    ("FUSED", "the GPU architecture"): "no kernel is compiled for less than sm80",
    ("FUSED", "the precision"): "no kernel is compiled for it",
    ("FUSED", "a softmax that is not vanilla, with FP8 attention"): "FP8's kernel has a vanilla softmax",
    ("FUSED", "the mask"): "no kernel is compiled for an arbitrary mask",
    ("FP8", "offsets"): "only packed samples have offsets, and `format` refuses those",
    ("MAX512", "offsets"): "only packed samples have offsets, and `layout` refuses those",
}
"""Rules that others imply: they are in Transformer Engine and name the reason, but decide nothing alone."""


def _wrong(table):
    if table in near_cases.KERNEL_TABLES:
        return [layer for layer, answer in KERNELS if near_cases.kernel_answer(layer) != answer]
    return [layer for layer, answer in ATTENTION if near_cases.attention_answer(layer) != answer]


def test_the_tables_answer_as_transformer_engine_does():
    assert not _wrong("FUSED")
    assert not _wrong("FP8")
    assert min(len(ATTENTION), len(KERNELS)) > 80


@pytest.mark.parametrize(("table", "rule"), [(table, rule) for table in TABLES for rule in rules_of(table)])
def test_a_table_without_one_of_its_rules_answers_wrongly(table, rule):
    with without(table, rule):
        assert bool(_wrong(table)) == ((table, rule) not in IMPLIED)


def test_every_rule_that_others_imply_is_in_a_table():
    assert all(rule in rules_of(table) for table, rule in IMPLIED)


CP = {"sm": 90, "seq_q": 4096, "seq_kv": 4096, "head_qk": 128, "head_v": 128, "window_right": 0, "cp": 2}
PACKED = {"qkv_layout": "thd_thd_thd", "mask": "padding_causal"}


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, []),
        ({"window_left": 128}, [0]),
        ({"window_left": 128, "cp_comm": "all_gather"}, []),
        ({"head_qk": 192, "cp_comm": "a2a"}, [1]),
        ({"head_qk": 192}, []),
        ({**PACKED}, []),
        ({**PACKED, "cp_comm": "a2a"}, [2]),
        ({**PACKED, "cp_comm": "all_gather"}, [2]),
        ({"mask": "padding_causal", "cp_comm": "a2a"}, [2]),
        ({"qkv_layout": "thd_thd_thd", "cp_comm": "a2a"}, [2]),
        ({**PACKED, "cp_comm": "a2a+p2p"}, [3]),
        ({"cp_comm": "a2a", "groups": 1}, [4]),
        ({"cp_comm": "a2a", "heads": 3, "groups": 16}, [4]),
    ],
)
def test_context_parallelism_asserts_each_of_its_rules(change, broken):
    assert [CP_ASSERTIONS.index(reason) for reason in failed_assertions(Attention(**CP | change))] == broken
