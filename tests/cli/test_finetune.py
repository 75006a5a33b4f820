"""`recipes finetune`: what it refuses before NeMo is imported."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from superpod.cli import app
from superpod.errors import UserError
from superpod.node.files import write_json
from superpod.node.run_folder import RunFolder

GIVEN = ["tiny_llama3_sft", "--model", "m", "--data", "d.jsonl"]


def test_a_fine_tuning_run_does_not_continue_as_a_plain_run(tmp_path, recipes_cli):
    facts = {"finetune": {"model": "m", "data": "d"}}
    run = RunFolder.create(tmp_path / "runs", "tiny_llama3_sft", facts=facts, recipe_lines=[])
    done = recipes_cli("run", "tiny_llama3_sft", "--resume", run.path, cwd=tmp_path)
    assert done.returncode == 2
    assert "is a fine-tuning run" in done.stderr
    assert f"recipes finetune tiny_llama3_sft --resume {run.path}" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tiny_llama3_sft"], "finetune needs --model and --data"),
        (["tiny_llama3", "--model", "m", "--data", "d.jsonl"], "tiny_llama3 is a recipe of pretraining"),
        (["tiny_llama3_sft", "--model", "empty", "--data", "d.jsonl"], "it has no config.json"),
        (["tiny_llama3_sft", "--model", "m", "--data", "none.jsonl"], "none.jsonl is not a file"),
        (["tiny_llama3_sft", "--model", "m", "--data", "bad.jsonl"], "bad.jsonl:2: completion is empty"),
        ([*GIVEN, "--long", "no"], "--long no is not one of"),
        ([*GIVEN, "--out", "m"], "m exists already"),
        ([*GIVEN, "--steps", "1000000000"], "1,000,000,000 steps are more than a fine-tuning takes, 1,000,000"),
        ([*GIVEN, "trainer.max_steps=1000000000"], "1,000,000,000 steps are more than a fine-tuning takes"),
        (["tiny_llama3_sft", "--resume", "last"], "no run of tiny_llama3_sft"),
        ([*GIVEN, "--nodes", "7"], "no legal layout of tiny_llama3_sft fits 7 nodes"),
        (["tiny_llama3_lora", "--resume", "run"], "is a run of tiny_llama3_sft, not of tiny_llama3_lora"),
        (["tiny_llama3_sft", "--resume", "run"], "is not a fine-tuning run"),
        (["tiny_llama3_sft", "--resume", "run", "--seed", "3"], "--resume keeps the run's model and data"),
        (GIVEN, "holds one sample"),
        ([*GIVEN, "--validation", "0"], "is not a share"),
        ([*GIVEN, "--out", "d.jsonl/x"], "not a folder"),
        ([*GIVEN, "--data", "none.jsonl"], "none.jsonl is not a file"),
        (["tiny_llama3_sft", "--model", "m", "--data", "/dev/zero"], "is a pipe or a device"),
        (["tiny_llama3_sft", "--model", "m", "--data", "d.jsonl:0"], "a weight is above 0"),
        (["tiny_llama3_sft", "--model", "m", "--data", "bad.jsonl", "--skip-bad-lines"], "1 of 2 lines are bad, 50.0%"),
        ([*GIVEN, "--validation-data", "bad.jsonl:0.5"], "--validation-data has no weights"),
        ([*GIVEN, "--chat-template", "d.jsonl"], "does not use messages"),
        ([*GIVEN, "--key", "a=b"], "is not NAME=KEY"),
        ([*GIVEN, "--learn", "none"], "--learn none is not one of"),
        (
            ["tiny_llama3_sft", "--model", "strange", "--data", "d.jsonl", "--no-forward-check"],
            "clip_qkv",
        ),
        (["tiny_llama3_sft", "--resume", "run", "--no-forward-check"], "--resume keeps the run's model and data"),
        (["gemma3_1b_lora_h100_bf16", "--model", "m", "--data", "d.jsonl"], "cannot train: Megatron-Core 0.15"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_refused_with_exit_code_2(words, says, refusal):
    assert says in refusal("finetune", *words)


@pytest.fixture
def owing(tmp_path, monkeypatch):
    """A run that is trained, and whose export into `out` was killed after it had put the folder in place."""
    from superpod.cli import finetune_session
    from superpod.launchers import finetune as tuning
    from superpod.node import owed_export
    from superpod.node import resume as resume_rule

    monkeypatch.chdir(tmp_path)
    task = asdict(tuning.Task("m", ("d.jsonl",)))
    facts = {tuning.FACT: task, owed_export.EXPORTS_TO: str(tmp_path / "out")}
    run = RunFolder.create(tmp_path / "runs", "tiny_llama3_sft", facts=facts, recipe_lines=[])
    write_json(run.path / "done", {"step": 20})
    with owed_export.begun(run.path, tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text("{}")
    gone_on = []
    monkeypatch.setattr(resume_rule, "decide_by_sizes", lambda run: None)
    monkeypatch.setattr(tuning, "check", lambda *_: None)
    monkeypatch.setattr(finetune_session, "go", lambda *words, **more: gone_on.append(words))
    return run, gone_on


def resumed(out):
    """As the command line does it."""
    app.app(["finetune", "tiny_llama3_sft", "--resume", "last", "--out", str(out)], standalone_mode=False)


def test_an_owed_export_that_was_killed_is_finished_into_the_folder_that_it_put_in_place(owing):
    run, gone_on = owing
    resumed("out")
    assert [(words[2].path.name, words[3]) for words in gone_on] == [(run.path.name, Path("out"))]


def test_an_owed_export_may_go_elsewhere(owing):
    resumed("elsewhere")
    assert len(owing[1]) == 1


def test_an_owed_export_does_not_replace_a_folder_of_another_s(owing, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match=r"--out .*mine exists already") as refused:
        resumed("mine")
    assert refused.value.hint == "name another folder, or remove it"
    assert owing[1] == []


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Fine-tune in a new run, with the training and the export given as functions of the run."""
    from superpod.cli import finetune_session
    from superpod.launchers import finetune as tuning
    from superpod.lifecycle.request import Request

    def go(trained, export):
        monkeypatch.setattr(finetune_session, "_trained", lambda console, task, request, run, *more: trained(run))
        monkeypatch.setattr(finetune_session, "_export", lambda console, run, *more: export(run))
        task, request = tuning.Task("m", ("d.jsonl",)), Request("tiny_llama3_sft")
        finetune_session.go(task, request, None, None, tmp_path / "runs")

    return go


def interrupted(run):
    raise KeyboardInterrupt


def test_a_new_run_that_is_interrupted_before_it_has_an_attempt_is_removed(tune, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        tune(interrupted, interrupted)
    assert RunFolder.latest(tmp_path / "runs", "tiny_llama3_sft") is None


def test_a_trained_run_whose_result_cannot_be_read_is_kept_when_its_export_is_interrupted(tune, tmp_path):
    def trained(run):
        (run.new_attempt().path / "result.json").write_text("{")
        return SimpleNamespace(state="done")

    with pytest.raises(KeyboardInterrupt):
        tune(trained, interrupted)
    assert RunFolder.latest(tmp_path / "runs", "tiny_llama3_sft") is not None
