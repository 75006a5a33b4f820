"""What a Slurm job decides before its ranks start, by the real attempt.py as a process.

A stand-in for scontrol names one node; the ranks are a shell command that says what it finds linked.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.runtime.attempts import attempt, full_disk, guard
from superpod.runtime.checkpoints import resume
from superpod.runtime.runs import run_state
from superpod.runtime.runs.run_folder import RunFolder
from tests.reports.runs import checkpoint_files as made
from tests.runtime import fake_scontrol
from tests.runtime.checkpoints.test_resume import DAMAGES, saved

Finished = subprocess.CompletedProcess


@pytest.fixture
def job(run, tmp_path):
    """Runs one job of the run; returns the finished process."""
    fake = fake_scontrol.installed(tmp_path / "fake")
    ranks = 'ls "$SUPERPOD_RUN_DIR/attempts/$SUPERPOD_ATTEMPT/resume" > "$SUPERPOD_RUN_DIR/seen"'
    words = [
        "--recipe",
        run.recipe,
        "--runs",
        str(run.path.parents[1]),
        "--second-look-s",
        "0",
        "--",
        "sh",
        "-c",
        ranks,
    ]

    def start(number: int, cancel: Callable[[subprocess.Popen], None] = lambda job: None) -> Finished:
        environment = fake_scontrol.environment(fake, run, number)
        command = [sys.executable, str(Path(attempt.__file__)), *words]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            cancel(process)
            return Finished(process.args, stdout=process.communicate(timeout=120)[0], returncode=process.wait())

    return start


@pytest.mark.parametrize("damage", ["truncated", "one flipped bit of a weight", "deleted", "half"])
def test_the_ranks_find_the_newest_whole_one(damage, run: RunFolder, job):
    folders = saved(run)
    DAMAGES[damage](folders[2])
    done = job(7)
    assert "resumes from step 20" in done.stdout, done.stdout
    assert "10 steps are lost" in done.stdout
    assert (run.path / "seen").read_text() == f"{folders[1].name}-last\n"
    result = run.attempts[0].result
    assert (result["before"], result["resume"]["step"], result["resume"]["lost_steps"]) == (20, 20, 10)


def test_without_a_whole_one_the_chain_ends(run: RunFolder, job):
    """A corrupt checkpoint burnt every job of the chain."""
    for folder in saved(run):
        DAMAGES["one flipped bit of a weight"](folder)
    done = job(7)
    assert done.returncode == 1
    assert "cannot be resumed: none of its 3 checkpoints is intact" in done.stdout
    [failed] = run.attempts
    assert failed.result["state"] == "failed"
    assert "none of its 3 checkpoints is intact" in failed.result["message"]
    assert not (run.path / "seen").exists(), "no rank was started"
    marker = run.stop
    assert marker is not None
    assert marker.by is run_state.StoppedBy.AUTOMATIC
    further = job(8)
    assert further.returncode == 0
    assert "is stopped" in further.stdout
    assert not (run.path / resume.DAMAGED).exists(), "all stay where they are"


def test_a_full_disk_costs_no_complete_checkpoint(run: RunFolder, monkeypatch):
    """Its job was killed between the last byte and the removal of NeMo's mark, and then the disk was full."""
    newest = made.write(run.checkpoints / "step=19-consumed_samples=160.0")
    newest.with_name(f"{newest.name}-unfinished").touch()
    answers = iter(["the disk is full", ""])
    monkeypatch.setattr(full_disk, "space_problem", lambda run: next(answers))
    assert attempt._wait_for_space(run, attempt.SlurmJob(), self_submit=False) is None
    assert resume.decide(run).checkpoint == newest


def test_a_run_folder_that_is_gone_is_no_traceback(run: RunFolder):
    with pytest.raises(UserError, match="No such file"):
        attempt._wait_for_space(RunFolder(run.path / "gone"), attempt.SlurmJob(), self_submit=False)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_job_that_is_cancelled_while_it_waits_for_space_ends_the_run(is_cancelled, run, job, tmp_path):
    """A scancel while the job waited left no trace, and the next job of the chain started."""
    saved(run)
    run.update({"checkpoint_bytes": 1 << 60}, [])

    def cancel(process: subprocess.Popen) -> None:
        assert process.stdout
        while "checking again in" not in process.stdout.readline():
            assert process.poll() is None
        if is_cancelled:
            (tmp_path / "fake" / "scontrol.cancelled").touch()
        process.send_signal(signal.SIGTERM)

    began = time.monotonic()
    assert job(7, cancel).returncode == 0
    assert time.monotonic() - began < 25, "Slurm kills 30 s after a scancel"
    assert run.attempts == [], "nothing is written before there is space"
    run.update({"checkpoint_bytes": 0}, [])
    assert ("was cancelled" in job(8).stdout) == is_cancelled
    assert (run.path / "seen").exists() != is_cancelled


def test_an_attempt_whose_ranks_were_not_started_is_none_without_progress(run, job):
    """Its nodes were bad, or an earlier version waited for disk space in it."""
    for _ in range(3):
        waited = run.new_attempt(job="7")
        waited.mark("running", before=0)
        waited.finish("requeued", message="the disk is full", counts=False)
    assert guard.reason_to_stop(run, idle_attempts=2, failures=1) is None
    for _ in range(2):
        early = run.new_attempt(job="8")
        early.mark("running", before=0)
        early.finish("failed", message="it broke")
    assert "2 consecutive attempts wrote no new checkpoint" in str(
        guard.reason_to_stop(run, idle_attempts=2, failures=9)
    )
