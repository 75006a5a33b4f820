"""Test exports to Megatron-Bridge: fields, values, files and refusals."""

import ast
import re
import shlex

import pytest

from superpod.bridge import architectures, facts, launch_script
from superpod.bridge.export import export
from superpod.bridge.translate import translate
from superpod.collection import registry
from superpod.errors import UserError
from superpod.requests.request import Request
from tests.conftest import ROOT

RECIPES = (
    "llama3_70b_pretrain_h100_bf16",
    "llama31_8b_lora_h100_bf16",
    "qwen3_30b_a3b_pretrain_h100_fp8cs",
    "qwen25_7b_sft_h200_bf16",
    "deepseek_v3_pretrain_h100_bf16",
    "gemma2_9b_sft_b300_fp8cs",
    "gpt_oss_20b_pretrain_h100_bf16",
    "nemotron4_15b_pretrain_b200_mxfp8",
    "nemotronh_8b_pretrain_h100_bf16",
    "mistral_7b_dora_h100_bf16",
)
"""Recipes of all families that both stacks have, all tasks, and several GPUs and precisions."""


@pytest.fixture(scope="module")
def built(nemo):
    """Return a function that resolves a recipe, once per recipe."""
    from superpod.requests.resolve import resolve

    runs = {}

    def build(name, *overrides):
        key = (name, overrides)
        if key not in runs:
            runs[key] = resolve(Request(recipe=name, overrides=overrides)).partial
        return runs[key]

    return build


def bridge_config(partial, name):
    recipe = registry.find(name)
    return translate(partial, name, recipe.model.hf, recipe.model.make())


def file_of(partial, name):
    return export(partial, registry.find(name), environment={"A": "1"}, command="recipes export", file="x.py").file


@pytest.mark.nemo
@pytest.mark.parametrize("name", RECIPES)
def test_every_written_field_exists_in_megatron_bridge(built, name):
    config = bridge_config(built(name), name)
    for section, values in {"model": config.model, **config.sections}.items():
        assert [key for key in values if not facts.has_field(section, key)] == [], section


@pytest.mark.nemo
@pytest.mark.parametrize("name", RECIPES)
def test_layout_and_schedule_are_those_of_the_recipe(built, name):
    recipe, config = registry.find(name), bridge_config(built(name), name)
    layout = recipe.layout()
    model, train = config.model, config.sections["train"]
    assert (model["tensor_model_parallel_size"], model["pipeline_model_parallel_size"]) == (layout.tp, layout.pp)
    assert (model["context_parallel_size"], model["expert_model_parallel_size"]) == (layout.cp, layout.ep)
    assert model["sequence_parallel"] == layout.sp
    assert model["virtual_pipeline_model_parallel_size"] == layout.vp
    assert model["recompute_granularity"] == (None if layout.recompute == "none" else layout.recompute)
    assert (train["micro_batch_size"], train["global_batch_size"]) == (layout.mbs, layout.gbs)
    assert config.world_size == recipe.nodes[0] * recipe.gpus_per_node
    assert config.sections["optimizer"]["lr"] == recipe.schedule.lr
    assert config.sections["scheduler"]["lr_warmup_iters"] == recipe.schedule.warmup_steps


@pytest.mark.nemo
@pytest.mark.parametrize("name", RECIPES)
def test_file_is_python_and_imports_only_torch_and_megatron_bridge(built, name):
    tree = ast.parse(file_of(built(name), name))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module for module in imported if not str(module).startswith("megatron.")} == {"os", "sys", "torch"}


@pytest.mark.nemo
def test_complete_file(built, golden):
    golden("bridge/qwen3_30b_a3b_pretrain_h100_fp8cs.txt", file_of(built(RECIPES[2]), RECIPES[2]))


@pytest.mark.nemo
def test_overrides_reach_the_file(built):
    name = RECIPES[0]
    text = file_of(built(name, "trainer.max_steps=10", "model.config.hidden_dropout=0.1", "optim.config.lr=1e-4"), name)
    assert "train_iters=10," in text
    assert "provider.hidden_dropout = 0.1" in text
    assert "lr=0.0001," in text


@pytest.mark.nemo
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_need_nothing_that_is_not_translated(built, name):
    lines = bridge_config(built(name), name).not_translated
    assert [line for line in lines if not line.startswith("mock data")] == []


@pytest.mark.nemo
@pytest.mark.parametrize("name", RECIPES)
def test_fine_tuning_reads_text_with_the_tokenizer_of_the_model(built, name):
    recipe, config = registry.find(name), bridge_config(built(name), name)
    tokenizer = config.sections["tokenizer"]
    if recipe.task == "pretrain":
        assert tokenizer["vocab_size"] == recipe.model.vocab_size
        return
    assert tokenizer["tokenizer_model"] == recipe.model.hf
    assert config.sections["sft_dataset"]["dataset_kwargs"] == {"pad_to_max_length": True}
    assert config.sections["checkpoint"]["pretrained_checkpoint"] == f"pretrained/{recipe.model.hf.partition('/')[2]}"


