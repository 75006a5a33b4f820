"""Custom code of Hugging Face folders is reported, and neither executed nor exported."""

import json

import pytest

from superpod.cli.planning import folder_notes
from superpod.common import custom_code
from tests.weights import tiny


@pytest.fixture
def folder(tmp_path):
    folder = tiny.hollow(tmp_path / "model")
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    tiny.customize(folder, tmp_path / "executed")
    return folder


def test_all_files_with_custom_code_are_found(folder):
    assert custom_code.python_files(folder) == {
        "config.json": ["ORG/NAME/modeling_own.py", "modeling_own.py"],
        "tokenizer_config.json": ["tokenization_own.py"],
        "generation_config.json": ["modeling_own.py"],
    }
    [note] = custom_code.note(folder)
    assert "modeling_own.py, tokenization_own.py" in note
    assert "is not executed" in note


@pytest.mark.parametrize(
    "content",
    [
        {"auto_map": {"AutoModel": None, "AutoConfig": ["", 3, "no_dot"]}},
        {"auto_map": "text"},
        {"auto_map": ["tokenization_own.Slow", None]},
        {"custom_pipelines": {"own": {"impl": "own_pipeline.Own"}, "odd": 3}},
        {"trust_remote_code": True},
    ],
)
def test_invalid_values_are_found_and_dropped(content, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "name": "\u00e9", **content}))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    (tmp_path / "generation_config.json").write_text("not JSON")
    assert custom_code.note(tmp_path)
    assert custom_code.remove_keys(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "llama", "name": "\u00e9"}
    assert custom_code.note(tmp_path) == custom_code.remove_keys(tmp_path) == custom_code.missing_files(tmp_path) == []


def test_a_folder_without_custom_code_is_unchanged(tmp_path):
    folder = tiny.hollow(tmp_path / "model")
    before = (folder / "config.json").stat()
    assert custom_code.note(folder) == custom_code.remove_keys(folder) == []
    assert (folder / "config.json").stat() == before


def test_missing_code_is_found(folder):
    assert custom_code.missing_files(folder) == ["ORG/NAME/modeling_own.py"]
    (folder / "modeling_own.py").unlink()
    assert custom_code.missing_files(folder) == ["ORG/NAME/modeling_own.py", "modeling_own.py"]


def test_plan_and_check_print_a_note(folder):
    assert any("is not executed" in line for line in folder_notes.training_notes(str(folder)))
