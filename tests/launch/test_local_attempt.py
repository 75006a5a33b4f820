"""Run folder and status of a local run, with a fake launch."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from superpod.common.json_files import append_line
from superpod.errors import UserError
from superpod.launch import local, local_attempt, preflight
from superpod.requests.request import Request
from superpod.runtime.checkpoints.resume import Resume
from superpod.runtime.processes import attempt_processes
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import State
from superpod.slurm.status import run_views
from superpod.slurm.submission import connection

NAME = "tiny_llama3"


def fake_run(max_steps: int, ranks: int = 4) -> Any:
    """Return a replacement for a LocalRun, which needs NeMo."""
    resolved = SimpleNamespace(request=Request(NAME), plan={}, save_every=10)
    return SimpleNamespace(
        resolved=resolved, facts={}, lines=["a = 1"], max_steps=max_steps, ranks=ranks, checkpoint_bytes=0, changes=[]
    )


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Run an attempt with the given steps and end, at 100 tokens/s per rank."""

    def call(run: RunFolder | None, max_steps: int, steps: range, end: local.AttemptEnd) -> RunFolder:
        def launch(local_run, folder, attempt, tick):
            for step in steps:
                line = {"step": step, "loss": 1.0, "attempt": attempt.name, "step_time_s": 1.0}
                append_line(folder.path / "metrics.jsonl", line | {"tokens_per_s_per_gpu": 100.0})
            tick()
            if end.state == "done":
                (folder.path / "done").write_text(json.dumps({"step": max_steps}))
            return end

        monkeypatch.setattr(local, "launch", launch)
        monkeypatch.setattr(local, "decide_resume", lambda *_: Resume(None))
        monkeypatch.setattr(preflight, "require_disk_space", lambda *_: None)
        monkeypatch.setattr(attempt_processes, "refuse_running", lambda *_: None)
        _, folder = local_attempt.train(Console(quiet=True), fake_run(max_steps), run, tmp_path / "runs")
        return folder

    return call


DONE, CANCELLED = local.AttemptEnd(State.DONE, 0, ""), local.AttemptEnd(State.CANCELLED, 130, "stopped by the user")


def seen(run: RunFolder) -> run_views.RunView:
    return run_views.summarize_runs([run], connection.Connection())[0]


def test_the_tokens_of_all_ranks_are_counted(train):
    run = train(None, 10, range(1, 11), DONE)
    view = seen(run)
    assert (view.state, view.step, view.max_steps, view.tokens_per_s) == ("done", 10, 10, 400)


def test_the_ranks_of_an_old_run_are_counted_by_heartbeats(run):
    attempt = run.new_attempt()
    for rank in range(3):
        append_line(attempt.path / "heartbeat" / f"{rank}.jsonl", {"t": 1.0, "step": 1, "phase": "done"})
    append_line(run.path / "metrics.jsonl", {"step": 1, "attempt": "001", "tokens_per_s_per_gpu": 50.0})
    assert seen(run).tokens_per_s == 150


def test_a_resumed_run_cancelled_before_a_new_step_is_cancelled(train):
    run = train(None, 10, range(1, 11), DONE)
    train(run, 20, range(0), CANCELLED)
    for view in (seen(run), run.status()):
        assert view.state == "cancelled"
        assert view.message == "stopped by the user; no new step was trained; the run was already done at step 10"
    assert run.done, "its ten steps and their checkpoint are unchanged"
    train(run, 20, range(11, 16), CANCELLED)
    assert seen(run).message == "stopped by the user"
    train(run, 20, range(16, 21), DONE)
    assert (seen(run).state, seen(run).step) == ("done", 20)


def test_a_local_run_is_running_while_its_lock_is_held(run):
    with run.lock():
        run.new_attempt()
        assert seen(run).state == "running"
    assert seen(run).state == "failed"
    assert "killed" in seen(run).message


def test_a_run_refused_for_disk_space_leaves_no_folder(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    too_large = fake_run(10)
    too_large.checkpoint_bytes = 2**60
    with pytest.raises(UserError, match="two checkpoints of"):
        local_attempt.train(Console(quiet=True), too_large, None, runs)
    assert not list(runs.iterdir())
