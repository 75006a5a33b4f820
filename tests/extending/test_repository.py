"""A model, a GPU and a verb are added to a copy of this repository by the steps of docs/extending.md."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.extending.collection import PAGE

VERB = re.compile(r"^`(?P<path>src/superpod/cli/[^`]+)`:\n\n```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDERS = ("src", "recipes", "slurm", "scripts")


@pytest.fixture
def repository(tmp_path):
    """A copy of the repository to be changed."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture
def python(repository):
    """Run Python in the copy; returns what it prints."""

    def call(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "XDG_CACHE_HOME": str(repository / "cache")}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_a_verb_is_a_file_and_two_lines(repository, python):
    verb = VERB.search(PAGE.read_text())
    assert verb is not None
    (repository / verb["path"]).write_text(verb["text"])
    app = repository / "src" / "superpod" / "cli" / "app.py"
    page = PAGE.read_text()
    imported = re.search(r"^from superpod\.cli\.planning\.parameters .*$", page, re.MULTILINE)
    entry = re.search(r'^        "parameters": parameters,$', page, re.MULTILINE)
    assert imported is not None
    assert entry is not None
    text = app.read_text().replace("\n\napp = typer", f"\n{imported[0]}\n\napp = typer", 1)
    app.write_text(text.replace('    "Plan": {\n', f'    "Plan": {{\n{entry[0]}\n', 1))
    assert python("-m", "superpod.cli", "parameters", "llama3_8b") == "8,030,261,248\n"
    assert "Print the number of parameters" in python("-m", "superpod.cli", "--help")


def test_a_gpu_is_two_tables(repository, python):
    """The tables of a similar GPU and node, with another name and other numbers."""
    file = repository / "src" / "superpod" / "planner" / "data" / "hardware.toml"
    text = file.read_text()
    for kind in ("gpu", "node"):
        (table,) = re.findall(rf"^\[{kind}\.h100\].*\n(?:(?!\[).*\n)*", text, re.MULTILINE)
        table = re.sub(r"^aliases = .*\n", "", table, flags=re.MULTILINE)
        table = table.replace(f"[{kind}.h100]", f"[{kind}.x100]").replace('gpu = "h100"', 'gpu = "x100"')
        file.write_text(file.read_text() + "\n" + table)
    words = ("plan", "llama3_8b", "--gpu=x100", "--nodes=2", "--gbs=512", "--json")
    plan = json.loads(python("-m", "superpod.cli", *words))
    assert plan["query"]["gpu"] == "x100"
    assert plan["layouts"][0]["step_time_s"] > 0


@pytest.mark.slow
def test_a_model_is_a_function_a_shape_and_planned_layouts(repository, python, acme):
    function = (acme / "models" / "acme.py").read_text().partition("\n\n@model(**FACTS)\ndef acme_hf")[0]
    (repository / "recipes" / "models" / "acme.py").write_text(function + "\n")
    shapes = repository / "src" / "superpod" / "planner" / "data" / "models" / "acme.toml"
    shutil.copy(acme / "shapes" / "acme.toml", shapes)
    python("scripts/plan_layouts.py", "acme_mini")
    assert (repository / "recipes" / "layouts" / "acme_mini.toml").is_file()
    names = {recipe["name"] for recipe in json.loads(python("-m", "superpod.cli", "list", "acme_mini", "--json"))}
    assert {"acme_mini_pretrain_h100_bf16", "acme_mini_sft_h100_bf16"} <= names
    assert "ok: legal" in python("-m", "superpod.cli", "check", "acme_mini_pretrain_h100_bf16")
