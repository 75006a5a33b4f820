"""Tiny models of three families go to NeMo and come back the same, bit for bit; what is no model is refused."""

import json
import os
import subprocess
import sys

import pytest

from superpod.errors import UserError
from superpod.recipes.weights import huggingface
from tests.conftest import ROOT
from tests.recipes.weights import tiny


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversions")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-m", "tests.recipes.weights.conversions", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
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


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "is not a Hugging Face folder: it has no config.json"),
        ({"config.json": "{"}, "cannot be read"),
        ({"config.json": '{"model_type": "bert"}'}, "model_type 'bert' has no importer in NeMo 2.7.3"),
        ({"config.json": '{"model_type": "llama"}'}, "holds no weights"),
    ],
)
def test_what_is_no_model_is_refused(files, says, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        huggingface.family(tmp_path)


NINE_BYTES = (60).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 9]}}'.ljust(60) + bytes(9)


@pytest.mark.parametrize(
    ("file", "data", "says"),
    [
        ("model.safetensors", NINE_BYTES[:-1], "cut off"),
        ("model.safetensors", b"", "cut off"),
        ("tokenizer.json", None, "holds no tokenizer"),
        ("config.json", b"[]", "is not a JSON object"),
    ],
)
def test_what_is_broken_is_refused_before_nemo_is_called(file, data, says, tmp_path):
    (tiny.hollow(tmp_path) / "more.safetensors").write_bytes(NINE_BYTES)
    assert huggingface.family(tmp_path) == "LlamaModel"
    (tmp_path / file).unlink() if data is None else (tmp_path / file).write_bytes(data)
    with pytest.raises(UserError, match=says):
        huggingface.family(tmp_path)


def test_a_folder_that_is_there_is_not_written_over(tmp_path):
    tiny.hollow(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        huggingface.export_hf(tmp_path, tmp_path / "out")
