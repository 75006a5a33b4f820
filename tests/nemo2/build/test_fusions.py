"""Fusions, dispatcher and moments, set in one place for all families."""

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

    def test_rotary_models_have_the_fused_kernel_wherever_it_computes_the_same(self, fused):
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

    def test_yarn_of_gpt_oss_stays_unfused(self, fused):
        names = [name for name in fused["recipes"] if name.startswith("gpt_oss")]
        assert names
        assert not any(fused["recipes"][name]["apply_rope_fusion"] for name in names)

    def test_swiglu_is_fused_and_other_activations_are_left(self, fused):
        for name, seen in fused["recipes"].items():
            if seen["activation"] == "silu" and registry.find(name).model.family not in ("ssm", "encoders", "tiny"):
                assert seen["bias_activation_fusion"], name
            if seen["activation"] in ("squared_relu", "openai_gelu"):
                assert not seen["bias_activation_fusion"], name  # Megatron refuses them: transformer_config.py:1203

    def test_the_loss_is_transformer_engines_but_beside_adapters(self, fused):
        for name, seen in fused["recipes"].items():
            recipe = registry.find(name)
            wanted = recipe_job.loss_impl(recipe.model.name, recipe.task)
            if seen["cross_entropy_loss_fusion"]:
                assert seen["cross_entropy_fusion_impl"] == wanted, name
            assert seen["planned"]["loss_impl"] == wanted, name
            if recipe.task in registry.ADAPTERS:
                assert not seen["cross_entropy_loss_fusion"], name

    def test_experts_run_together(self, fused):
        with_experts = {name: seen for name, seen in fused["recipes"].items() if seen["num_moe_experts"]}
        assert {registry.find(name).model.name for name in with_experts} >= {"mixtral_8x7b", "mixtral_8x22b"}
        for name, seen in with_experts.items():
            assert (seen["moe_grouped_gemm"], seen["moe_permute_fusion"]) == (True, True), name
            assert (seen["moe_router_dtype"] == "fp32") == (seen["num_moe_experts"] >= 32), name

    def test_megatron_takes_mixtrals_recomputed_activations(self, fused):
        """It refuses moe_act without grouped GEMM, which layouts of Mixtral recomputed all the same."""
        assert fused["moe_act"]
        assert {row["refused"] for row in fused["moe_act"]} == {""}

    def test_gemma2_imports_no_kernel_of_apex(self, fused):
        for name, seen in fused["recipes"].items():
            if name.startswith("gemma2"):
                assert not seen["masked_softmax_fusion"], name

    @pytest.mark.parametrize(("gpu", "there"), [("a100", False), ("h100", True), ("h200", True), ("b200", False)])
    def test_deepep_is_there_on_hopper(self, fused, gpu, there):
        name = f"deepseek_v3_pretrain_{gpu}_bf16"
        if name not in fused["recipes"]:
            pytest.skip(f"no recipe {name}")
        seen = fused["recipes"][name]
        assert ("DeepEPCallback" in seen["callbacks"]) == seen["planned"]["deepep"] == there

    def test_alltoall_takes_deepep_away(self, fused):
        assert "DeepEPCallback" not in fused["alltoall"]["callbacks"]
        assert not fused["alltoall"]["planned"]["deepep"]

    def test_moments_of_deepseek_v3_are_bf16_beside_bf16_weights(self, fused):
        seen = fused["recipes"]["deepseek_v3_pretrain_h100_bf16"]
        assert (seen["exp_avg_dtype"], seen["precision_aware"]) == ("torch.bfloat16", True)
        assert seen["planned"]["moments"] == "bf16"
        for other in ("deepseek_v3_pretrain_h100_fp8cs", "deepseek_v3_sft_h100_bf16", "deepseek_v2_pretrain_h100_bf16"):
            assert fused["recipes"][other]["planned"]["moments"] == "fp32", other

    def test_the_planner_knows_without_nemo_what_is_built(self, fused):
        wrong = [name for name, seen in fused["recipes"].items() if not seen["as planned before"]]
        assert wrong == []

    def test_what_a_models_own_file_sets_stays(self, fused):
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
def test_where_deepep_sends_tokens(model, gpu, layout, uses):
    assert recipe_job.uses_deepep(models.find(model), hardware.node(gpu).gpu, layout) == uses


def test_what_runs_with_deepep_needs_it_installed():
    recipe = registry.find("deepseek_v3_pretrain_h100_bf16")
    packages = {need[0] for need in needs.of(recipe.model, recipe_job.job(recipe))}
    assert {"deep-ep", needs.TE} <= packages


def test_bf16_moments_are_priced():
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
