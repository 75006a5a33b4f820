"""A run folder and an exported recipe that version 0.1 wrote, before its modules moved, still work.

`previous_version/run` is a rehearsal of tiny_llama3 in two attempts, without its checkpoints and logs.
"""

import importlib
import json
import shutil
from pathlib import Path

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from tests.conftest import ROOT

PREVIOUS = ROOT / "tests" / "previous_version"


@pytest.fixture
def old_run(tmp_path):
    return Path(shutil.copytree(PREVIOUS / "run", tmp_path / "runs" / "tiny_llama3" / "20261126T172117Z-8741ca"))


def test_its_run_has_its_state_attempts_and_steps(old_run):
    run = RunFolder.open(old_run)
    assert run.done
    assert [attempt.result["state"] for attempt in run.attempts] == ["done", "done"]
    assert {line["step"] for line in run.metrics()} == {*range(1, 81)}


def test_its_run_is_reported(old_run, recipes_cli):
    done = recipes_cli("report", old_run, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["steps"], report["attempts"]) == (80, 2)


def test_its_run_without_checkpoints_does_not_silently_start_again(old_run, recipes_cli):
    done = recipes_cli("run", "tiny_llama3", "--resume", old_run, "trainer.max_steps=90")
    assert done.returncode == 2
    assert "80" in done.stderr + done.stdout


def test_classes_that_its_checkpoints_name_can_be_imported():
    with pytest.warns(DeprecationWarning, match="superpod.node"):
        assert importlib.import_module("superpod.node.callback").RunCallback


@pytest.mark.nemo
@pytest.mark.slow
def test_its_exported_recipe_is_built_and_checked(preloaded_cli):
    done = preloaded_cli("check", PREVIOUS / "exported_tiny_llama3.py")
    assert done.returncode == 0, done.stdout + done.stderr
