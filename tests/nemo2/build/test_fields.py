"""Test fields that fine-tuning and options set."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.collection import registry
from superpod.collection.facts import missing_weights
from superpod.collection.facts.adapters import adapter_rank
from superpod.collection.recipe_job import job
from superpod.collection.registry import recipes
from superpod.collection.sizes import tune
from superpod.errors import UserError
from superpod.nemo2 import options
from superpod.weights.transfer import conversion
from tests.nemo2.build.fields import LORA_8, LORA_16, LORA_32, SFT


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    script, out = Path(__file__).parent / "fields.py", tmp_path_factory.mktemp("fields") / "out.json"
    command = [sys.executable, "-W", "ignore", script, out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


nemo = [pytest.mark.slow, pytest.mark.nemo]


class TestFineTuning:
    pytestmark = nemo

    @pytest.mark.parametrize("name", [LORA_8, LORA_16, LORA_32, SFT])
    def test_loads_weights_without_te_state(self, fields, name):
        assert fields["finetuned"][name]["strictness"] == "log_all"

    @pytest.mark.parametrize(("name", "rank"), [(LORA_8, 8), (LORA_16, 16), (LORA_32, 32)])
    def test_alpha_is_twice_the_rank(self, fields, name, rank):
        made = fields["finetuned"][name]
        assert (made["rank"], made["alpha"], made["planned rank"]) == (rank, 2 * rank, rank)
        assert made["as planned before"]

    def test_per_token_loss_with_context_parallelism(self, fields):
        made = fields["finetuned"]["cp"]
        assert made["cp"] > 1
        assert (made["per token"], made["averages"]) == (True, False)

    @pytest.mark.parametrize(("name", "forward"), [(LORA_8, 1 / 2), (SFT, 1 / 3)])
    def test_validation_takes_at_most_5_percent(self, fields, name, forward):
        made = fields["finetuned"][name]
        assert made["steps"] % made["interval"] == 0
        assert made["batches"] * forward / made["interval"] <= 0.05
        assert made["steps"] / made["interval"] >= 2


def test_adapter_rank_affects_memory_and_communication():
    from dataclasses import replace

    from superpod.planner import predict

    small = job(recipes()[LORA_8], 2) if 2 in recipes()[LORA_8].nodes else job(recipes()[LORA_8])
    large = small.replace(options=replace(small.options, lora_rank=64))
    assert predict.one(large).owners_gib["optimizer"] == pytest.approx(8 * predict.one(small).owners_gib["optimizer"])
    seconds, fewer = predict.one(large).step_time_s, predict.one(small).step_time_s
    assert fewer is not None
    assert seconds is not None
    assert seconds > fewer


def test_adapter_ranks_equal_nemos():
    ranks = {name: adapter_rank(model.shape) for name, model in registry.models().items()}
    assert {ranks[name] for name in ("llama3_8b", "llama31_8b", "llama32_1b", "phi3_mini", "gemma3_1b")} == {8}
    assert {ranks[name] for name in ("llama3_70b", "llama31_70b", "llama31_405b", "llama31_nemotron_70b")} == {16}
    assert {ranks[name] for name in ("mixtral_8x7b", "mixtral_8x22b")} == {32}


def environments(fields):
    """Return the environment variables of each option."""
    return {name: seen["environment"] for name, seen in fields["options"].items() if "environment" in seen}


class TestCudaGraphsAndUserbuffers:
    pytestmark = nemo

    def test_environment_depends_on_options(self, fields):
        of = environments(fields)
        assert of[""]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
        assert "PYTORCH_CUDA_ALLOC_CONF" not in fields["graphed"]["environment"]
        assert of["deterministic"]["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        assert of["fsdp"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"

    def test_refuses_cuda_graphs_with_full_recompute(self, fields):
        assert "recompute_granularity=full" in fields["options"]["cuda_graphs"]["refused"]

    def test_detects_cuda_graphs_set_by_overrides(self, fields):
        assert fields["graphs by override"] == [True, True, True, False]

    def test_a100_userbuffers_do_not_use_multicast(self, fields):
        of = environments(fields)
        assert of[""]["UB_SKIPMC"] == "1"
        assert "UB_SKIPMC" not in of["deterministic"]  # which has no userbuffers


class TestPackedSamples:
    pytestmark = nemo

    def test_packed_samples_have_the_length_of_userbuffers(self, fields):
        made = fields["packed"]
        assert made["userbuffers"] == 4096
        assert made["lengths"] == [4096]
        assert made["broken"] == []

    def test_unpacked_samples_have_no_userbuffers(self, fields):
        made = fields["unpacked"]
        assert made["userbuffers"] == 0
        assert made["lengths"] == [32, 32]
        assert made["broken"] == []

    def test_batches_have_constant_shapes_with_cuda_graphs(self, fields):
        """The batch has two samples, padded to the maximum number of samples per sequence."""
        assert fields["graphs"]["lengths"] == [4096]
        assert fields["graphs"]["boundaries"][0] >= fields["packed"]["boundaries"][0]

    def test_refuses_unpadded_samples_with_userbuffers(self, fields):
        assert fields["packed"]["broken unpadded"] == ["userbuffer_length"]


class TestUserbufferTables:
    pytestmark = nemo

    def test_userbuffer_configurations_of_the_generation(self, fields):
        """NeMo 2.7.3 has them only for H100 and B200."""
        tables = fields["tables"]
        assert tables["h100"]
        assert tables["b200"]
        assert tables["h200"] == tables["h100"]
        assert tables["b300"] == tables["gb200"] == tables["gb300"] == tables["b200"]
        assert tables["b200"] != tables["h100"]
        assert tables["a100"] is None


class TestFp16:
    pytestmark = nemo

    def test_fp16_option(self, fields):
        made = fields["options"]["fp16"]
        assert made["precision"] == "fp16"
        assert made["plugin"] == ["16-mixed", "torch.float16", 1.0]
        assert made["optimizer"] == [True, False]

    def test_fp16_disables_userbuffers(self, fields):
        assert fields["options"][""]["userbuffers"] == [True]
        assert fields["options"]["fp16"]["userbuffers"] == [False]

    def test_fp16_replaces_bf16_only(self, fields):
        assert "FP8 (tensorwise)" in fields["fp8"]["refused"]


def test_fp16_name_suggests_the_option():
    assert not [name for name in recipes() if name.endswith("fp16")]
    with pytest.raises(UserError, match="loss scaling does not work") as refused:
        registry.find("llama3_8b_pretrain_a100_fp16")
    assert "llama3_8b_pretrain_a100_bf16 with=fp16" in refused.value.hint
    with pytest.raises(UserError, match="there is no recipe"):
        registry.find("llama3_9b_pretrain_a100_fp16")


def test_every_pipeline_stage_has_a_micro_batch():
    sizes = [(recipe, nodes) for recipe in recipes().values() for nodes in recipe.nodes]
    pipelines = [(r.name, n, r.layout(n), n * r.gpus_per_node) for r, n in sizes if r.layout(n).pp > 1]
    assert len(pipelines) > 1000
    assert not [(name, n) for name, n, layout, gpus in pipelines if layout.micro_batches(gpus) < layout.pp]


def test_tuned_recipe_resolves_parameter_format():
    """The smallest size needs FP8 parameters, a larger one can hold BF16 parameters."""
    small = recipes()["llama3_70b_pretrain_b200_mxfp8"]
    assert job(small).options.fp8_params
    tuned = tune.tune(small, 3).job
    assert (tuned.options.fp8_params, tuned.options.overlap_params) in ((False, True), (True, False))


def test_explains_missing_weights():
    problem, instead = missing_weights.explain(recipes()["deepseek_v3_lora_h100_bf16"])
    assert "FP8" in problem
    assert "fp8_cast_bf16" in instead
    assert "random weights" in missing_weights.explain(recipes()["t5_3b_sft_h100_bf16"])[0]
    for name in ("deepseek_v3_pretrain_h100_bf16", "deepseek_v2_lora_h100_bf16", "llama3_8b_sft_h100_bf16"):
        assert missing_weights.explain(recipes()[name]) == ("", "")


def test_refuses_fp8_folder_before_import(tmp_path):
    config = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="FP8, with a quantization_config") as refused:
        conversion.check_folder(tmp_path)
    assert "fp8_cast_bf16" in refused.value.hint
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    with pytest.raises(UserError, match="contains no weights"):
        conversion.check_folder(tmp_path)


def test_option_has_a_warning():
    assert "never scales the loss" in options.warnings(["trainer.max_steps=3", "with=fsdp,fp16"])[0]
    assert options.warnings(["with=fsdp"]) == []
