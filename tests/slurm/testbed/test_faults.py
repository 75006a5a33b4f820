"""One fault a test: the last step is reached, at most one checkpoint interval is repeated, no process is left."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from superpod.node import guard
from tests.slurm.testbed.conftest import BASE, until
from tests.slurm.testbed.toys import ToyRun

pytestmark = pytest.mark.long

STEPS = 220


@pytest.fixture
def toy(testbed, profile):
    toy_run = ToyRun(testbed, profile(), attempts=4, max_steps=STEPS, step_s=0.2)
    toy_run.until_step(15)
    return toy_run


def ends_well(toy: ToyRun, least_attempts: int = 2) -> None:
    toy.until_done(400)
    toy.check_whole()
    assert len(toy.run.attempts) >= least_attempts, toy.story()
    assert toy.left_behind() == []


def rank_of(toy: ToyRun, node: int) -> int:
    """The process of one rank on a node."""
    for pid in toy.ranks():
        where = ["nsenter", "--target", str(pid), "--uts", "hostname"]
        if subprocess.run(where, capture_output=True, text=True).stdout.strip() == f"node{node}":
            return pid
    raise AssertionError(f"no rank on node {node}")


def test_kill_9_of_a_rank(toy, testbed):
    os.kill(rank_of(toy, 2), signal.SIGKILL)
    ends_well(toy)


def test_kill_9_of_slurmd(toy, testbed):
    """The daemon alone; its job goes on, or is requeued, and the daemon comes back."""
    testbed("slurmd-kill", "2")
    time.sleep(3)
    testbed("boot", "2")
    ends_well(toy, least_attempts=1)


def test_a_rank_that_hangs(testbed, profile):
    """Nobody's process has died, and Slurm sees nothing; the heartbeats do."""
    toy = ToyRun(testbed, profile(("stalled_s = 30", "stalled_s = 12")), attempts=4, max_steps=STEPS)
    toy.until_step(15)
    pid = rank_of(toy, 2)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: toy.seen().state == "stalled" or len(toy.run.attempts) > 1, 60, toy.story)
    until(lambda: len(toy.run.attempts) > 1, 90, toy.story)
    first = toy.run.attempts[0].result
    assert first["state"] == "stalled", toy.story()
    assert "on node2 no longer answers" in first["message"]
    ends_well(toy)


def test_a_node_that_hangs(toy, testbed):
    testbed("hang", "2")
    until(lambda: len(toy.run.attempts) > 1 or toy.seen().state == "requeued", 180, toy.story)
    testbed("unhang", "2")
    ends_well(toy)


def test_a_node_that_loses_power(toy, testbed):
    testbed("crash", "2")
    ends_well(toy)


def test_the_first_node_that_loses_power(toy, testbed):
    testbed("crash", "1")
    ends_well(toy)


def test_a_node_that_is_drained(toy, testbed):
    """Draining lets the job go on; it ends where it is."""
    testbed.slurm("scontrol", "update", "nodename=node2", "state=drain", "reason=test")
    ends_well(toy, least_attempts=1)


def test_a_network_that_is_cut(toy, testbed):
    testbed("cut", "2")
    until(lambda: len(toy.run.attempts) > 1, 180, toy.story)
    time.sleep(5)
    testbed("join", "2")
    ends_well(toy)


def test_a_preemption_with_grace(testbed, profile):
    toy = ToyRun(testbed, profile(('partition = "batch"', 'partition = "low"')), attempts=2, max_steps=STEPS, nodes=4)
    toy.until_step(15)
    high = testbed.slurm(
        "sbatch", "--parsable", "-p", "batch", "-N4", "--gpus-per-node=8", "-o", "/dev/null", "--wrap", "sleep 5"
    ).strip()
    until(lambda: testbed.state(high) != "PENDING", 90, toy.story)
    toy.until_done(300)
    toy.check_whole(most_lost=0)
    assert toy.run.attempts[0].result["state"] == "requeued", toy.story()
    assert len(toy.run.attempts) >= 2
    assert toy.left_behind() == []


def test_the_controller_is_restarted(toy, testbed):
    testbed("ctld-stop")
    step = toy.step
    time.sleep(8)
    assert toy.step > step, "ranks need no controller"
    testbed("ctld-start")
    ends_well(toy, least_attempts=1)


def test_accounting_is_gone_for_two_minutes(testbed, profile):
    toy = ToyRun(testbed, profile(), attempts=3, max_steps=STEPS, time_limit="1:00")
    toy.until_step(5)
    testbed("dbd-stop")
    end = time.monotonic() + 120
    while time.monotonic() < end and not toy.run.done:
        assert toy.seen().state in ("running", "saving", "requeued", "queued", "done"), toy.story()
        time.sleep(5)
    testbed("dbd-start")
    ends_well(toy, least_attempts=1)


def test_a_full_folder_that_is_freed(testbed, profile, tmp_path):
    """The disk is full until somebody makes room; then the run goes on by itself, or with attempts queued again."""
    disk = BASE / "small"
    shutil.rmtree(disk / "runs", ignore_errors=True)
    toy = ToyRun(testbed, profile((str(tmp_path / "runs"), str(disk / "runs"))), attempts=4, max_steps=STEPS)
    toy.until_step(15)
    subprocess.run(["dd", "if=/dev/zero", f"of={disk}/filler", "bs=64k"], capture_output=True)
    until(lambda: len(toy.run.attempts) > 1 or toy.run.attempts[0].result["state"] != "running", 120, toy.story)
    assert "disk" in toy.run.attempts[0].result.get("message", ""), toy.story()
    (disk / "filler").unlink()
    toy.until_gone_or_done()
    if not toy.run.done:  # every attempt met the full disk: the user makes room, and says go on
        guard.allow_resume(toy.run)
        toy.queue(3)
    ends_well(toy)
    shutil.rmtree(disk / "runs")


def test_a_kill_while_a_checkpoint_is_written(testbed, profile):
    toy = ToyRun(testbed, profile(), attempts=4, max_steps=120, save_s=4)
    toy.until_new_checkpoint()
    until(lambda: list(toy.run.checkpoints.glob("*-unfinished")), 60, toy.story)
    for pid in toy.ranks():
        os.kill(pid, signal.SIGKILL)
    ends_well(toy)
