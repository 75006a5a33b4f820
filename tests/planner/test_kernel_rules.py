from dataclasses import replace

import numpy as np
import pytest

from superpod.planner import hardware, legality, models
from superpod.planner.layout import Layout
from superpod.planner.planned_job import Options, PlannedJob, Task


def job(
    model: str,
    gpu: str = "h100",
    *,
    gpus: int = 64,
    seq: int = 4096,
    precision: str = "bf16",
    task: Task = "pretrain",
    options: Options | None = None,
    **layout: int,
) -> PlannedJob:
    node = hardware.node(gpu)
    return PlannedJob(
        model=models.find(model),
        node=node,
        fabric=hardware.builtin().fabric_of(node),
        gpus=gpus,
        seq=seq,
        precision=precision,
        task=task,
        layout=replace(Layout(gbs=256), **layout),
        options=options or Options(),
    )


def broken(of):
    return {rule.rule: rule for rule in legality.violations(of)}


def test_finding_4_a_learned_softmax_needs_cp_comm_a2a():
    ring = job("gpt_oss_20b", cp=2)
    refused = broken(ring)["attention_backend"]
    assert "no attention backend" in refused.message
    assert "does not exchange heads (a2a)" in refused.message
    assert refused.fix == "set cp_comm a2a"
    assert not broken(ring.replace(options=Options(cp_comm="a2a")))
    assert not broken(job("gpt_oss_20b"))


def test_finding_4_heads_are_whole_on_every_rank():
    refused = broken(job("gpt_oss_20b", tp=4, cp=4, sp=True, options=Options(cp_comm="a2a")))["attention_heads"]
    assert "tp 4 x cp 4 must divide the 64 heads and the 8 groups" in refused.message
    assert refused.fix == "set cp to a divisor of 2"


@pytest.mark.parametrize(("gpu", "refused"), [("a100", True), ("h100", False), ("b200", False), ("b300", False)])
@pytest.mark.parametrize("task", ["pretrain", "lora"])
def test_finding_5_latent_attention_has_no_backend_on_a100(gpu, refused, task):
    rules = broken(job("deepseek_v2_lite", gpu, task=task, ep=8))
    assert ("attention_backend" in rules) == refused
    if refused:
        assert "heads of two sizes" in rules["attention_backend"].message


def test_finding_5_scores_in_memory_are_legal_once_they_are_priced():
    unfused = Options(attention="unfused")
    assert "attention_backend" not in broken(job("deepseek_v2_lite", "a100", ep=8, options=unfused))
    assert "attention_backend" in broken(job("deepseek_v2_lite", "a100", task="lora", ep=8, options=unfused))  # packed
    assert "attention_backend" in broken(job("deepseek_v2_lite", "a100", cp=2, ep=8, options=unfused))


@pytest.mark.parametrize("model", ["gemma_2b", "gemma_7b", "gemma3_1b"])
def test_heads_of_256_have_no_backend_on_b300(model):
    assert "attention_backend" not in broken(job(model, "b200", seq=2048))
    assert "its head size" in broken(job(model, "b300", seq=2048))["attention_backend"].message


def test_a_window_under_context_parallelism_exchanges_heads():
    assert "sliding window" in broken(job("mistral_7b", cp=2, seq=32768))["attention_backend"].message
    assert not broken(job("mistral_7b", cp=2, seq=32768, options=Options(cp_comm="a2a")))


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "layout", "says"),
    [
        ("nemotronh_4b", "b200", "mxfp8", {}, "multiples of 32, and in_proj of nemotronh_4b has 16,496 x 3,072"),
        (
            "nemotronh_4b",
            "h100",
            "fp8cs",
            {"tp": 2, "sp": True},
            "multiples of 16, and in_proj of nemotronh_4b has 8,248",
        ),
        ("gpt_oss_20b", "h100", "fp8bw", {"tp": 2, "sp": True}, "a multiple of 128 columns where they are gathered"),
    ],
)
def test_finding_12_shapes_that_fp8_cannot_multiply(model, gpu, precision, layout, says):
    assert says in broken(job(model, gpu, precision=precision, **layout))["fp8_weights"].message


def test_finding_12_blocks_of_128_are_needed_only_where_they_are_gathered():
    assert "fp8_weights" not in broken(job("gpt_oss_20b", precision="fp8bw"))
    assert "fp8_weights" not in broken(job("qwen2_72b", precision="fp8bw", tp=8, sp=True))  # 3,696 columns of a rank


def test_tokens_that_fp8_cannot_multiply():
    assert "steps of 16" in broken(job("llama3_8b", precision="fp8cs", seq=4104))["fp8_tokens"].message
    assert not broken(job("llama3_8b", seq=4104))
    blockwise = broken(job("llama3_8b", precision="fp8bw", seq=512, tp=8, sp=True))["fp8_tokens"]
    assert "of 128 before they are gathered" in blockwise.message
    assert blockwise.message.endswith("= 64")


def test_userbuffers_gather_mxfp8_in_steps_of_128_tokens():
    small = job("llama3_8b", "b200", precision="mxfp8", seq=512, tp=8, sp=True)
    assert broken(small)["ub_mxfp8"].message.endswith("= 64")
    assert not broken(small.replace(options=Options(overlap_tp=False)))
    assert not broken(job("llama3_8b", "b200", precision="mxfp8", seq=1024, tp=8, sp=True))


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "task"),
    [
        ("gpt_oss_20b", "h100", "fp8bw", "pretrain"),
        ("nemotronh_4b", "h100", "fp8cs", "sft"),
        ("gemma_2b", "b300", "bf16", "sft"),
    ],
)
def test_many_layouts_have_the_answers_of_each_alone(model, gpu, precision, task):
    of = job(model, gpu, precision=precision, task=task, seq=4096)
    tp, cp = (column.ravel() for column in np.meshgrid([1, 2, 4], [1, 2, 4]))
    mask = legality.legal_mask(of, {"tp": tp, "cp": cp, "sp": tp > 1})
    alone = []
    for one_tp, one_cp in zip(tp, cp, strict=True):
        layout = Layout(gbs=256, tp=int(one_tp), cp=int(one_cp), sp=bool(one_tp > 1))
        alone.append(not legality.violations(of.replace(layout=layout)))
    assert list(mask) == alone


def test_a_run_of_another_release_or_framework_is_not_judged_by_these():
    release = Options(release="NeMo 25.09")
    assert "attention_backend" not in broken(job("deepseek_v2_lite", "a100", ep=8, options=release))