@pytest.mark.nemo
def test_pretraining_keeps_the_initialization_of_nemo(built):
    config = bridge_config(built(RECIPES[0]), RECIPES[0])
    assert config.model["init_method_std"] == built(RECIPES[0]).model.config.init_method_std != 0.02
    assert "init_method_std" not in bridge_config(built(RECIPES[1]), RECIPES[1]).model


@pytest.mark.nemo
@pytest.mark.parametrize(
    "override",
    ["trainer.strategy.progress_interval=5", "trainer.num_sanity_val_steps=2", "trainer.detect_anomaly=True"],
)
def test_an_override_that_is_not_translated_is_listed(built, override):
    path = override.partition("=")[0]
    assert path in bridge_config(built(RECIPES[0], override), RECIPES[0]).not_translated


@pytest.mark.nemo
def test_cuda_graphs_use_the_implementation_that_megatron_bridge_supports(built):
    name = "llama3_8b_pretrain_b200_bf16"
    model = bridge_config(built(name, "with=cuda_graphs"), name).model
    assert (model["cuda_graph_impl"], model["use_te_rng_tracker"]) == ("transformer_engine", True)


@pytest.mark.nemo
def test_what_has_no_counterpart_is_listed(built):
    name = RECIPES[0]
    partial = built(name, "trainer.strategy.ddp.preserve_fp32_weights=False")
    assert "preserve_fp32_weights" in " ".join(bridge_config(partial, name).not_translated)


@pytest.mark.nemo
def test_adapters_keep_their_class_rank_and_targets(built):
    config = bridge_config(built(RECIPES[1]), RECIPES[1])
    assert config.peft is not None
    name, values = config.peft
    assert name == "LoRA"
    assert values["dim"] == built(RECIPES[1]).peft.dim
    assert values["target_modules"] == built(RECIPES[1]).peft.target_modules


@pytest.mark.nemo
def test_unsupported_model_is_refused_with_its_architecture(built):
    name = "starcoder2_7b_pretrain_h100_bf16"
    with pytest.raises(UserError, match="does not support Starcoder2ForCausalLM"):
        bridge_config(built(name), name)


@pytest.mark.nemo
def test_command_applies_the_layout_to_a_recipe_of_megatron_bridge(built):
    name = RECIPES[0]
    command = launch_script.run_recipe_command(bridge_config(built(name), name), "llama3_70b", "h100", "bf16")
    assert command is not None
    words = shlex.split(command)
    assert words[words.index("--recipe") + 1] in facts.stack()["recipes"]
    layout = registry.find(name).layout()
    assert f"model.tensor_model_parallel_size={layout.tp}" in words
    assert f"train.global_batch_size={layout.gbs}" in words
    assert "model.virtual_pipeline_model_parallel_size=" + str(layout.vp or "null") in words


@pytest.mark.nemo
def test_documentation_lists_every_model_that_cannot_be_exported(nemo):
    text = (ROOT / "docs" / "bridge.md").read_text()
    listed = set(re.findall(r"`([a-z0-9_]+)`", text.partition("## Models without an export")[2].partition("\n## ")[0]))
    missing = {
        model.name
        for model in registry.models().values()
        if architectures.missing_reason(model.make().config.__fn_or_cls__.__name__, model.hf)
    }
    assert listed == missing


def test_architectures_are_found_by_the_first_matching_pattern():
    found = {
        name: architectures.find_architecture(name) for name in ("Qwen3Config30B_A3B", "Qwen3Config8B", "T5Config3B")
    }
    assert found == {
        "Qwen3Config30B_A3B": "Qwen3MoeForCausalLM",
        "Qwen3Config8B": "Qwen3ForCausalLM",
        "T5Config3B": None,
    }


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("log.log_dir=logs", "log.log_dir"),
        ("resume.resume_past_end=True", "resume.resume_past_end"),
    ],
)
def test_settings_of_logs_and_of_resuming_are_listed(built, override, line):
    assert line in bridge_config(built(RECIPES[0], override), RECIPES[0]).not_translated


@pytest.mark.nemo
def test_a_value_that_a_file_cannot_contain_is_listed_and_not_written(built):
    import copy

    partial = copy.deepcopy(built(RECIPES[0]))
    partial.optim.config.lr = object()
    config = bridge_config(partial, RECIPES[0])
    assert "optimizer.lr: an object of class object" in config.not_translated
    assert "lr" not in config.sections["optimizer"]
