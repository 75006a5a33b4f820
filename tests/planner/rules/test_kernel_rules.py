from dataclasses import replace

import numpy as np
import pytest

from superpod.planner import hardware, legality, models
from superpod.planner.layout import Layout
from superpod.planner.models import counts
from superpod.planner.planned_job import Options, PlannedJob, Task
from superpod.planner.rules import kernel_rules, mxfp8_buffers


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


def test_a_learned_softmax_needs_cp_comm_a2a():
    ring = job("gpt_oss_20b", cp=2)
    refused = broken(ring)["attention_backend"]
    assert "no attention backend" in refused.message
    assert "context parallelism other than a2a" in refused.message
    assert refused.fix == "set cp_comm a2a"
    assert not broken(ring.replace(options=Options(cp_comm="a2a")))
    assert not broken(job("gpt_oss_20b"))


def test_heads_are_whole_on_every_rank():
    refused = broken(job("gpt_oss_20b", tp=4, cp=4, sp=True, options=Options(cp_comm="a2a")))["attention_heads"]
    assert "tp 4 x cp 4 must divide the 64 heads and the 8 groups" in refused.message
    assert refused.fix == "set cp to a divisor of 2"


@pytest.mark.parametrize(("gpu", "refused"), [("a100", True), ("h100", False), ("b200", False), ("b300", False)])
@pytest.mark.parametrize("task", ["pretrain", "lora"])
def test_latent_attention_has_no_backend_on_a100(gpu, refused, task):
    rules = broken(job("deepseek_v2_lite", gpu, task=task, ep=8))
    assert ("attention_backend" in rules) == refused
    if refused:
        assert "different head sizes" in rules["attention_backend"].message


def test_scores_in_memory_are_legal_once_they_are_priced():
    unfused = Options(attention="unfused")
    assert "attention_backend" not in broken(job("deepseek_v2_lite", "a100", ep=8, options=unfused))
    assert "attention_backend" in broken(job("deepseek_v2_lite", "a100", task="lora", ep=8, options=unfused))  # packed
    assert "attention_backend" in broken(job("deepseek_v2_lite", "a100", cp=2, ep=8, options=unfused))


@pytest.mark.parametrize("model", ["gemma_2b", "gemma_7b", "gemma3_1b"])
def test_heads_of_256_have_no_backend_on_b300(model):
    assert "attention_backend" not in broken(job(model, "b200", seq=2048))
    assert "the head size" in broken(job(model, "b300", seq=2048))["attention_backend"].message


def test_a_window_under_context_parallelism_exchanges_heads():
    assert "sliding window" in broken(job("mistral_7b", cp=2, seq=32768))["attention_backend"].message
    assert not broken(job("mistral_7b", cp=2, seq=32768, options=Options(cp_comm="a2a")))


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "layout", "message"),
    [
        ("nemotronh_4b", "b200", "mxfp8", {}, "32, but in_proj of nemotronh_4b has 16,496 x 3,072"),
        ("nemotronh_4b", "h100", "fp8cs", {"tp": 2, "sp": True}, "16, but in_proj of nemotronh_4b has 8,248"),
        ("gpt_oss_20b", "h100", "fp8bw", {"tp": 2, "sp": True}, "a multiple of 128 columns"),
    ],
)
def test_weight_shapes_that_fp8_does_not_support(model, gpu, precision, layout, message):
    assert message in broken(job(model, gpu, precision=precision, **layout))["fp8_weights"].message


def test_columns_must_be_multiples_of_128_only_if_gathered():
    assert "fp8_weights" not in broken(job("gpt_oss_20b", precision="fp8bw"))
    assert "fp8_weights" not in broken(job("qwen2_72b", precision="fp8bw", tp=8, sp=True))  # 3,696 columns of a rank


