"""How a job ended, by whoever still knows. Slurm's commands are scripts with 22.05's answers."""

import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.diagnosis import job_end
from superpod.runtime.attempts import attempt as launcher
from superpod.runtime.attempts import guard

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LINE = "slurmstepd-node1: error: *** JOB 359 ON node1 CANCELLED AT 2026-11-22T20:38:44{} ***\n"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Answers of the controller and of accounting; None = it does not answer."""

    def answer(controller: str | None, accounting: str | None):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        texts = {"scontrol": controller and f"JobId=359 JobState={controller} Reason=None", "sacct": accounting}
        for name, text in texts.items():
            body = "exit 1" if text is None else f"echo '{text}'"
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return tmp_path / "slurm-359.out"

    return answer


@pytest.mark.parametrize(
    ("controller", "accounting", "ended"),
    [
        ("CANCELLED", None, "CANCELLED"),
        ("CANCELLED", "CANCELLED by 1001", "CANCELLED by 1001"),
        (None, "CANCELLED by 0", "CANCELLED by 0"),  # after MinJobAge
        ("COMPLETING", "CANCELLED by 0", "CANCELLED by 0"),  # it hides how the job ends
        ("COMPLETING", "REQUEUED", "REQUEUED"),
        ("TIMEOUT", "CANCELLED by 0", "TIMEOUT"),
        ("RUNNING", "CANCELLED by 0", "RUNNING"),
        (None, "FAILED", "FAILED"),
        (None, "PENDING", ""),
        (None, None, ""),
    ],
)
def test_both_are_asked(slurm, controller, accounting, ended):
    assert job_end.current_state("359", slurm(controller, accounting)) == ended


@pytest.mark.parametrize(
    ("more", "ended"),
    [
        ("", "CANCELLED"),
        (" DUE to SIGNAL Terminated", "CANCELLED"),
        (" DUE TO TIME LIMIT", "TIME LIMIT"),
        (" DUE TO JOB REQUEUE", "JOB REQUEUE"),
        (" DUE TO PREEMPTION", "PREEMPTION"),
    ],
)
def test_when_both_have_forgotten_the_jobs_own_output_tells(slurm, more, ended):
    output = slurm(None, None)
    output.write_text("before\n" + LINE.format(" DUE TO JOB REQUEUE") + LINE.format(more) + "\xff after\n")
    assert job_end.current_state("359", output) == ended
    assert job_end.current_state("35", output) == ""


def test_a_run_whose_job_was_cancelled_long_ago_ends(run, slurm):
    attempt = run.new_attempt(job="359")
    attempt.mark("running", before=0)
    output = slurm(None, "CANCELLED by 0")
    words = guard.reason_to_skip(run, lambda job: job_end.final_state(job, output), "400")
    assert "job 359 was cancelled by" in str(words)
    assert run.stop is not None
    assert attempt.result["state"] == "cancelled"


def test_another_user_who_cancelled_is_named(run, monkeypatch):
    attempt = run.new_attempt(job="359")
    attempt.mark("running", before=0)
    assert "was cancelled by daemon, so" in str(guard.reason_to_skip(run, lambda job: "CANCELLED by 1", "400"))
    assert attempt.result["message"] == "cancelled by daemon (scancel)"


def test_inside_a_job_that_is_about_to_be_killed_slurm_has_little_time_to_answer(slurm, monkeypatch):
    """KillWait is 30 s, and the attempt must be recorded by then; afterwards there is time."""
    output, waited = slurm(None, None), []

    def hangs(words, **options):
        waited.append(options["timeout"])
        raise subprocess.TimeoutExpired(words, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert job_end.current_state("359", output) == ""
    assert waited == [5, 5]
    assert job_end.final_state("359", output, wait_s=0) == ""
    assert waited[2:] == [30, 30]


def test_after_a_sigterm_slurm_is_not_bothered_every_second(run, monkeypatch):
    """Each look may wait for Slurm, and the ranks are watched in between."""
    looks, handlers = [], {number: signal.getsignal(number) for number in STOPS}
    monkeypatch.setattr(launcher, "POLL_S", 0.02)
    monkeypatch.setattr(launcher, "CANCELLATION_POLL_S", 0.5)
    monkeypatch.setattr(job_end, "current_state", lambda job, output: looks.append(job) or "")
    monkeypatch.setattr(launcher, "TimeLimit", lambda path, deadline: SimpleNamespace(update=lambda: ""))
    for name in ("_end_stalled_ranks", "_environment", "_record"):
        monkeypatch.setattr(launcher._RunningAttempt, name, lambda *args, name=name: {} if name != "_record" else 7)
    job = SimpleNamespace(id="7", nodes=["n0"], deadline=lambda: 0.0)
    waiting: Any = object.__new__(launcher._RunningAttempt)
    waiting.run, waiting.attempt, waiting.job = run, run.new_attempt(), job
    waiting.options = SimpleNamespace(stalled_s=600)
    waiting.signals, waiting.cancelled, waiting._next_check = ["SIGTERM"], False, 0.0
    try:
        assert waiting._run_ranks(["/bin/sleep", "1.2"]) == 7
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert 2 <= len(looks) <= 3
