"""What keeps a server from loading a folder is named; a whole folder is called servable."""

import json

import pytest

from superpod.weights.serving import servable
from tests.weights.tiny import changed, rewritten

torch = pytest.importorskip("torch", reason="torch: [nemo] extra")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, while its models are imported
UP = "model.layers.1.mlp.up_proj.weight"


def test_a_whole_folder_is_servable(whole):
    verdict = servable.check_model(whole)
    assert verdict.problems == ()
    assert [name.partition(" ")[0] for name in verdict.servers] == ["vLLM", "TensorRT-LLM"]
    assert verdict.line.startswith("servable by vLLM")
    assert "no chat template" in verdict.line
    assert "no generation_config.json" not in verdict.line


FAULTS = {
    "missing tensors": lambda t: {name: tensor for name, tensor in t.items() if name != UP},
    "unknown tensors": lambda t: t | {f"model.layers.{n}.x": torch.zeros(2, 2) for n in (6, 7, 8, 9)},
    "wrong shapes": lambda t: t | {UP: t[UP][:-1].clone()},
    "format": lambda t: {name: tensor.float() if tensor.dim() > 1 else tensor for name, tensor in t.items()},
}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("missing tensors", f"missing tensors: {UP}"),
        ("unknown tensors", "unknown tensors: model.layers.6.x, model.layers.7.x, model.layers.8.x and 1 more"),
        ("wrong shapes", f"wrong shapes: {UP} is [95, 64] instead of [96, 64]"),
        ("format", "config.json specifies bfloat16, but the tensors are float32"),
    ],
)
def test_what_keeps_a_server_from_loading_is_named(folder, fault, says):
    rewritten(folder, FAULTS[fault])
    [problem] = servable.check_model(folder).problems
    assert problem.endswith(says) if fault != "format" else problem == says


def test_a_router_in_fp32_and_a_tied_output_matrix_are_no_fault(folder):
    norm = "model.norm.weight"
    rewritten(
        folder, lambda t: {name: t[name].float() if name == norm else t[name] for name in t if "lm_head" not in name}
    )
    changed(folder, tie_word_embeddings=True)
    assert servable.check_model(folder).problems == ()
    changed(folder, tie_word_embeddings=False)
    assert servable.check_model(folder).problems == ("missing tensors: lm_head.weight",)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"max_position_embeddings": None}, ""),
        ({"model_type": "nobodys"}, "transformers cannot build the model: ValueError"),
        ({"vocab_size": 299}, "the tokenizer has id 299, but the embedding has only 299 rows"),
        ({"vocab_size": 300}, "300, 64"),
        ({"eos_token_id": 7}, "eos_token_id is [7] in config.json, but 0 in the tokenizer"),
        ({"eos_token_id": [7, 0]}, ""),
        ({"eos_token_id": None}, ""),
        ({"auto_map": {"AutoConfig": "gone.Config"}}, "custom code is missing"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(folder, keys, says):
    changed(folder, **{"eos_token_id": 0, **keys})
    problems = servable.check_model(folder).problems
    assert says in "; ".join(problems)
    assert bool(problems) == bool(says)


def test_no_tokenizer_is_named_and_so_is_a_broken_one(folder):
    changed(folder, eos_token_id=0)
    (folder / "tokenizer.json").write_text("{")
    assert servable.check_model(folder).problems[0].startswith("the tokenizer cannot be loaded")
    (folder / "tokenizer.json").unlink()
    assert servable.check_model(folder).problems[0].startswith("no tokenizer: none of tokenizer.json")


def test_an_architecture_that_no_list_has_is_said(folder):
    changed(folder, architectures=["NoSuchForCausalLM"], eos_token_id=0)
    (folder / "generation_config.json").unlink()
    line = servable.check_model(folder).line
    assert line.startswith("no listed server supports this model")
    assert "vLLM does not list NoSuchForCausalLM" in line
    assert "no generation_config.json" in line
    (folder / "config.json").write_text("{")
    assert servable.check_model(folder).problems[0].startswith("config.json cannot be read")


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_a_chat_template_may_be_in_three_places(tmp_path, name):
    assert not servable.has_template(tmp_path)
    (tmp_path / name).write_text("[]")
    assert servable.has_template(tmp_path) is (name != "tokenizer_config.json")
    (tmp_path / name).write_text('{"chat_template": "x"}')
    assert servable.has_template(tmp_path)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"r": 8}, "--enable-lora, no server"),
        ({"r": 16}, "--enable-lora, no server"),
        ({"r": 17}, "--enable-lora --max-lora-rank 32"),
        ({"r": 512}, "--max-lora-rank 512"),
        ({"r": 513}, "rank 513 exceeds vLLM's maximum of 512"),
        ({"r": 8, "use_dora": True}, "not servable: vLLM does not support DoRA"),
    ],
)
def test_adapters_are_judged_by_what_vllm_takes(tmp_path, keys, says, capsys):
    (tmp_path / "adapter_config.json").write_text(json.dumps(keys))
    servable.main(str(tmp_path))
    assert says in capsys.readouterr().out


def test_the_command_looks_at_a_model_where_there_is_no_adapter(tmp_path, capsys):
    servable.main(str(tmp_path))
    assert capsys.readouterr().out.startswith("not servable: config.json cannot be read")
