import pytest

from superpod.collection import recipe_job, registry
from superpod.collection.facts import absent
from superpod.errors import UserError
from superpod.planner import legality, predict


def test_no_declared_size_violates_a_kernel_rule():
    """Every declared size has an attention kernel."""
    broken = [
        (recipe.name, nodes, rule.message)
        for recipe in registry.recipes().values()
        for nodes in recipe.nodes
        for rule in legality.violations(recipe_job.job(recipe, nodes))
    ]
    assert not broken


@pytest.mark.parametrize(
    ("name", "says", "instead"),
    [
        ("deepseek_v3_sft_a100_bf16", "no attention backend", "deepseek_v3_sft_h100_bf16"),
        ("deepseek_v2_lora_a100_bf16", "no attention backend", "deepseek_v2_lora_h100_bf16"),
        ("gemma_2b_sft_b300_bf16", "the head size: 256", "gemma_2b_sft_a100_bf16"),
        (
            "deepseek_v3_sft_a100_bf16",
            r"on a100, Transformer .* head sizes: 192 and 128\), not cuDNN's .*heads of 192 and 128, samples packed as "
            r"thd on sm80\), not unfused attention \(packed samples, which all fine-tuning uses; pretraining does not",
            "deepseek_v3_sft_h100_bf16",
        ),
        (
            "deepseek_v3_pretrain_h100_fp8ds",
            "shared experts save their original input",
            "deepseek_v3_pretrain_h100_fp8cs",
        ),
        ("nemotronh_4b_pretrain_gb200_mxfp8", "in_proj of nemotronh_4b has 16,496", "nemotronh_4b_pretrain_gb200_bf16"),
    ],
)
def test_refuses_impossible_recipe_with_reason(name, says, instead):
    with pytest.raises(UserError, match=says) as refused:
        registry.find(name)
    assert instead in refused.value.hint


@pytest.mark.parametrize(
    ("name", "says", "instead"),
    [
        (
            "llama3_8b_pretrain_a100_fp8ds",
            r"a100 \(ampere\) does not support fp8ds, only .*bf16",
            "llama3_8b_pretrain_a100_bf16",
        ),
        ("llama3_8b_pretrain_h100_mxfp8", r"h100 \(hopper\) does not support mxfp8", "llama3_8b_pretrain_b200_mxfp8"),
        ("llama3_8b_16k_pretrain_h100_mxfp8", "does not support mxfp8", "llama3_8b_16k_pretrain_h100_"),
        ("llama3_8b_pretrain_b200_nvfp4", "no recipes for nvfp4; those for b200 use bf16, ", "b200_bf16"),
    ],
)
def test_refuses_unsupported_precision_and_lists_supported(name, says, instead):
    with pytest.raises(UserError, match=says) as refused:
        registry.find(name)
    assert instead in refused.value.hint


@pytest.mark.parametrize("name", ["llama3_8b_pretrain_h10_bf16", "llama3_8b", "no_such", "gpt_oss_20b_sft_h100_bf16"])
def test_ignores_other_names(name):
    absent.refuse_absent_recipe(name)


def test_context_parallelism_of_gpt_oss_exchanges_heads():
    recipes = [r for r in registry.recipes().values() if r.model.name.startswith("gpt_oss")]
    split = [recipe_job.job(r, n) for r in recipes for n in r.nodes if r.layout(n).cp > 1]
    assert len(split) >= 20
    assert {job.options.cp_comm for job in split} == {"a2a"}
    ring = {job.replace(options=recipe_job.replace(job.options, cp_comm="p2p")) for job in split[:1]}
    assert all("attention_backend" in [b.rule for b in legality.violations(job)] for job in ring)
    assert recipe_job.job(registry.find("mistral_7b_pretrain_h100_bf16")).options.cp_comm == "a2a"
    assert recipe_job.job(registry.find("llama3_8b_pretrain_h100_bf16")).options.cp_comm == "p2p"


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "deepseek_v2", "deepseek_v3"])
def test_unfused_latent_attention_on_a100_is_planned(model):
    recipe = registry.find(f"{model}_pretrain_a100_bf16")
    for nodes in recipe.nodes:
        job = recipe_job.job(recipe, nodes)
        assert job.options.attention == "unfused"
        assert job.layout.cp == 1
        flash = job.replace(options=recipe_job.replace(job.options, attention="flash"))
        assert predict.one(job).verdict == "ok"
        assert (job.keeps_scores, flash.keeps_scores) == (True, False)
        assert "attention_backend" in [broken.rule for broken in legality.violations(flash)]
    assert recipe_job.job(registry.find(f"{model}_pretrain_h100_bf16")).options.attention == "flash"
