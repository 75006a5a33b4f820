"""Test fusions, expert dispatcher and precision of moments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.collection import recipe_job, registry
from superpod.collection.facts import needs
from superpod.nemo2.build import fusions
from superpod.planner import hardware, models
from superpod.planner.layout import Layout
from superpod.planner.rules.job_rules import FP8


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    script, out = Path(__file__).parent / "fused.py", tmp_path_factory.mktemp("fused") / "out.json"
    command = [sys.executable, "-W", "ignore", script, out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


NEMO = [pytest.mark.slow, pytest.mark.nemo]


class TestBuilt:
    pytestmark = NEMO

    def test_rope_fusion_where_equivalent(self, fused):
        checked = 0
        for name, seen in fused["recipes"].items():
            family = fused["families"][registry.find(name).model.name]
            if family in ("ssm", "encoders", "tiny") or seen["position_embedding_type"] != "rope":
                continue
            same = registry.find(name).task == "pretrain" or not seen["rotary_interleaved"]
            experimental = seen["multi_latent_attention"]  # raises without Megatron's experimental flag
            assert seen["apply_rope_fusion"] == (same and not experimental), name
            checked += 1
        assert checked > 150

    def test_no_rope_fusion_for_gpt_oss(self, fused):
        names = [name for name in fused["recipes"] if name.startswith("gpt_oss")]
        assert names
        assert not any(fused["recipes"][name]["apply_rope_fusion"] for name in names)

    def test_swiglu_fusion(self, fused):
        for name, seen in fused["recipes"].items():
            if seen["activation"] == "silu" and registry.find(name).model.family not in ("ssm", "encoders", "tiny"):
                assert seen["bias_activation_fusion"], name
            if seen["activation"] in ("squared_relu", "openai_gelu"):
                assert not seen["bias_activation_fusion"], name  # Megatron refuses them: transformer_config.py:1203

    def test_te_loss_except_with_adapters(self, fused):
        for name, seen in fused["recipes"].items():
            recipe = registry.find(name)
            wanted = recipe_job.choose_loss_impl(recipe.model.name, recipe.task)
            if seen["cross_entropy_loss_fusion"]:
                assert seen["cross_entropy_fusion_impl"] == wanted, name
            assert seen["planned"]["loss_impl"] == wanted, name
            if recipe.task in registry.ADAPTERS:
                assert not seen["cross_entropy_loss_fusion"], name

    def test_grouped_gemm_for_experts(self, fused):
        with_experts = {name: seen for name, seen in fused["recipes"].items() if seen["num_moe_experts"]}
        assert {registry.find(name).model.name for name in with_experts} >= {"mixtral_8x7b", "mixtral_8x22b"}
        for name, seen in with_experts.items():
            assert (seen["moe_grouped_gemm"], seen["moe_permute_fusion"]) == (True, True), name
            assert (seen["moe_router_dtype"] == "fp32") == (seen["num_moe_experts"] >= 32), name

    def test_router_pads_tokens_of_biased_fp8_experts(self, fused):
        padded = {name for name, seen in fused["recipes"].items() if seen["moe_router_padding_for_fp8"]}
        biased = {
            name
            for name, seen in fused["recipes"].items()
            if seen["num_moe_experts"] and seen["add_bias_linear"] and registry.find(name).precision in FP8
        }
        assert padded == biased
        assert {registry.find(name).precision for name in padded} >= {"fp8cs", "mxfp8"}
        assert all(fused["recipes"][name]["fp8"] for name in padded)  # Megatron refuses the padding without FP8

    def test_megatron_accepts_recomputed_moe_activations(self, fused):
        """Megatron refuses to recompute moe_act without grouped GEMM."""
        assert fused["moe_act"]
        assert {row["refused"] for row in fused["moe_act"]} == {""}

    def test_gemma2_does_not_need_apex(self, fused):
        for name, seen in fused["recipes"].items():
            if name.startswith("gemma2"):
                assert not seen["masked_softmax_fusion"], name

    @pytest.mark.parametrize(("gpu", "there"), [("a100", False), ("h100", True), ("h200", True), ("b200", False)])
    def test_deepep_on_hopper(self, fused, gpu, there):
        name = f"deepseek_v3_pretrain_{gpu}_bf16"
        if name not in fused["recipes"]:
            pytest.skip(f"no recipe {name}")
        seen = fused["recipes"][name]
        assert ("DeepEPCallback" in seen["callbacks"]) == seen["planned"]["deepep"] == there

    def test_alltoall_removes_deepep(self, fused):
        assert "DeepEPCallback" not in fused["alltoall"]["callbacks"]
        assert not fused["alltoall"]["planned"]["deepep"]

    def test_bf16_moments_of_deepseek_v3(self, fused):
        seen = fused["recipes"]["deepseek_v3_pretrain_h100_bf16"]
        assert (seen["exp_avg_dtype"], seen["precision_aware"]) == ("torch.bfloat16", True)
        assert seen["planned"]["moments"] == "bf16"
        for other in ("deepseek_v3_pretrain_h100_fp8cs", "deepseek_v3_sft_h100_bf16", "deepseek_v2_pretrain_h100_bf16"):
            assert fused["recipes"][other]["planned"]["moments"] == "fp32", other

    def test_planned_fusions_equal_built_ones(self, fused):
        wrong = [name for name, seen in fused["recipes"].items() if not seen["as planned before"]]
        assert wrong == []

    def test_fields_set_by_the_model_take_precedence(self, fused):
        assert fused["own"]


@pytest.mark.parametrize(
    ("model", "gpu", "layout", "uses"),
    [
        ("deepseek_v3", "h100", Layout(ep=8), True),
        ("deepseek_v3", "h100", Layout(), False),  # the flex dispatcher wants several ranks
        ("deepseek_v3", "h100", Layout(tp=2, sp=True), True),
        ("deepseek_v3", "b200", Layout(ep=8), False),
        ("deepseek_v3", "a100", Layout(ep=8), False),
        ("mixtral_8x7b", "h100", Layout(ep=8), False),
    ],
)
def test_uses_deepep(model, gpu, layout, uses):
    assert recipe_job.uses_deepep(models.find(model), hardware.node(gpu).gpu, layout) == uses


def test_deepep_requires_its_package():
    recipe = registry.find("deepseek_v3_pretrain_h100_bf16")
    packages = {need[0] for need in needs.required_versions(recipe.model, recipe_job.job(recipe))}
    assert {"deep-ep", needs.TE} <= packages


def test_bf16_moments_are_planned():
    from superpod.planner import predict

    recipe = registry.find("deepseek_v3_pretrain_h100_bf16")
    job = recipe_job.job(recipe)
    assert job.options.moments == "bf16"
    wide = job.replace(options=recipe_job.replace(job.options, moments="fp32"))
    less, more = (predict.one(run).reserved_gib_max for run in (job, wide))
    assert less is not None
    assert more is not None
    assert less < more


def test_every_fusion_has_a_reason():
    assert all(fusion.why and fusion.field for fusion in fusions.FUSIONS)
    assert len({fusion.field for fusion in fusions.FUSIONS}) == len(fusions.FUSIONS)
