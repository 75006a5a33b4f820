"""One fault per test: the last step is reached, at most one checkpoint interval repeated, no process left.

Each with the toy and with real NeMo. With --update-goldens, what they did goes into docs/slurm.md.
"""

import os
import shutil
import signal
import subprocess
import time

import pytest

from superpod.diagnosis import job_end
from tests.slurm.testbed.bed import BASE, until
from tests.slurm.testbed.fault_table import DOCS, lines
from tests.slurm.testbed.nemo_runs import LONGEST
from tests.slurm.testbed.runs import BedRun

pytestmark = pytest.mark.long


def find_rank(run: BedRun, node: int) -> int:
    """The process of one rank on a node."""
    for pid in run.ranks():
        where = ["nsenter", "--target", str(pid), "--uts", "hostname"]
        if subprocess.run(where, capture_output=True, text=True).stdout.strip() == f"node{node}":
            return pid
    raise AssertionError(f"no rank on node {node}")


def test_kill_9_of_a_rank(training):
    run = training.at_step_15()
    os.kill(find_rank(run, 2), signal.SIGKILL)
    training.ends_well(run, "`kill -9` of a rank")


def test_kill_9_of_slurmd(training, testbed):
    """Only the daemon is killed; its job continues or is requeued, and the daemon is restarted."""
    run = training.at_step_15()
    testbed("slurmd-kill", "2")
    time.sleep(3)
    testbed("boot", "2")
    training.ends_well(run, "`kill -9` of slurmd", least_attempts=1)


def test_a_rank_that_hangs(training):
    """Nobody's process has died, and Slurm sees nothing; the heartbeats do."""
    run = training.start(("stalled_s = 30", f"stalled_s = {12 * (2 if training.nemo else 1)}"))
    run.until_step(15)
    pid = find_rank(run, 2)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: run.seen().state == "stalled" or len(run.run.attempts) > 1, 60, run.story)
    until(lambda: len(run.run.attempts) > 1, 90, run.story)
    first = run.run.attempts[0].result
    assert first["state"] == "stalled", run.story()
    assert "on node2 no longer answers" in first["message"]
    training.ends_well(run, "a rank hangs")


def test_a_node_that_hangs(training, testbed):
    run = training.at_step_15()
    testbed("hang", "2")
    until(lambda: len(run.run.attempts) > 1 or run.seen().state == "requeued", 180, run.story)
    testbed("unhang", "2")
    training.ends_well(run, "a node hangs")


@pytest.mark.parametrize(("node", "fault"), [("2", "a node loses power"), ("1", "the first node loses power")])
def test_a_node_that_loses_power(node, fault, training, testbed):
    run = training.at_step_15()
    testbed("crash", node)
    training.ends_well(run, fault)


def test_a_node_that_is_drained(training, testbed):
    """A draining node finishes its job."""
    run = training.at_step_15()
    testbed.slurm("scontrol", "update", "nodename=node2", "state=drain", "reason=test")
    training.ends_well(run, "a node is drained", least_attempts=1)


def test_disconnected_network(training, testbed):
    run = training.at_step_15()
    testbed("cut", "2")
    until(lambda: len(run.run.attempts) > 1, 180, run.story)
    time.sleep(5)
    testbed("join", "2")
    training.ends_well(run, "a network cable is pulled")


def test_preemption_with_grace_time(training, testbed):
    run = training.start(('partition = "batch"', 'partition = "low"'), attempts=2)
    run.until_step(15)
    high = testbed.slurm(
        "sbatch", "--parsable", "-p", "batch", "-N4", "--gpus-per-node=8", "-o", "/dev/null", "--wrap", "sleep 5"
    ).strip()
    until(lambda: testbed.state(high) != "PENDING", 90, run.story)
    training.ends_well(run, "a preemption with 30 s of grace", most_lost=0)
    assert run.run.attempts[0].result["state"] == "requeued", run.story()


def test_a_requeue_by_an_administrator(training, testbed):
    run = training.at_step_15()
    testbed.slurm("scontrol", "requeue", run.job)
    training.ends_well(run, "`scontrol requeue`")
    assert run.run.attempts[0].result["state"] == "requeued", run.story()


def test_the_controller_is_restarted(training, testbed):
    run = training.at_step_15()
    testbed("ctld-stop")
    step = run.step
    time.sleep(8)
    assert run.step > step, "ranks need no controller"
    testbed("ctld-start")
    training.ends_well(run, "slurmctld is gone for 8 s", least_attempts=1)


