"""PEFT loads the adapters that we write, and computes what the merged model computes."""

import json

import pytest

from superpod.errors import UserError
from superpod.launch import convert
from superpod.weights.transfer import adapter_export
from tests.reports.runs import checkpoint_files
from tests.run_module import run_module

CASES = ["llama-LoRA", "llama-DoRA", "phi3-LoRA", "mixtral-LoRA"]
MORE = ["mixtral-DoRA", "phi3-DoRA", "starcoder2-DoRA"]
MORE += [f"{kind}-LoRA" for kind in ("qwen2", "qwen3", "starcoder2", "nemotron", "gemma2")]


def computed(folder, cases):
    run_module("tests.weights.adapter_cases", folder, *cases, timeout=900)
    return json.loads((folder / "answer.json").read_text())


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    return computed(tmp_path_factory.mktemp("adapters"), CASES)


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return computed(tmp_path_factory.mktemp("adapters"), MORE)


def is_the_merged_model(case):
    assert case["effect"] > 0.3
    assert case["difference"] < 1e-4
    assert case["from_trained"] < 1e-4
    assert case["base"]
    assert case["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert not any("." in name for name in case["targets"])  # last names, as servers of adapters want them


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_peft_computes_what_the_merged_model_computes(answer, case):
    is_the_merged_model(answer[case])
    layers = {"llama": 2 * 7, "phi3": 2 * 4, "mixtral": 2 * (4 + 4 * 3)}  # four experts of three matrices
    assert answer[case]["count"] == layers[case.partition("-")[0]]


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.parametrize("case", MORE)
def test_so_it_does_in_other_families(more, case):
    is_the_merged_model(more[case])


@pytest.mark.nemo
@pytest.mark.long
def test_an_adapter_behind_a_norm_is_refused(more):
    merged, of_peft = more["behind norms"]
    assert merged.startswith("the adapter of decoder.layers.0.self_attention.linear_proj was applied after the norm")
    assert of_peft == merged


@pytest.mark.nemo
@pytest.mark.slow
def test_what_peft_cannot_say_is_refused_by_name(answer):
    assert (
        "decoder.layers.1.mlp.linear_fc2.weight is model.layers.1.mlp.down_proj.weight in transformers'"
        in answer["fused"]
    )


def test_target_modules_are_last_names_only_where_all_of_that_name_are_adapted():
    linears = ["a.0.q_proj", "a.1.q_proj", "a.0.o_proj", "a.1.o_proj", "head"]
    assert adapter_export.choose_target_modules(["a.0.q_proj", "a.1.q_proj"], linears) == ["q_proj"]
    assert adapter_export.choose_target_modules(["a.1.q_proj"], linears) == ["a.1.q_proj"]


def test_the_adapter_of_a_whole_model_is_refused_without_nemo(tmp_path):
    checkpoint = checkpoint_files.write(tmp_path / "checkpoints" / "step=9")
    with pytest.raises(UserError, match="no adapter"):
        convert.plan_conversion(checkpoint, tmp_path / "out", adapter=True)
