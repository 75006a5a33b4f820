"""The option `--wandb PROJECT` becomes an override, or is refused if the run would fail at its start."""

import pytest

from superpod.cli.options import wandb_option
from superpod.errors import UserError

KEY = {"WANDB_API_KEY": "neverwrittenneverwritten"}


def test_a_project_becomes_a_single_override():
    assert wandb_option.with_wandb(["a.b=1"], "tests", KEY) == ["a.b=1", "log.wandb=tests"]
    assert wandb_option.with_wandb(["log.wandb=tests"], "tests", KEY) == ["log.wandb=tests"]
    assert wandb_option.with_wandb(None, "", {}) == []


@pytest.mark.parametrize("project", ["a/b", "a b", " a", "x" * 129, "a%b"])
def test_an_invalid_project_name_is_refused(project):
    with pytest.raises(UserError, match="--wandb"):
        wandb_option.with_wandb([], project, KEY)


def test_two_projects_are_refused():
    with pytest.raises(UserError, match="conflicts with"):
        wandb_option.with_wandb(["log.wandb=one"], "two", KEY)


def test_a_missing_key_is_refused_and_a_key_is_never_an_override(tmp_path):
    home = {"HOME": str(tmp_path)}
    with pytest.raises(UserError, match="an API key") as refused:
        wandb_option.with_wandb([], "p", home)
    assert "WANDB_MODE=offline" in str(refused.value.hint)
    assert wandb_option.with_wandb([], "p", home | {"WANDB_MODE": "offline"})
    assert wandb_option.with_wandb([], "p", home, is_remote=True)
    assert KEY["WANDB_API_KEY"] not in "".join(wandb_option.with_wandb([], "p", home | KEY))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_option.with_wandb([], "p", home)
    with pytest.raises(UserError, match="an API key"):
        wandb_option.with_wandb([], "p", home | {"WANDB_BASE_URL": "https://wandb.example.com"})


def test_verbs_refuse_a_missing_key_before_nemo_is_imported(recipes_cli, tmp_path):
    none = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "", "NETRC": ""}
    for verb in (["run", "tiny_llama3"], ["submit", "tiny_llama3", "--cluster", "dgx_h100"]):
        done = recipes_cli(*verb, "--wandb", "p", cwd=tmp_path, env=none)
        assert done.returncode == 2
        assert "an API key" in done.stderr
