"""Progress in steps and in time."""

import pytest

from superpod.common.json_files import append_line
from superpod.runtime.attempts import guard, progress
from superpod.runtime.attempts.progress import Chain
from tests.runtime.attempts.test_attempt import checkpoint


def attempt_of(run, before, steps, step_s, took_s, state="failed", message="it broke"):
    """An attempt that took `took_s` for so many steps, the last of which was saved."""
    attempt = run.new_attempt(job="1")
    attempt.mark("running", before=before)
    for step in range(before + 1, before + steps + 1):
        line = {"t": 1.0, "attempt": attempt.name, "step": step, "loss": 1.0, "step_time_s": step_s}
        append_line(run.path / "metrics.jsonl", line)
    if steps:
        checkpoint(run, before + steps)
    attempt.finish(state, message=message)
    attempt.mark("running", started=1000.0, ended=1000.0 + took_s)
    attempt.mark(state)


def test_one_step_a_job_is_no_progress_for_ever(run):
    attempt_of(run, 0, 1, 2.0, 3600)
    assert guard.reason_to_stop(run, 2, 20) is None
    attempt_of(run, 1, 1, 2.0, 3600)
    reason = guard.reason_to_stop(run, 2, 20)
    assert reason == (
        "2 consecutive attempts trained 2 steps in 2 h, but only 4 s of that time was spent on steps that a checkpoint "
        "contains: less than 10%; the last one: it broke"
    )


def test_an_hour_of_steps_is_progress_however_it_ended(run):
    for number in range(4):
        attempt_of(run, 100 * number, 100, 30.0, 3600)
    assert guard.reason_to_stop(run, 2, 20) is None


def test_a_good_attempt_in_between_counts(run):
    attempt_of(run, 0, 1, 2.0, 3600)
    attempt_of(run, 1, 1000, 2.0, 3600)
    attempt_of(run, 1001, 1, 2.0, 3600)
    assert guard.reason_to_stop(run, 2, 20) is None


def test_attempts_of_two_minutes_are_not_judged_by_time_before_they_add_up(run):
    """A job that was warned, or killed, soon after its start on a busy machine: testbed/test_train.py, under load."""
    for number in range(4):
        attempt_of(run, 3 * number, 3, 0.15, 120)
        assert guard.reason_to_stop(run, 2, 20) is None
    attempt_of(run, 12, 3, 0.15, 120)
    assert str(guard.reason_to_stop(run, 2, 20)).startswith(
        "5 consecutive attempts trained 15 steps in 10 min, but only"
    )


def test_short_attempts_without_a_kept_step_are_idle_at_once(run):
    attempt_of(run, 0, 3, 0.15, 120)
    attempt_of(run, 3, 0, 0.15, 60)
    assert guard.reason_to_stop(run, 2, 20) is None
    attempt_of(run, 3, 0, 0.15, 60)
    assert str(guard.reason_to_stop(run, 2, 20)).startswith("2 consecutive attempts wrote no new checkpoint")


def slow_saves(run, before, steps, step_s, save_s):
    """An attempt with steps of `step_s`, and a save or a validation of `save_s` after every tenth, the last lost."""
    attempt = run.new_attempt(job="1")
    attempt.mark("running", before=before)
    now = 1060.0
    for step in range(before + 1, before + steps + 2):
        now += step_s
        line = {"t": now, "attempt": attempt.name, "step": step, "loss": 1.0, "step_time_s": step_s}
        append_line(run.path / "metrics.jsonl", line)
        now += save_s if step % 10 == 0 else 0
    checkpoint(run, before + steps)
    attempt.finish("failed", message="it broke")
    attempt.mark("failed", started=1000.0, ended=now)


@pytest.mark.parametrize("steps", [10, 50])
def test_a_run_that_saves_longer_than_it_trains_comes_forward(run, steps):
    """The seconds of its steps alone are 8 % of its time."""
    for number in range(3):
        slow_saves(run, steps * number, steps, 1.0, 120.0)
    worth = progress.measure_attempts(run, run.attempts, guard.newest_step(run))
    assert [(w.steps, w.productive_s) for w in worth] == [(steps, steps * 13.0)] * 3
    assert guard.reason_to_stop(run, 2, 20) is None


def test_steps_that_no_checkpoint_holds_do_not_count(run):
    attempt_of(run, 0, 10, 60.0, 900)
    for step in range(11, 500):
        line = {"t": 1.0, "attempt": "002", "step": step, "loss": 1.0, "step_time_s": 60.0}
        append_line(run.path / "metrics.jsonl", line)
    attempt_of(run, 10, 1, 60.0, 36000)
    first, second = progress.measure_attempts(run, run.attempts, guard.newest_step(run))
    assert (first.steps, first.productive_s, first.is_idle) == (10, 600.0, False)
    assert (second.steps, second.productive_s, second.is_idle) == (1, 60.0, True)


@pytest.mark.parametrize(
    ("step", "step_s", "jobs", "says"),
    [
        (0, 1.0, 3, ""),
        (0, 10.0, 3, "5,000 steps of 10 s take 13.9 h, but 3 jobs of 4 h end at step 3,942 of 5,000: 4 are needed"),
        (4900, 10.0, 1, ""),
        (4000, 10.0, 0, "1,000 steps of 10 s take 2.78 h, but 0 jobs of 4 h end at step 4,000 of 5,000: 1 are needed"),
        (5000, 10.0, 0, ""),
        (
            0,
            20000.0,
            3,
            "a job of 4 h cannot complete a step: starting and saving take 21 min, and a step takes 5.56 h",
        ),
    ],
)
def test_a_chain_that_cannot_end_in_its_time_says_so(step, step_s, jobs, says):
    assert progress.chain_shortfall(step, 5000, step_s, Chain(jobs, 4 * 3600.0, 1260.0)) == says


def running(run, steps, step_s, started=1000.0, **facts):
    """An attempt that started at `started`, took 100 s to begin and made so many steps."""
    run.update({"limit_s": 3600.0, "save_s": 100.0, "max_steps": 1000} | facts, [])
    attempt = run.new_attempt(job="1")
    attempt.mark("running", started=started)
    times = (started + 100 + step_s * number for number in range(1, steps + 1))
    for number, t in enumerate(times, 1):
        line = {"t": t, "attempt": attempt.name, "step": number, "loss": 1.0, "step_time_s": step_s}
        append_line(run.path / "metrics.jsonl", line)
    return run.newest_metrics()


def test_a_running_chain_says_that_it_cannot_end_in_its_time(run):
    lines = running(run, 10, 10.0)
    # 3,400 s of each later job make steps, and of this one, which ends at 4,600 s, 3,300 from now on.
    assert progress.alarm(run, lines, 2, 1200.0) == ""
    assert progress.alarm(run, lines, 1, 1200.0) == (
        "990 steps of 10 s take 2.75 h, but this job and 1 job more of 60 min end at step 680 of 1,000: 2 are needed"
    )


def test_nothing_is_said_before_the_pace_is_known_or_of_a_run_without_limit(run):
    assert progress.alarm(run, [], 0, 1200.0) == ""
    assert progress.alarm(run, running(run, 4, 10.0), 0, 1200.0) == ""


def test_an_older_run_without_its_limit_says_nothing(run):
    assert progress.alarm(run, running(run, 10, 10.0, limit_s=None), 0, 1200.0) == ""