def test_accounting_is_down_for_two_minutes(training, testbed):
    run = training.start(time_limit=training.shortest_limit, attempts=6)
    run.until_step(5)
    testbed("dbd-stop")
    end = time.monotonic() + 120
    while time.monotonic() < end and not run.run.done:
        assert run.seen().state in ("running", "saving", "requeued", "queued", "done"), run.story()
        time.sleep(5)
    testbed("dbd-start")
    training.ends_well(run, "slurmdbd is gone for two minutes", least_attempts=1)


def test_three_time_limits_lose_nothing(training):
    """Enforced time limits, and steps for about three attempts."""
    steps = LONGEST if training.nemo else 300
    run = training.start(time_limit=training.shortest_limit, attempts=3, steps=steps, save_every=10_007, step_s=0.4)
    run.until_step(1)
    until(lambda: len(run.run.attempts) >= 3, 240 * run.patience, run.story)
    if training.nemo:
        run.end_at(run.step + 10)  # its ranks import NeMo before they read the recipe
    if not run.run.done:
        run.queue(5)  # as `recipes top-up` does
    training.ends_well(run, "the time limit, several times", least_attempts=3, most_lost=0)
    assert {attempt.result["state"] for attempt in run.run.attempts[:-1]} == {"requeued"}


def test_full_folder_that_is_freed(training, testbed, tmp_path):
    """The disk stays full during two more jobs, which wait and give up; once it is freed, the run completes."""
    disk = BASE / "small"
    shutil.rmtree(disk / "runs", ignore_errors=True)
    subprocess.run(["mount", "-o", f"remount,size={400 if training.nemo else 40}m", disk], check=True)
    run = training.start((str(tmp_path / "runs"), str(disk / "runs")), attempts=4)
    run.until_step(15)
    waiting = [job.id for job in run.seen().jobs or [] if job.state == "PENDING"]
    assert len(waiting) == 3, run.story()
    for job in waiting:  # so that a job gives up after half a minute
        subprocess.run(["scontrol", "update", f"JobId={job}", "TimeLimit=1"], check=True)
    fill(disk)
    until(lambda: run.run.attempts[0].result.get("state") not in (None, "running", "saving"), 120, run.story)
    assert "disk" in run.run.attempts[0].result.get("message", ""), run.story()
    for job in waiting[:2]:
        begin_now(job)
        until(lambda job=job: job_end.controller_state(job) == "RUNNING", 120, run.story)
        fill(disk)
        assert "waiting for disk space" in run.seen().message, run.story()
        until(lambda job=job: job_end.controller_state(job) == "COMPLETED", 120, run.story)
        assert len(run.run.attempts) == 1, "no attempt is opened before there is space"
    assert run.run.stop is None
    (disk / "filler").unlink()
    subprocess.run(["scontrol", "update", f"JobId={waiting[2]}", "TimeLimit=10"], check=True)
    begin_now(waiting[2])
    training.ends_well(run, "the disk of the run is full, and is freed")
    assert [attempt.result["state"] for attempt in run.run.attempts] == ["failed", "done"], run.story()
    shutil.rmtree(disk / "runs")


def fill(disk):
    """To the last byte."""
    for size in ("64k", "1"):
        words = ["dd", "if=/dev/zero", f"of={disk}/filler", f"bs={size}", "oflag=append", "conv=notrunc"]
        subprocess.run(words, capture_output=True)


def begin_now(job):
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)


def test_kill_during_a_save(training):
    run = training.start(steps=120, save_s=4)
    run.until_new_checkpoint()
    until(lambda: list(run.run.checkpoints.glob("*-unfinished")), 60, run.story)
    for pid in run.ranks():
        os.kill(pid, signal.SIGKILL)
    training.ends_well(run, "`kill -9` of all ranks while a checkpoint is written")


NAMED = {
    "`kill -9` of a rank",
    "a rank hangs",
    "a network cable is pulled",
    "the disk of the run is full, and is freed",
    "`scontrol requeue`",
    "a preemption with 30 s of grace",
    "the time limit, several times",
    "the newest checkpoint: half of it was written",
    "the newest checkpoint: it is deleted",
    "the newest checkpoint: a file of it cannot be read",
    "the newest checkpoint: one bit of it is flipped",
    "small files of the run are torn",
}
"""Those that are tried with real NeMo too."""


def test_table_of_the_documentation_is_complete():
    """The cases above and those of test_damage.py write them; --update-goldens writes those anew that are run."""
    shown = lines(DOCS.read_text())
    toy, nemo = ({fault for fault, training in shown if training == name} for name in ("toy", "NeMo"))
    assert len(toy) >= 28
    assert nemo == toy >= NAMED
