"""What keeps a server from loading a folder is named; a whole folder is called servable."""

import json
import shutil

import pytest

from superpod.recipes.weights import serving
from tests.recipes.weights import tiny

# The package pynvml, of NeMo's, warns when torch is imported.
pytestmark = [pytest.mark.nemo, pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("served") / "llama", "llama")


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def changed(folder, name, **changes):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewritten(folder, change):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def test_a_whole_folder_is_servable(whole):
    verdict = serving.check(whole)
    assert verdict.problems == ()
    assert [name.partition(" ")[0] for name in verdict.servers] == ["vLLM", "TensorRT-LLM"]
    assert "no server was started" in verdict.line


def test_an_architecture_that_no_list_has_is_no_problem_but_said(folder):
    changed(folder, "config.json", architectures=["NoSuchForCausalLM"])
    assert serving.check(folder).line.startswith("no server in our lists has this model")


UP = "model.layers.1.mlp.up_proj.weight"
FAULTS = {
    "missing": lambda t: {name: tensor for name, tensor in t.items() if name != UP},
    "unknown": lambda t: t | {"model.layers.9.mlp.up_proj.weight": t[UP].clone()},
    "shape": lambda t: t | {UP: t[UP][:-1].clone()},
    "format": lambda t: {name: tensor.float() for name, tensor in t.items()},
}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("missing", f"tensors missing: {UP}"),
        ("unknown", "unknown tensors: model.layers.9.mlp.up_proj.weight"),
        ("shape", f"shapes: {UP} [96, 64], not [95, 64]"),
        ("format", "config.json says bfloat16, and the tensors are float32"),
    ],
)
def test_tensors_other_than_transformers_own_are_named(folder, fault, says):
    rewritten(folder, FAULTS[fault])
    assert says in serving.check(folder).line


def test_a_tied_output_matrix_may_be_absent(tmp_path):
    assert serving.check(tiny.folder(tmp_path / "qwen2", "qwen2")).problems == ()


def test_a_tokenizer_that_the_embedding_has_no_rows_for_is_named(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["zzzz"] = 400
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "the tokenizer has id 400, and the embedding 320 rows" in serving.check(folder).line


def test_no_tokenizer_and_no_configuration_are_named(folder):
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer" in serving.check(folder).line
    changed(folder, "config.json", hidden_size=None)
    assert "config.json lacks hidden_size" in serving.check(folder).line


def test_adapters_are_judged_by_what_vllm_takes(tmp_path):
    for more, says in (
        ({"r": 8}, "servable by vLLM (0002bff0): --enable-lora, no server was started"),
        ({"r": 24}, "--enable-lora --max-lora-rank 32"),
        ({"r": 8, "use_dora": True}, "not servable: vLLM has no DoRA"),
        ({"r": 600}, "rank 600 is more than vLLM's 512"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(more))
        assert says in serving.check_adapter(tmp_path).line