def test_numbers_of_tokens_that_fp8_does_not_support():
    assert "multiple of 16" in broken(job("llama3_8b", precision="fp8cs", seq=4104))["fp8_tokens"].message
    assert not broken(job("llama3_8b", seq=4104))
    blockwise = broken(job("llama3_8b", precision="fp8bw", seq=512, tp=8, sp=True))["fp8_tokens"]
    assert "of 128 before the all-gather" in blockwise.message
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


FP8_PARAMS = Options(fp8_params=True, overlap_params=False)


def test_mxfp8_parameters_of_sizes_that_64_does_not_divide_are_refused():
    """megatron-core 0.15.3 copies gathered parameters back from where they would start unpadded."""
    odd = job("nemotronh_8b", "b200", precision="mxfp8", tp=4, sp=True, options=FP8_PARAMS)
    refused = broken(odd)["mxfp8_sizes"]
    assert "A_log of nemotronh_8b has 32 elements per rank with tp 4" in refused.message
    assert "fp8_param_gather=False" in refused.fix
    assert "mxfp8_sizes" in broken(job("gpt_oss_20b", "b200", precision="mxfp8", options=FP8_PARAMS))
    for fine in (
        odd.replace(options=Options()),
        odd.replace(precision="fp8cs"),
        odd.replace(task="lora"),
        job("nemotronh_8b", "b200", precision="mxfp8", tp=2, sp=True, options=FP8_PARAMS),
        job("llama3_8b", "b200", precision="mxfp8", tp=4, sp=True, options=FP8_PARAMS),
        job("deepseek_v3", "b200", precision="mxfp8", gpus=256, pp=4, ep=32, options=FP8_PARAMS),
    ):
        assert "mxfp8_sizes" not in broken(fine)


@pytest.mark.parametrize("model", ["gpt_oss_20b", "nemotronh_8b", "deepseek_v3", "qwen3_30b_a3b", "gpt3_175b"])
@pytest.mark.parametrize("tp", [1, 4])
def test_small_parameters_are_those_that_the_counts_have(model, tp):
    """A size that the table had wrong, or a kind that it lacked, would not add up to the blocks' own counts."""
    shape = models.find(model)
    known = {parameter.name: int(parameter.size) for parameter in mxfp8_buffers.non_matrix_parameters(shape, tp, 1)}
    one = {kind: counts.block_parameters(shape, kind, tp) for kind in shape.kinds}
    if shape.sink:
        more = counts.block_parameters(shape.replace(sink=False), "attention", tp).attention
        assert one["attention"].attention - more == known["softmax_offset"]
    if shape.bias and "attention" in one:
        more = counts.block_parameters(shape.replace(bias=False), "attention", tp).attention
        assert one["attention"].attention - more == known["linear_qkv.bias"] + shape.hidden
    if "moe" in one:
        assert one["moe"].router == known["router.weight"] + known.get("router.bias", 0)
    if "mamba" in one:
        mixer = shape.conv * known["conv1d.bias"] + known["conv1d.bias"] + 3 * known["A_log"] + known["mixer.norm"]
        assert counts.elementwise(shape, "mamba", tp) == mixer


def test_adapters_of_up_projections_alone_take_no_recomputed_up_projection():
    """DoRA's: Megatron's checkpoint passes no gradient on where its input, the frozen down projections, has none."""
    given = {"recompute": "selective", "recompute_modules": ("mla_up_proj",)}
    of = job("deepseek_v3", "h200", gpus=16, task="lora", ep=16)
    of = of.replace(layout=replace(of.layout, **given))
    up = replace(of.options, lora_targets=("linear_q_up_proj", "linear_kv_up_proj"))
    down = replace(of.options, lora_targets=("linear_q_down_proj", "linear_q_up_proj"))
    assert "mla_up_proj" in broken(of.replace(options=up))["recompute_frozen_up"].fix
    assert "recompute_frozen_up" not in broken(of.replace(options=down))
    assert "recompute_frozen_up" not in broken(of.replace(task="sft"))


