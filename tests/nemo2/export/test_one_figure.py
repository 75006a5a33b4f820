"""Test that a recipe and its export are planned with the same memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nemo2.export import one_figure

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    command = [sys.executable, "-W", "ignore", "-m", one_figure.__name__, folder, folder / "answers.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "answers.json").read_text())


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.parametrize("name", one_figure.RECIPES)
def test_recipe_and_export_have_equal_memory(answers, name):
    recipe, exported = answers["figures"][name]
    assert recipe == exported


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.parametrize("change", one_figure.CHANGED)
def test_changed_field_changes_the_plan(answers, change):
    counted, of_export, real = answers["changes"][change]
    assert counted == of_export == real
    assert counted != 4_015_263_744  # of the recipe without it
