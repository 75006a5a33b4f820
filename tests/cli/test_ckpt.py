"""`recipes ckpt` and what refuses before NeMo is asked, as a user sees it."""

import json

import pytest

from superpod.node.run_folder import RunFolder
from tests.lifecycle import checkpoint_files
from tests.recipes.weights import tiny


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(tmp_path / "runs", "tiny", facts={}, recipe_lines=["a = 1"])
    for step in (10, 20):
        checkpoint_files.write(run.checkpoints / f"step={step - 1}")
    return run


def test_a_run_s_checkpoints_are_listed_verified_and_pruned(run, recipes_cli):
    listed = recipes_cli("ckpt", "list", run.path)
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[:3] for line in listed.stdout.splitlines()[1:]] == [
        ["step=9", "10", "whole"],
        ["step=19", "20", "whole"],
    ]
    assert "tp2 ranks4" in listed.stdout
    facts = json.loads(recipes_cli("ckpt", "list", run.path, "--json").stdout)
    assert [(each["step"], each["whole"], each["parameters"]) for each in facts] == [(10, True, 24), (20, True, 24)]
    assert recipes_cli("ckpt", "verify", run.path).returncode == 0
    (run.checkpoints / "step=19" / "weights" / "__0_0.distcp").unlink()
    damaged = recipes_cli("ckpt", "verify", run.path)
    assert damaged.returncode == 1
    assert "step=19: NOT WHOLE\n  weights/__0_0.distcp is missing\n" in damaged.stdout
    asked = recipes_cli("ckpt", "prune", run.path, "--dry-run")
    assert "would remove step=19" in asked.stdout
    assert "1 of 2 checkpoints" in asked.stdout
    assert len(list(run.checkpoints.iterdir())) == 2
    assert recipes_cli("ckpt", "prune", run.path).returncode == 0
    assert [path.name for path in run.checkpoints.iterdir()] == ["step=9"]


@pytest.mark.parametrize("where", ["path", "checkpoints"])
def test_a_run_that_runs_is_not_pruned(where, run, recipes_cli):
    with run.lock():
        done = recipes_cli("ckpt", "prune", getattr(run, where))
    assert done.returncode == 2
    assert len(list(run.checkpoints.iterdir())) == 2


def test_a_fine_tuning_does_not_go_on_as_a_plain_run(tmp_path, recipes_cli):
    facts = {"finetune": {"model": "m", "data": "d"}}
    run = RunFolder.create(tmp_path / "runs", "tiny_llama3_sft", facts=facts, recipe_lines=[])
    done = recipes_cli("run", "tiny_llama3_sft", "--resume", run.path, cwd=tmp_path)
    assert done.returncode == 2
    assert "is a fine-tuning" in done.stderr
    assert f"recipes finetune tiny_llama3_sft --resume {run.path}" in done.stderr


SAMPLES = '{"prompt": "a", "completion": "b"}\n'


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["finetune", "tiny_llama3_sft"], "finetune needs --model and --data"),
        (["finetune", "tiny_llama3", "--model", "m", "--data", "d.jsonl"], "tiny_llama3 is a recipe of pretraining"),
        (["finetune", "tiny_llama3_sft", "--model", "empty", "--data", "d.jsonl"], "it has no config.json"),
        (["finetune", "tiny_llama3_sft", "--model", "m", "--data", "none.jsonl"], "none.jsonl is not a file"),
        (["finetune", "tiny_llama3_sft", "--model", "m", "--data", "bad.jsonl"], "bad.jsonl:2: completion is empty"),
        (["finetune", "tiny_llama3_sft", "--model", "m", "--data", "d.jsonl", "--long", "no"], "--long no is none of"),
        (["finetune", "tiny_llama3_sft", "--model", "m", "--data", "d.jsonl", "--out", "m"], "m exists already"),
        (["finetune", "tiny_llama3_sft", "--resume", "last"], "no run of tiny_llama3_sft"),
        (["finetune", "tiny_llama3_sft", "--model", "m", "--data", "d.jsonl", "--nodes", "7"], "not for 7"),
        (["ckpt", "convert", "m", "empty"], "empty exists already"),
        (["finetune", "tiny_llama3_lora", "--resume", "run"], "is a run of tiny_llama3_sft, not of tiny_llama3_lora"),
        (["finetune", "tiny_llama3_sft", "--resume", "run"], "is no fine-tuning"),
        (["finetune", "tiny_llama3_sft", "--resume", "run", "--seed", "3"], "--resume goes on with what the run was"),
        (["finetune", "tiny_llama3_sft", "--model", "m", "--data", "d.jsonl"], "holds one sample"),
        (["finetune", "tiny_llama3_sft", "--model", "m", "--data", "d.jsonl", "--validation", "0"], "is no share"),
        (["finetune", "tiny_llama3_sft", "--model", "m", "--data", "d.jsonl", "--out", "d.jsonl/x"], "not a folder"),
        (["generate", "empty", " "], "a prompt is empty"),
        (["ckpt", "convert", "empty", "new"], "empty holds no checkpoint"),
        (["ckpt", "convert", "m", "new", "--cluster", "dgx_h100"], "runs its ranks in a container"),
        (["ckpt", "convert", "m", "new", "--cluster", "testbeds"], "did you mean testbed"),
        (["ckpt", "prune", "empty", "--keep", "0"], "holds no checkpoint"),
        (["perplexity", "empty", "--data", "bad.jsonl"], "bad.jsonl:2"),
        (["generate", "empty", "hello"], "empty holds no checkpoint"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_mistakes_are_refused_with_exit_code_2(words, says, tmp_path, recipes_cli):
    for name, text in (("d.jsonl", SAMPLES), ("bad.jsonl", SAMPLES + '{"prompt": "a", "completion": ""}\n')):
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    tiny.hollow(tmp_path / "m")
    RunFolder.create(tmp_path / "sft", "tiny_llama3_sft", facts={}, recipe_lines=["a = 1"]).path.rename(
        tmp_path / "run"
    )
    done = recipes_cli(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr[-2000:]
    assert says in done.stderr
    assert not (tmp_path / "runs").exists()