@pytest.mark.parametrize(
    ("model", "least"),
    [
        ("llama3_8b", ""),
        ("gpt_oss_20b", "9.13.1"),  # a softmax that learns its offset: fused_attn.cpp, of TE 2.9
    ],
)
@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
def test_the_oldest_cudnn_that_has_a_kernel(model, gpu, least):
    assert kernel_rules.oldest_cudnn(job(model, gpu)) == least
    assert kernel_rules.oldest_cudnn(job(model, gpu, options=Options(impl="local"))) == ""


def test_layers_are_seen_as_transformer_engine_sees_them():
    [layer] = kernel_rules.layers(job("llama3_8b", seq=4096, precision="fp16"), 4)
    assert (layer.sm, layer.dtype, layer.mask, layer.softmax, layer.format) == (90, "fp16", "causal", "vanilla", "sbhd")
    assert (layer.seq_q, layer.seq_kv, layer.cp, layer.window_left, layer.window_right) == (4096, 4096, 4, -1, 0)
    assert (layer.head_qk, layer.head_v, layer.heads, layer.groups) == (128, 128, 32, 8)
    [packed] = kernel_rules.layers(job("llama3_8b", task="lora"))
    assert (packed.format, packed.mask, packed.dtype, packed.cp) == ("thd", "padding_causal", "bf16", 1)
    [latent] = kernel_rules.layers(job("deepseek_v2_lite"))
    assert (latent.head_qk, latent.head_v, latent.heads, latent.groups) == (192, 128, 16, 16)
    oss = kernel_rules.layers(job("gpt_oss_20b", task="sft"))
    assert [layer.window_left for layer in oss] == [-1, 128]
    assert {(layer.softmax, layer.format) for layer in oss} == {("learnable", "sbhd")}  # its samples are not packed


@pytest.mark.parametrize(
    ("gpu", "task", "cp", "options", "refused"),
    [
        ("a100", "lora", 2, {}, True),
        ("a100", "sft", 2, {}, True),
        ("a100", "lora", 1, {}, False),
        ("a100", "pretrain", 2, {}, False),
        ("a100", "lora", 2, {"impl": "local"}, False),
        ("h100", "lora", 2, {}, False),
    ],
)
def test_padding_between_packed_samples_needs_a_kernel_of_cudnn(gpu, task, cp, options, refused):
    """cuDNN attends to packed samples (thd) from sm90 on: TE 2.9, fused_attn.cpp."""
    why = kernel_rules.explain_refused_padding(job("llama3_8b", gpu, task=task, cp=cp, options=Options(**options)))
    assert bool(why) is refused
    assert not refused or "samples packed as thd on sm80" in why


@pytest.mark.parametrize(
    ("model", "gpu", "task", "cp", "options", "fix", "degree"),
    [
        ("gpt_oss_20b", "h100", "pretrain", 2, {}, "set cp_comm a2a", " with cp 2,"),
        ("llama3_8b", "a100", "lora", 2, {"cp_comm": "a2a"}, "set cp 1", " with cp 2,"),
        ("llama3_8b", "a100", "lora", 2, {"cp_comm": "all_gather"}, "set cp 1", " with cp 2,"),
        (
            "gpt_oss_20b",
            "h100",
            "pretrain",
            1,
            {"attention_dropout": 0.1},
            "use a different GPU, or set attention unfused",
            "",
        ),
        ("deepseek_v2_lite", "a100", "lora", 1, {}, "use a different GPU", ""),
        ("deepseek_v2_lite", "a100", "lora", 2, {}, "use a different GPU", ""),  # cp is not the cause
    ],
)
def test_the_way_out_of_no_backend(model, gpu, task, cp, options, fix, degree):
    refused = broken(job(model, gpu, task=task, cp=cp, seq=2048, options=Options(**options)))["attention_backend"]
    assert refused.fix == fix
    assert (" with cp" in refused.message) == bool(degree)
    assert degree in refused.message
