"""A resumed run gets the environment of its latest attempt: W&B offline stays offline."""

import os

import pytest

from superpod.requests import restored_environment
from superpod.runtime.runs.run_folder import RunFolder

BEGAN = {
    "WANDB_MODE": "offline",
    "WANDB_API_KEY": "neverwrittenneverwritten",
    "HF_HUB_OFFLINE": "1",
    "NVTE_FUSED_ATTN": "0",
    "PATH": "/other",
    "HOME": "/other",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in BEGAN.keys() - {"PATH", "HOME"}:
        monkeypatch.delenv(name, raising=False)
    run = RunFolder.create(tmp_path, "tiny_llama3", facts={}, recipe_lines=[])
    run.new_attempt().write_env(BEGAN)
    return run


def test_missing_variables_are_restored(run, capsys):
    with restored_environment.restored_variables(run):
        assert (os.environ["WANDB_MODE"], os.environ["HF_HUB_OFFLINE"]) == ("offline", "1")
        assert "NVTE_FUSED_ATTN" not in os.environ
        assert os.environ["HOME"] != "/other"
        assert "WANDB_API_KEY" not in os.environ
    assert "WANDB_MODE" not in os.environ
    assert "WANDB_MODE=offline" in capsys.readouterr().err
    kept = restored_environment.missing_variables(run, restored_environment.LOCAL)
    assert kept == {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "NVTE_FUSED_ATTN": "0"}


def test_shell_takes_precedence_even_if_empty(run):
    shell = {"WANDB_MODE": "", "HF_HUB_OFFLINE": "0"}
    assert restored_environment.missing_variables(run, restored_environment.LOCAL, shell) == {"NVTE_FUSED_ATTN": "0"}


def test_latest_attempt_with_environment_is_used(run):
    run.attempts[-1].finish("failed")
    run.new_attempt().write_env({"WANDB_MODE": "disabled"})
    assert restored_environment.missing_variables(run, restored_environment.LOCAL) == {"WANDB_MODE": "disabled"}
    (run.attempts[-1].path / "env.json").write_text("{")
    assert restored_environment.missing_variables(run, restored_environment.LOCAL)["WANDB_MODE"] == "offline"


def test_resume_restores_variables(run, tmp_path, monkeypatch):
    from superpod.launch import earlier_run

    monkeypatch.setattr(os, "environ", dict(os.environ))
    earlier_run.find(tmp_path, "tiny_llama3", "last")
    assert os.environ["WANDB_MODE"] == "offline"
