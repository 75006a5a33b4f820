"""Whether another attempt may start: marks of a stop, attempts that count, and the last words of those that failed."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest

from superpod.runtime.attempts import attempt_end, guard
from superpod.runtime.attempts.guard import StoppedBy
from superpod.runtime.runs import run_state
from superpod.runtime.runs.run_state import State


def finished(run, state="failed", message="", **facts):
    attempt = run.new_attempt()
    attempt.mark("running", **facts)
    attempt.finish(state, message=message)
    return attempt


@pytest.mark.parametrize(
    ("marker", "reason", "by"),
    [
        ({"reason": "x", "by": "user"}, "x", StoppedBy.USER),
        ({"reason": "x", "by": "guard"}, "x", StoppedBy.AUTOMATIC),
        ({"reason": "cancelled by the user"}, "cancelled by the user", StoppedBy.USER),  # version 0.1
        ({"reason": "job 12 was cancelled by the user"}, "job 12 was cancelled by the user", StoppedBy.USER),
        ({"reason": "2 attempts failed"}, "2 attempts failed", StoppedBy.AUTOMATIC),
        ({"reason": "it was cancelled by the user"}, "it was cancelled by the user", StoppedBy.AUTOMATIC),
        ({"by": "nobody"}, "?", StoppedBy.AUTOMATIC),
        (None, "the file stop exists, but does not contain a reason", StoppedBy.AUTOMATIC),
    ],
)
def test_a_marker_says_who_stopped_the_run_and_why(run, marker, reason, by):
    (run.path / "stop").write_text("" if marker is None else json.dumps(marker))
    assert run.stop == run_state.Stop(reason, by)
    assert guard.is_cancelled(run) is (by is StoppedBy.USER)


def test_without_a_marker_nothing_is_stopped(run):
    assert run.stop is None
    assert not guard.is_cancelled(run)
    (run.path / "stop").symlink_to("nowhere")
    assert run.stop is not None


def test_a_run_that_its_user_lets_go_on_begins_to_count_anew(run):
    guard.allow_resume(run)
    assert json.loads((run.path / "again.json").read_text()) == {"after": 0}
    assert not run.state_files().was_resumed
    for _ in range(2):
        finished(run, message="CUDA error", before=0)
    assert "the last one: CUDA error" in str(guard.reason_to_stop(run, 2, 9))
    guard.stop(run, "no progress", by=StoppedBy.AUTOMATIC)
    assert json.loads((run.path / "stop").read_text())["reason"] == "no progress"
    guard.allow_resume(run)
    assert run.stop is None
    assert run.state_files().was_resumed
    assert guard.reason_to_stop(run, 2, 9) is None
    finished(run, before=0)
    assert not run.state_files().was_resumed
    assert guard.reason_to_stop(run, 2, 9) is None
    assert str(guard.reason_to_stop(run, 1, 9)).endswith("the last one: ended without a result")


def test_attempts_that_do_not_count_are_not_judged(run):
    for _ in range(3):
        finished(run, before=0, counts=False)
    assert guard.reason_to_stop(run, 2, 1) is None


@pytest.mark.parametrize(("failures", "stops"), [(3, False), (2, True)])
def test_failures_are_counted_beyond_what_is_allowed(run, monkeypatch, failures, stops):
    monkeypatch.setattr(guard.progress, "idle_streak", lambda worths: [])
    for number in range(3):
        finished(run, message=f"e{number}", before=0)
    finished(run, "requeued", "put back", before=0)
    said = guard.reason_to_stop(run, 9, failures)
    assert said == ("3 attempts failed, but only 2 are allowed; the last one: put back" if stops else None)


def test_a_run_is_done_stopped_or_cancelled(run):
    live = SimpleNamespace(state="RUNNING")

    def asked(me="9", pending=False):
        return guard.reason_to_skip(run, lambda job: live.state, me, has_pending_export=pending)

    assert asked() is None
    attempt = run.new_attempt()
    attempt.mark("running", job="8")
    assert asked() is None
    live.state = "CANCELLED"
    assert asked(me="8") is None
    guard.allow_resume(run)
    assert asked() is None
    (run.path / "again.json").unlink()
    assert str(asked()).endswith("job 8 was cancelled by the user, so the run ends")
    assert attempt.result["message"] == "cancelled by the user (scancel)"
    assert run.stop == run_state.Stop("job 8 was cancelled by the user", StoppedBy.USER)
    assert str(asked()).endswith("is stopped: job 8 was cancelled by the user")
    (run.path / "stop").unlink()
    (run.path / "done").write_text("{}")
    assert str(asked()).endswith("is done") is run.done
    assert not str(asked(pending=True)).endswith("is done")


@pytest.mark.parametrize(("same", "state"), [(True, "requeued"), (False, "failed")])
def test_a_killed_attempt_is_finished_by_the_next(run, monkeypatch, same, state):
    attempt = run.new_attempt()
    attempt.mark("running", job="8", before=0)
    monkeypatch.setenv("SLURM_JOB_ID", "8" if same else "9")
    monkeypatch.setattr(attempt_end, "find_end", lambda run, attempt: None)
    guard.reason_to_stop(run, 9, 9)
    assert attempt.result["state"] == state
    assert attempt.result["message"].startswith("Slurm requeued job 8" if same else "killed with its job")


def test_what_ended_its_launcher_is_kept_as_evidence(run, monkeypatch):
    attempt = run.new_attempt()
    attempt.mark("running", before=0)
    end = attempt_end.End(State.FAILED, "killed by SIGKILL", "the launcher")
    monkeypatch.setattr(attempt_end, "find_end", lambda run, attempt: end)
    guard.reason_to_stop(run, 9, 9)
    assert (attempt.result["message"], attempt.result[attempt_end.KILLED]) == ("killed by SIGKILL", "the launcher")


def test_the_last_line_of_srun_stands_in_for_logs_that_name_no_cause(run, monkeypatch):
    attempt = run.new_attempt()
    found = SimpleNamespace(known=False, cause="nothing known")
    monkeypatch.setattr(guard.diagnose, "summarize", lambda run, attempt: found)
    assert guard.failure_message(run, attempt, 7) == "nothing known (srun exited with 7)"
    (attempt.path / "logs").mkdir(exist_ok=True)
    (attempt.path / "logs" / "srun.log").write_text("first\n" + "x" * 500 + "y\n\n")
    assert guard.failure_message(run, attempt, 7) == "x" * 399 + "y (attempts/001/logs/srun.log)"
    found.known = True
    assert guard.failure_message(run, attempt, 7) == "nothing known"


def test_the_longest_save_of_all_attempts_counts_twice(run, monkeypatch):
    assert guard.save_seconds(run, 30.0) == 30.0
    for _ in range(2):
        run.new_attempt()
    seconds = {"001": 40.0, "002": 20.0}
    monkeypatch.setattr(guard.heartbeat_pages, "longest_save_s", lambda folder: seconds[folder.parent.name])
    assert guard.save_seconds(run, 30.0) == 80.0
    assert guard.save_seconds(run, 90.0) == 90.0


@pytest.mark.parametrize(
    ("chain", "cancelled"),
    [(None, None), ({"jobs": "7"}, None), ({"jobs": [7]}, None), ({"jobs": [7, 8, "9"]}, ["8", "9"])],
)
def test_the_jobs_behind_this_one_are_cancelled(run, monkeypatch, chain, cancelled):
    if chain:
        (run.path / "chain.json").write_text(json.dumps(chain))
    calls = []
    monkeypatch.setattr(guard, "output_of", lambda command, timeout_s: calls.append(command))
    guard.cancel_chain(run, "7")
    assert calls == ([["scancel", "--state=PENDING", *cancelled]] if cancelled else [])
    monkeypatch.setattr(subprocess, "run", lambda command, **options: os.stat("/nowhere"))
    guard.cancel_chain(run, "7")  # where Slurm cannot be asked, nothing happens
