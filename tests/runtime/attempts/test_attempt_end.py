"""How attempts ended, from evidence alone (issue 25, A8). Slurm's commands are scripts with 22.05's answers."""

import json
from dataclasses import asdict

import pytest

from superpod.reports.runs import attempts
from superpod.runtime.attempts import attempt_end, diagnose, guard
from superpod.runtime.runs.run_state import UNRECORDED


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Answers of the controller and of accounting for job 359."""

    def answer(state: str, exit_code: str = "0:0", accounted: str = ""):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        shown = f"JobId=359 JobState={state} Reason=None ExitCode={exit_code} X=1"
        texts = {"scontrol": shown if state else "", "sacct": accounted}
        for name, text in texts.items():
            (folder / name).write_text(f"#!/bin/sh\necho '{text}'\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return answer


@pytest.fixture
def silent(run):
    """An attempt of job 359 that wrote nothing after its start, and whose ranks were told to end."""
    attempt = run.new_attempt(job="359")
    attempt.mark("running", before=0)
    log = "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
    (attempt.path / "logs" / "srun.log").write_text(log)
    return attempt


@pytest.mark.parametrize(
    ("state", "exit_code", "accounted", "ended", "says"),
    [
        ("FAILED", "0:9", "", "failed", "(attempt.py) was killed by SIGKILL; cause unknown"),
        ("FAILED", "0:11", "", "failed", "(attempt.py) was killed by SIGSEGV; cause unknown"),
        ("OUT_OF_MEMORY", "0:125", "", "failed", "Slurm ended job 359: OUT_OF_MEMORY"),
        ("TIMEOUT", "0:0", "", "failed", "Slurm ended job 359: TIMEOUT"),
        ("NODE_FAIL", "1:0", "", "failed", "Slurm ended job 359: NODE_FAIL"),
        ("CANCELLED", "0:15", "", "cancelled", "cancelled by the user (scancel)"),
        ("CANCELLED", "0:15", "CANCELLED by 1", "cancelled", "cancelled by daemon (scancel)"),
        ("", "", "CANCELLED by 1", "cancelled", "cancelled by daemon (scancel)"),
    ],
)
def test_a_silent_attempt_ends_as_slurm_says(run, silent, slurm, state, exit_code, accounted, ended, says):
    """A cancelled attempt stayed `running` in `history`, and kill -9 of attempt.py was called out of memory."""
    slurm(state, exit_code, accounted)
    end = attempt_end.find_end(run, silent)
    assert end is not None
    assert end.state == ended
    assert says in end.message
    (seen,) = attempts.read_attempts(run)
    assert (seen.state, seen.message) == (end.state, end.message)
    assert silent.result["state"] == "running", "a look changes nothing"
    guard._finish(silent)
    assert (silent.result["state"], silent.result["message"]) == (end.state, end.message)
    assert "memory" not in end.message.replace("no out-of-memory kill is recorded", "")


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETING", ""])
def test_an_attempt_that_lives_or_of_which_nobody_knows_is_left_as_it_is(run, silent, slurm, state):
    slurm(state)
    assert attempt_end.find_end(run, silent) is None
    assert attempts.read_attempts(run)[0].state == "running"


def test_an_attempt_before_the_newest_does_not_run(run, silent, slurm):
    slurm("")
    run.new_attempt(job="360")
    assert [view.state for view in attempts.read_attempts(run)] == ["failed", "running"]


def test_a_local_attempt_whose_launcher_is_gone_does_not_run(run):
    run.new_attempt()
    (seen,) = attempts.read_attempts(run)
    assert (seen.state, seen.message) == ("failed", UNRECORDED)
    assert json.dumps(asdict(seen))


def test_why_takes_a_killed_launcher_as_the_root_and_not_what_follows(run, silent):
    """slurmstepd writes the step's CANCELLED line when srun is gone."""
    line = "0: slurmstepd-node1: error: *** STEP 37.0 ON node1 CANCELLED AT 2026-11-25T16:49:34 ***\n"
    (silent.path / "logs" / "0.log").write_text(line)
    silent.mark("running", **{attempt_end.KILLED: attempt_end.describe_kill("srun", 9)})
    silent.finish("failed")
    root = diagnose.judge_attempt(run, silent).root
    assert root is not None
    assert root.name == "launcher_killed"
    assert "srun was killed by SIGKILL; cause unknown" in diagnose.summarize(run, silent).cause


def test_an_out_of_memory_kill_is_named_where_the_kernel_counted_one(run, silent):
    silent.mark("running", **{attempt_end.KILLED: attempt_end.describe_kill("srun", 9, 1), attempt_end.OOM_KILLS: 1})
    silent.finish("failed")
    root = diagnose.judge_attempt(run, silent).root
    assert root is not None
    assert root.name == "host_out_of_memory"


@pytest.mark.parametrize(
    ("controllers", "file"), [("", "memory.events"), ("memory", "memory.oom_control")], ids=["v2", "v1"]
)
def test_the_kernels_count_of_the_jobs_group(tmp_path, controllers, file):
    group = tmp_path / controllers / "system.slice" / "slurmstepd.scope" / "job_359"
    group.mkdir(parents=True)
    (group / file).write_text("oom 3\noom_kill 2\n")
    proc = tmp_path / "cgroup"
    proc.write_text(f"3:{controllers}:/system.slice/slurmstepd.scope/job_359/step_batch/user/task_0\n")
    assert attempt_end.oom_kills(proc, tmp_path) == 2
    proc.write_text("0::/user.slice\n")
    assert attempt_end.oom_kills(proc, tmp_path) == 0
