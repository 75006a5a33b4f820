"""`recipes finetune` without NeMo: refused command lines, pending exports and interrupted runs."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from superpod.cli import app
from superpod.common.json_files import write_json
from superpod.errors import UserError
from superpod.runtime.runs import run_facts
from superpod.runtime.runs.run_folder import RunFolder

GIVEN = ["tiny_llama3_sft", "--model", "m", "--data", "d.jsonl"]


def test_run_refuses_to_resume_a_fine_tuning_run(tmp_path, recipes_cli):
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
        (["tiny_llama3", "--model", "m", "--data", "d.jsonl"], "tiny_llama3 is a pretraining recipe"),
        (["tiny_llama3_sft", "--model", "empty", "--data", "d.jsonl"], "it has no config.json"),
        (["tiny_llama3_sft", "--model", "m", "--data", "none.jsonl"], "none.jsonl is not a file"),
        (["tiny_llama3_sft", "--model", "m", "--data", "bad.jsonl"], "bad.jsonl:2: completion is empty"),
        ([*GIVEN, "--long", "no"], "--long no is not one of"),
        ([*GIVEN, "--out", "m"], "m already exists"),
        ([*GIVEN, "--steps", "1000000000"], "1,000,000,000 steps exceed the maximum for fine-tuning, 1,000,000"),
        ([*GIVEN, "trainer.max_steps=1000000000"], "1,000,000,000 steps exceed"),
        (["tiny_llama3_sft", "--resume", "last"], "no run of tiny_llama3_sft"),
        ([*GIVEN, "--nodes", "7"], "no legal layout of tiny_llama3_sft fits 7 nodes"),
        (["tiny_llama3_lora", "--resume", "run"], "is a run of tiny_llama3_sft, not of tiny_llama3_lora"),
        (["tiny_llama3_sft", "--resume", "run"], "is not a fine-tuning run"),
        (["tiny_llama3_sft", "--resume", "run", "--seed", "3"], "--resume keeps the model and the data of the run"),
        (GIVEN, "contains only one sample"),
        ([*GIVEN, "--validation", "0"], "between 0 and 1"),
        ([*GIVEN, "--out", "d.jsonl/x"], "not a folder"),
        ([*GIVEN, "--data", "none.jsonl"], "none.jsonl is not a file"),
        (["tiny_llama3_sft", "--model", "m", "--data", "/dev/zero"], "a pipe or a device"),
        (["tiny_llama3_sft", "--model", "m", "--data", "d.jsonl:0"], "must be positive"),
        (
            ["tiny_llama3_sft", "--model", "m", "--data", "bad.jsonl", "--skip-bad-lines"],
            "1 of 2 lines are bad (50.0%)",
        ),
        ([*GIVEN, "--validation-data", "bad.jsonl:0.5"], "--validation-data accepts no weights"),
        ([*GIVEN, "--chat-template", "d.jsonl"], "does not use `messages`"),
        ([*GIVEN, "--key", "a=b"], "is not NAME=KEY"),
        ([*GIVEN, "--learn", "none"], "--learn none is not one of"),
        (
            ["tiny_llama3_sft", "--model", "strange", "--data", "d.jsonl", "--no-forward-check"],
            "clip_qkv",
        ),
        (
            ["tiny_llama3_sft", "--resume", "run", "--no-forward-check"],
            "--resume keeps the model and the data of the run",
        ),
        (["gemma3_1b_lora_h100_bf16", "--model", "m", "--data", "d.jsonl"], "cannot train: Megatron-Core 0.15"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_user_errors_are_refused(words, says, refusal):
    assert says in refusal("finetune", *words)


@pytest.fixture
def pending(tmp_path, monkeypatch):
    """Create a trained run whose export to `out` was killed after the folder was created."""
    from superpod.launch.finetuning import finetune as tuning
    from superpod.launch.finetuning import session
    from superpod.runtime.checkpoints import resume as resume_rule
    from superpod.runtime.runs import pending_export

    monkeypatch.chdir(tmp_path)
    task = asdict(tuning.Task("m", ("d.jsonl",)))
    facts = {run_facts.FINETUNE: task, pending_export.EXPORTS_TO: str(tmp_path / "out")}
    run = RunFolder.create(tmp_path / "runs", "tiny_llama3_sft", facts=facts, recipe_lines=[])
    write_json(run.path / "done", {"step": 20})
    with pending_export.record_running_export(run.path, tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text("{}")
    sessions = []
    monkeypatch.setattr(resume_rule, "decide_by_sizes", lambda run: None)
    monkeypatch.setattr(tuning, "check", lambda *_: None)
    monkeypatch.setattr(session, "run_session", lambda *words, **more: sessions.append(words))
    monkeypatch.setattr("superpod.cli.running.finetune._finish", lambda outcome: None)
    return run, sessions


def resume(out):
    """Resume the run like the command line."""
    app.app(["finetune", "tiny_llama3_sft", "--resume", "last", "--out", str(out)], standalone_mode=False)


def test_a_killed_export_is_finished_in_its_folder(pending):
    run, sessions = pending
    resume("out")
    assert [(words[2].path.name, words[3]) for words in sessions] == [(run.path.name, Path("out"))]


def test_a_pending_export_may_use_another_folder(pending):
    resume("elsewhere")
    assert len(pending[1]) == 1


def test_a_pending_export_does_not_replace_another_folder(pending, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match=r"--out .*mine already exists") as refused:
        resume("mine")
    assert refused.value.hint == "choose another folder, or remove it"
    assert pending[1] == []


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Run a session in a new run, with replacements for training and export."""
    from superpod.launch.finetuning import finetune as tuning
    from superpod.launch.finetuning import session
    from superpod.requests.request import Request

    def call(trained, export):
        monkeypatch.setattr(session, "_train", lambda console, task, request, run, *more: trained(run))
        monkeypatch.setattr(session, "_export", lambda console, run, *more: export(run))
        task, request = tuning.Task("m", ("d.jsonl",)), Request("tiny_llama3_sft")
        session.run_session(task, request, None, None, tmp_path / "runs")

    return call


def interrupted(run):
    raise KeyboardInterrupt


def test_a_new_run_interrupted_before_its_first_attempt_is_removed(tune, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        tune(interrupted, interrupted)
    assert RunFolder.latest(tmp_path / "runs", "tiny_llama3_sft") is None


def test_a_trained_run_with_an_interrupted_export_is_kept(tune, tmp_path):
    def trained(run):
        (run.new_attempt().path / "result.json").write_text("{")
        return SimpleNamespace(state="done")

    with pytest.raises(KeyboardInterrupt):
        tune(trained, interrupted)
    assert RunFolder.latest(tmp_path / "runs", "tiny_llama3_sft") is not None
