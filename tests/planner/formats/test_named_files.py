"""A file or folder that exists and is no configuration is said to be that, not a model that nobody knows."""

import pytest

from superpod.errors import UserError
from superpod.planner.models import table


@pytest.mark.parametrize("name", ["notes.txt", "Model-Card.md", "weights.safetensors"])
def test_an_existing_file_is_named_as_one(name, tmp_path, monkeypatch):
    (tmp_path / name).write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"{name} is not a \.json file"):
        table.find(name)
    with pytest.raises(UserError, match=r"is not a \.json file"):
        table.find(str(tmp_path / name))


def test_a_folder_is_named_as_one(tmp_path):
    with pytest.raises(UserError, match=r"is a folder without a config\.json"):
        table.find(str(tmp_path))


@pytest.mark.parametrize("name", ["nosuch", "a" * 5000, "a\0b"])
def test_a_name_of_nothing_is_an_unknown_model(name):
    with pytest.raises(UserError, match="there is no model"):
        table.find(name)
