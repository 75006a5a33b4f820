"""Tiny models of three families go to NeMo and come back the same, bit for bit; what is no model is refused."""

import contextlib
import json

import pytest

from superpod.common import atomic_folder
from superpod.errors import UserError
from superpod.weights.transfer import conversion
from tests.run_module import run_module
from tests.weights import tiny


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversions")
    run_module("tests.weights.conversions", folder, timeout=500)
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_weights_come_back_as_they_were(answer, kind):
    assert answer[kind].pop("matrices") >= 15
    assert answer[kind] == {
        "names": [],
        "different": [],
        "types": ["torch.bfloat16"],
        "missing": [],
        "config": True,
        "words": True,
        "left": [],
    }


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.parametrize("which", ["llama LoRA", "llama DoRA", "qwen2 LoRA"])
def test_merged_adapters_compute_what_applied_ones_compute(answer, which):
    merging = answer["merging"][which]
    assert (merging["count"], merging["names"]) == (2 * 4, [])
    assert merging["effect"] > 0.05
    assert merging["difference"] < 1e-4


@pytest.mark.nemo
@pytest.mark.slow
def test_custom_code_is_reported_not_executed_and_not_exported(answer):
    custom = answer["custom"]
    [note] = [line for line in custom["imported"] if "custom code" in line]
    assert "modeling_own.py, tokenization_own.py" in note
    assert custom["kept"] == custom["imported"]
    [dropped] = [line for line in custom["exported"] if "removed" in line]
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert f"auto_map, trust_remote_code from {name}" in dropped
    assert (custom["left"], custom["named"], custom["executed"]) == ([], False, False)
    assert custom["problems"] == []
    assert any("custom code is missing" in problem for problem in custom["dangling"])


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "is not a Hugging Face folder: it has no config.json"),
        ({"config.json": "{"}, "is not JSON"),
        ({"config.json": '{"model_type": "bert"}'}, "cannot import model_type 'bert'"),
        ({"config.json": '{"model_type": "llama"}'}, "contains no weights"),
    ],
)
def test_what_is_no_model_is_refused(files, says, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        conversion.check_folder(tmp_path)


NINE_BYTES = (
    (80).to_bytes(8, "little") + b'{"a": {"dtype": "BF16", "shape": [9], "data_offsets": [0, 9]}}'.ljust(80) + bytes(9)
)


@pytest.mark.parametrize(
    ("file", "data", "says"),
    [
        ("model.safetensors", NINE_BYTES[:-1], "truncated"),
        ("model.safetensors", b"", "truncated"),
        ("tokenizer.json", None, "contains no tokenizer"),
        ("config.json", b"[]", "does not contain a JSON object"),
    ],
)
def test_what_is_broken_is_refused_before_nemo_is_called(file, data, says, tmp_path):
    (tiny.hollow(tmp_path) / "model.safetensors").write_bytes(NINE_BYTES)
    assert conversion.check_folder(tmp_path).model == "LlamaModel"
    (tmp_path / file).unlink() if data is None else (tmp_path / file).write_bytes(data)
    with pytest.raises(UserError, match=says):
        conversion.check_folder(tmp_path)


def test_whole_weights_beside_an_adapter_are_refused(tmp_path):
    """transformers would load the base that adapter_config.json names."""
    (tiny.hollow(tmp_path) / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(UserError, match=r"a model and adapter_config\.json"):
        conversion.check_folder(tmp_path)


def test_the_slower_of_two_conversions_to_one_folder_says_so(tmp_path):
    out = tmp_path / "out"
    with contextlib.ExitStack() as slower:
        slower.enter_context(atomic_folder.create_atomically(out)).mkdir()
        out.mkdir()
        (out / "weights").touch()  # of the faster one
        with pytest.raises(UserError, match="cannot be created"):
            slower.close()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "weights"]


@pytest.mark.parametrize("length", [246, 300])
def test_a_name_too_long_for_the_system_is_refused(length, tmp_path):
    with pytest.raises(UserError, match="File name too long"):
        conversion.require_new_output(tmp_path / ("n" * length))


def test_a_folder_that_is_there_is_not_written_over(tmp_path):
    tiny.hollow(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="already exists"):
        conversion.export_hf(tmp_path, tmp_path / "out")
