"""Test required versions by family, precision and GPU."""

from dataclasses import replace

import pytest

from superpod.collection import recipe_job, registry
from superpod.collection.facts import needs
from superpod.planner import hardware
from superpod.runtime.runs import versions

TRITON = needs.TRITON[:2]


def of(name):
    recipe = registry.find(name)
    return {(package, least) for package, least, _, _ in needs.required_versions(recipe.model, recipe_job.job(recipe))}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3_8b_pretrain_h100_bf16", set()),
        ("gpt_oss_20b_pretrain_h100_bf16", {(needs.TE, "2.8"), ("cudnn", "9.13.1"), TRITON}),
        ("deepseek_v3_pretrain_h100_bf16", {(needs.TE, "2.1"), ("cudnn", "9.5.0"), ("deep-ep", "1.0"), TRITON}),
        ("gemma_2b_pretrain_h100_bf16", {("flash-attn", "2.1.1")}),
        ("mistral_small3_24b_sft_h100_bf16", {("nemo_toolkit", "2.7")}),
        ("llama3_8b_pretrain_h100_fp8bw", {(needs.TE, "2.3")}),
        ("llama3_8b_pretrain_b200_mxfp8", {(needs.TE, "2.1"), ("cuda", "12.8")}),
        ("llama3_8b_pretrain_gb300_bf16", {("cuda", "12.9")}),
    ],
)
def test_needs_follow_from_facts(name, expected):
    assert of(name) == expected


def test_every_gpt_oss_recipe_needs_te_with_softmax_offsets():
    names = [name for name in registry.recipes() if name.startswith("gpt_oss")]
    assert len(names) > 50
    for name in names:
        assert (needs.TE, "2.8") in of(name)


def test_every_requirement_has_a_reason():
    for model in registry.models().values():
        assert all(len(need) == 4 and need[3] for need in model.needs)


def test_newer_gpus_need_newer_cuda():
    assert {gpu: hardware.node(gpu).gpu.cuda for gpu in ("h100", "b200", "b300", "gb300")} == {
        "h100": "", "b200": "12.8", "b300": "12.9", "gb300": "12.9"
    }  # fmt: skip


def test_attention_without_fallback_needs_cudnn():
    """Learned softmax offsets and latent attention cannot fall back to FlashAttention."""
    least = {
        "llama3_8b_pretrain_b200_bf16": None,
        "llama3_8b_pretrain_a100_bf16": None,
        "gpt_oss_20b_sft_a100_bf16": "9.13.1",
        "gpt_oss_120b_pretrain_gb300_bf16": "9.13.1",
        "deepseek_v2_lite_sft_b200_bf16": "9.11.0",
    }
    for name, expected in least.items():
        assert dict(of(name)).get("cudnn") == expected, name


def test_unfused_permutation_does_not_need_triton():
    job = recipe_job.job(registry.find("mixtral_8x7b_pretrain_h100_bf16"))
    assert needs.TRITON in needs.required_versions(registry.models()["mixtral_8x7b"], job)
    unfused = job.replace(options=replace(job.options, permute_fusion=False))
    assert needs.TRITON not in needs.required_versions(registry.models()["mixtral_8x7b"], unfused)


@pytest.mark.parametrize(("triton", "refused"), [("3.4.0", False), ("3.5.0", True), ("3.7.1", True)])
def test_refuses_triton_with_which_the_fused_permutation_does_not_compile(triton, refused):
    """The versions were tested with Transformer Engine 2.9.0: `permutation._compare_and_swap.cache_key`."""
    problems = versions.find_violations({"triton": triton}, [versions.Range(*needs.TRITON)])
    assert bool(problems) == refused
    assert all("moe_permute_fusion=False" in problem for problem in problems)
