"""Dry builds of stock recipes: real Megatron models, counted."""

import pytest

from superpod.planner import models
from superpod.planner.models import Split
from superpod.rehearsal.proof.meta_build import DEFAULT_VOCAB
from tests.rehearsal.case_client import CaseRequest, with_outcomes

pytestmark = pytest.mark.nemo

LLAMA3_8B = 8_030_261_248  # huggingface.co/meta-llama/Meta-Llama-3-8B: 8.03 B
NORMS = (2 * 32 + 1) * 4096


def counts(outcome):
    assert outcome["outcome"] == "passed", (outcome["error"], outcome["log"])
    return outcome["value"]["counts"]


@with_outcomes(CaseRequest("dry-8b"))
def test_llama3_8b(outcome):
    assert counts(outcome) == [[LLAMA3_8B]]


@with_outcomes(CaseRequest("dry-8b-tp2-pp2"))
def test_ranks_add_up(outcome):
    total = sum(sum(chunks) for chunks in counts(outcome))
    assert total == LLAMA3_8B + NORMS  # both tensor-parallel ranks hold the norms


@with_outcomes(CaseRequest("dry-405b"))
def test_llama31_405b_on_16384_gpus(outcome):
    first, middle, last = counts(outcome)  # TP 8, PP 8, and two chunks: 7 + 8, 8 + 8 and 8 + 7 layers
    assert len(first) == len(middle) == len(last) == 2
    layer = middle[0] / 8
    embedding = first[0] - 7 * layer
    assert embedding == 129_024 / 8 * 16_384  # 128,256 padded to a multiple of 128 x TP
    assert last[1] == first[0] + 16_384  # the last norm
    assert (8 * 16 - 2) * layer * 8 + 2 * embedding * 8 == pytest.approx(405.9e9, rel=1e-3)


@with_outcomes(CaseRequest("dry-gemma2", order="patches-first"))
def test_gemma2_when_the_patches_come_first(outcome):
    assert counts(outcome) == [[2_614_341_888]]


@with_outcomes(CaseRequest("dry-qwen3-30b"))
def test_experts(outcome):
    assert counts(outcome) == [[30_532_122_624]]  # as huggingface.co/Qwen/Qwen3-30B-A3B


@with_outcomes(CaseRequest("dry-deepseek"))
def test_attention_with_latents(outcome):
    """As planned: Megatron builds the matrices down to the latents with TE's parallel_mode="duplicated", so that both
    tensor-parallel ranks hold them whole."""
    model = models.find("deepseek_v3").replace(mtp_layers=1, vocab=DEFAULT_VOCAB)
    split = Split(tp=2, pp=16, ep=64, etp=1, first_layers=3, last_layers=2)
    planned = [[chunk.total for chunk in model.chunk_parameters(split, stage)] for stage in (0, 15)]
    assert counts(outcome) == planned == [[1_365_884_928], [1_890_725_888]]


@with_outcomes(CaseRequest("dry-fp8"))
def test_a_recipe_in_fp8(outcome):
    assert outcome["value"] == [LLAMA3_8B], outcome["error"]


@with_outcomes(CaseRequest("dry-step"))
def test_item_10_the_schedule_runs_without_transformer_engine_too(outcome):
    answers = outcome["value"]
    assert answers["None"] == answers["12"] == ["5", "5", "5"], outcome["error"]
    assert all("should range in [PP=4 , M=256]" in answer for answer in answers["2"])


@with_outcomes(CaseRequest("dry-twice"))
def test_a_build_leaves_nothing_behind(outcome):
    assert outcome["outcome"] == "passed", (outcome["error"], outcome["log"])
    assert outcome["value"] == [[LLAMA3_8B], [999_885_952]]


@with_outcomes(CaseRequest("dry-vocabulary"))
def test_where_the_vocabulary_comes_from(outcome):
    counts_by_source = outcome["value"]
    rest = counts_by_source["argument"] - 2 * 4096 * 128  # embedding and output layer; 64 padded to 128
    sizes = {source: (count - rest) // (2 * 4096) for source, count in counts_by_source.items()}
    assert sizes == {
        "stand-in": 128_256,
        "not on this machine": 128_256,
        "tokenizer": 1024,  # padded to a multiple of 128
        "argument": 128,
        "config": 500,  # as it stands
    }
