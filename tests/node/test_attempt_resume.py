"""Issue 14, findings 1 and 6: what a Slurm job decides before its ranks start, by the real attempt.py as a process.

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
from superpod.node import attempt, full_disk, guard, resume
from superpod.node.run_folder import RunFolder
from tests.lifecycle import checkpoint_files as made
from tests.node import fake_scontrol
from tests.node.test_resume import DAMAGES, saved

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
def test_finding_1_the_ranks_find_the_newest_whole_one(damage, run: RunFolder, job):
    folders = saved(run)
    DAMAGES[damage](folders[2])
    done = job(7)
    assert "resumes from step 20" in done.stdout, done.stdout
    assert "10 steps are lost" in done.stdout
    assert (run.path / "seen").read_text() == f"{folders[1].name}-last\n"
    result = run.attempts[0].result
    assert (result["before"], result["resume"]["step"], result["resume"]["lost_steps"]) == (20, 20, 10)


def test_finding_6_without_a_whole_one_the_chain_ends(run: RunFolder, job):
    """14: a corrupt checkpoint burnt every job of the chain."""
    for folder in saved(run):
        DAMAGES["one flipped bit of a weight"](folder)
    done = job(7)
    assert done.returncode == 1
    assert "cannot go on: none of its 3 checkpoints is whole" in done.stdout
    [failed] = run.attempts
    assert failed.result["state"] == "failed"
    assert "none of its 3 checkpoints is whole" in failed.result["message"]
    assert not (run.path / "seen").exists(), "no rank was started"
    marker = guard.stopped(run)
    assert marker is not None
    assert marker.by is guard.StoppedBy.GUARD
    further = job(8)
    assert further.returncode == 0
    assert "is stopped" in further.stdout
    assert not (run.path / resume.ASIDE).exists(), "all stay where they are"


def test_finding_6_a_full_disk_costs_no_complete_checkpoint(run: RunFolder, monkeypatch):
    """14: its job was killed between the last byte and the removal of NeMo's mark, and then the disk was full."""
    newest = made.write(run.checkpoints / "step=19-consumed_samples=160.0")
    newest.with_name(f"{newest.name}-unfinished").touch()
    answers = iter(["the disk is full", ""])
    monkeypatch.setattr(full_disk, "missing", lambda run: next(answers))
    assert attempt._wait_for_room(run, attempt.SlurmJob(), self_submit=False) == ""
    assert resume.decide(run).checkpoint == newest


def test_a_disk_that_fails_is_no_traceback(run: RunFolder, monkeypatch):
    def fail(run: RunFolder) -> str:
        raise OSError(5, "Input/output error", str(run.path))

    monkeypatch.setattr(full_disk, "missing", fail)
    with pytest.raises(UserError, match="Input/output error"):
        attempt._wait_for_room(run, attempt.SlurmJob(), self_submit=False)


@pytest.mark.parametrize(("is_cancelled", "state"), [(True, "cancelled"), (False, "requeued")])
def test_finding_4_a_job_that_ends_before_its_ranks_start_is_an_attempt(is_cancelled, state, run, job, tmp_path):
    """14: a scancel while the job waited for room left no trace, and the next job of the chain started."""
    saved(run)
    run.update({"checkpoint_bytes": 1 << 60}, [])

    def cancel(process: subprocess.Popen) -> None:
        assert process.stdout
        while "looks again in" not in process.stdout.readline():
            assert process.poll() is None
        if is_cancelled:
            (tmp_path / "fake" / "scontrol.cancelled").touch()
        process.send_signal(signal.SIGTERM)

    began = time.monotonic()
    job(7, cancel)
    assert time.monotonic() - began < 25, "Slurm kills 30 s after a scancel"
    [attempt] = run.attempts
    assert {"job": "7", "before": 30, "state": state}.items() <= attempt.result.items()
    run.update({"checkpoint_bytes": 0}, [])
    assert ("was cancelled" in job(8).stdout) == is_cancelled
    assert (run.path / "seen").exists() != is_cancelled


def test_an_attempt_that_waited_for_room_is_none_without_progress(run, job):
    """Nor one whose nodes were bad: the jobs behind it are put off, and each of them would count."""
    for _ in range(3):
        waited = run.new_attempt(job="7")
        waited.mark("running", before=0)
        waited.finish("requeued", message="the disk is full", counts=False)
    assert guard.must_stop(run, idle_attempts=2, failures=1) == ""
    for _ in range(2):
        early = run.new_attempt(job="8")
        early.mark("running", before=0)
        early.finish("failed", message="it broke")
    assert "2 attempts in a row made no new checkpoint" in guard.must_stop(run, idle_attempts=2, failures=9)


def test_a_disk_is_full_since_the_last_attempt_that_had_room(run):
    """Or the jobs behind would be put off by the least time for ever."""
    for ended, counts in ((1000.0, True), (5000.0, False)):
        run.new_attempt().mark("requeued", ended=ended, counts=counts)
    run.new_attempt()  # the one that waits
    assert full_disk.put_off(run, [], 5600.0, lambda seconds: True) == 4600
