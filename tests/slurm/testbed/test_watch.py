"""Status, logs, history, the drift alarm, and finding a slow link."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from superpod.runtime.health import node_checks
from tests.slurm.testbed.bed import until
from tests.slurm.testbed.toys import ToyRun


def test_status_logs_and_history_agree(testbed, profile, recipes_cli):
    where = profile()
    toy = ToyRun(testbed, where, attempts=2, max_steps=60, step_s=0.3)
    toy.until_step(10)
    seen = json.loads(recipes_cli("status", toy.run.path, "--json").stdout)[0]
    assert seen["state"] in ("running", "saving")
    assert 10 <= seen["step"] <= 60
    assert seen["max_steps"] == 60
    assert seen["eta_s"] > 0
    table = recipes_cli("status", "--cluster", where).stdout
    assert "running" in table or "saving" in table
    toy.until_done()
    assert "done" in recipes_cli("status", toy.run.path).stdout
    assert "60/60" in recipes_cli("status", toy.run.path).stdout
    history = recipes_cli("history", toy.run.path, env={"COLUMNS": "300"}).stdout
    assert "001" in history
    assert toy.run.attempts[0].result["job"] in history
    followed = recipes_cli("logs", "-f", "--all", toy.run.path)
    assert followed.returncode == 0


def test_top_up_queues_missing_attempts(testbed, profile, recipes_cli):
    toy = ToyRun(testbed, profile(), attempts=3, max_steps=10000, step_s=0.3)
    toy.until_step(2)
    for job in [j for j in (toy.seen().jobs or []) if j.state == "PENDING"]:
        testbed.slurm("scancel", job.id)
    until(lambda: len(toy.seen().jobs or []) == 1)
    assert recipes_cli("status", toy.run.path).returncode == 0
    assert len(toy.seen().jobs or []) == 1
    assert "queued 2 more" in recipes_cli("top-up", toy.run.path).stdout
    assert len(toy.seen().jobs or []) == 3


def test_history_lists_the_end_of_every_attempt(testbed, profile, recipes_cli):
    """A killed rank read "Force Terminated", a requeue "without saying why", a cancelled run "requeued"."""
    toy = ToyRun(testbed, profile(), attempts=2, max_steps=10_000, save_every=5)
    toy.until_step(7)
    os.kill(toy.ranks()[-1], signal.SIGKILL)
    until(lambda: len(toy.run.attempts) == 2, 120, toy.story)
    reached = toy.step
    until(lambda: toy.step > reached + 3, 120, toy.story)
    testbed.slurm("scontrol", "requeue", toy.job)
    until(lambda: len(toy.run.attempts) == 3, 120, toy.story)
    reached = toy.step
    until(lambda: toy.step > reached + 3, 120, toy.story)
    assert recipes_cli("cancel", toy.run.path).returncode == 0
    toy.until_gone(120)
    killed, requeued, cancelled = json.loads(recipes_cli("history", toy.run.path, "--json").stdout)
    assert killed["state"] == "failed", toy.story()
    assert re.match(r"rank [0-3] on node[12] was ended by signal 9 \(Killed", killed["message"]), killed
    assert requeued["state"] == "requeued", requeued
    assert "requeue" in requeued["message"]
    assert requeued["resumed_step"] >= 5
    assert cancelled["state"] == "cancelled", cancelled
    assert "cancelled by the user" in recipes_cli("history", toy.run.path).stdout


def test_logs_follow_all_nodes_and_attempts(testbed, profile):
    toy = ToyRun(testbed, profile(), attempts=3, max_steps=40, crash_at=0)
    command = [sys.executable, "-m", "superpod.cli", "logs", "-f", "--all", str(toy.run.path)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=180).stdout
    for attempt in ("001", "002"):
        for who in ("node 0 rank 0", "node 0 rank 1", "node 1 rank 2", "node 1 rank 3"):
            assert f"[{attempt} {who}] rank {who[-1]} begins at step 0" in output
    assert "ValueError: planted" in output


@pytest.mark.long
def test_slow_cable_raises_alarm_and_bisect_finds_the_node(testbed, profile, recipes_cli):
    where = profile()
    toy = ToyRun(testbed, where, attempts=1, nodes=4, gpus=1, max_steps=300, step_s=0.1, ballast=100_000)
    toy.until_step(25)
    assert toy.seen().alarm == ""
    testbed("slow", "3", "3mbit")
    until(lambda: toy.seen().alarm or toy.run.done, 120, toy.story)
    alarm = toy.seen().alarm
    assert "more than at the start" in alarm, toy.story()
    assert "a step takes" in recipes_cli("status", toy.run.path).stdout
    recipes_cli("cancel", toy.run.path)
    toy.until_gone(120)
    for node in "124":  # a bound of their own, so that a busy machine is not what is measured
        testbed("slow", node, "100mbit")
    bisect = recipes_cli("cluster", "bisect", where, "--nodes", "node[1-4]", "--mib", "1", timeout=180)
    assert bisect.returncode == 1, bisect.stderr + bisect.stdout
    assert bisect.stdout.strip().splitlines()[-1] == "slow: node3"
    testbed("slow", "3", "100mbit")
    bisect = recipes_cli("cluster", "bisect", where, "--nodes", "node[1-4]", "--mib", "1", timeout=180)
    assert bisect.returncode == 0, bisect.stdout


def test_health_of_the_testbed(testbed, profile, recipes_cli):
    where = profile(('checks = ["disk", "time", "bandwidth"]', 'checks = ["gpus", "nvlink", "disk", "time"]'))
    health = recipes_cli("cluster", "health", where)
    assert health.returncode == 0, health.stdout + health.stderr
    for node in ("node1", "node2", "node3", "node4"):
        assert f"{node:12} {'disk':12} ok" in health.stdout
        assert f"{node:12} {'time':12} ok" in health.stdout
        assert f"{node:12} {'gpus':12} skip" in health.stdout


def test_node_with_full_disk_is_reported(testbed, profile, recipes_cli):
    where = profile(
        ('checks = ["disk", "time", "bandwidth"]', 'checks = ["disk"]'), ("free_gib = 1", "free_gib = 9999999")
    )
    health = recipes_cli("cluster", "health", where, "--nodes", "node2")
    assert health.returncode == 1
    assert "bad: node2" in health.stdout
    assert "--exclude=node2" in health.stdout


@pytest.mark.parametrize("jobs", [3, 1])
def test_bad_node_is_excluded_from_the_next_attempt(jobs, testbed, profile, tmp_path):
    """Checks as the job's first step; the bad GPU is planted: a nvidia-smi of node1's own that reports one.

    With one job, which submits the next itself.
    """
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "nvidia-smi").write_text('#!/bin/sh\ncase $* in *ecc*) echo "3, 7, No";; esac\n')
    (fake / "nvidia-smi").chmod(0o755)
    checks = ('checks = ["disk", "time", "bandwidth"]', 'checks = ["gpus", "disk"]\nfirst_step = true')
    own = () if jobs > 1 else (("[health]", "self_submit = true\n\n[health]"),)
    testbed("inside", "1", "mount", "--bind", str(fake), "/usr/local/bin")
    try:
        toy = ToyRun(testbed, profile(checks, *own), attempts=jobs, max_steps=20)
        toy.until_done()
    finally:
        testbed("inside", "1", "umount", "/usr/local/bin")
    assert node_checks.excluded_nodes(toy.run) == ["node1"]
    assert [attempt.counts for attempt in toy.run.attempts] == [False, True]
    assert toy.run.attempts[1].result["nodes"] == ["node2", "node3"]
    output = "".join(out.read_text() for out in toy.run.path.glob("slurm-*.out"))
    assert "bad nodes, excluded from the next attempt: node1: gpus: GPU 3 has memory errors" in output


@pytest.mark.nemo
def test_the_all_reduce_of_health(testbed, profile, recipes_cli):
    where = profile(('checks = ["disk", "time", "bandwidth"]', 'checks = ["bandwidth"]'))
    health = recipes_cli("cluster", "health", where, "--nodes", "node[1-2]", timeout=300)
    assert "GB/s bus bandwidth over 2 nodes (gloo)" in health.stdout, health.stdout + health.stderr


def test_cluster_check_and_init(testbed, profile, recipes_cli, tmp_path):
    good = recipes_cli("cluster", "check", profile())
    assert good.returncode == 0, good.stdout
    assert "4 nodes in batch" in good.stdout
    bad = recipes_cli("cluster", "check", profile(('account = "acct"', 'account = "acme"')))
    assert bad.returncode == 2
    assert "'acme' is not one of your accounts" in bad.stdout
    made = tmp_path / "made.toml"
    done = recipes_cli("cluster", "init", "--to", made, "--runs", tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'account = "acct"' in made.read_text()
    assert 'interface = "eth0"' in made.read_text()  # the one that the nodes have, not the shipped bond0
    assert 'cache = ""' in made.read_text()
    before = recipes_cli("cluster", "check", made, "--no-node")
    assert "container.image /lustre/images/superpod-nemo-2.7.3.sqsh is missing" in before.stdout  # the site's to make
    image = tmp_path / "nemo.sqsh"
    image.write_text("")
    made.write_text(made.read_text().replace("/lustre/images/superpod-nemo-2.7.3.sqsh", str(image)))
    assert recipes_cli("cluster", "check", made, "--no-node").returncode == 0
    on_node = recipes_cli("cluster", "check", made)  # the testbed's GPUs are declared and not there
    assert on_node.returncode == 2
    assert "gpus_per_node is 8, but a job on node" in on_node.stdout


def test_run_has_a_state_if_slurm_does_not_answer(testbed, profile, recipes_cli):
    toy = ToyRun(testbed, profile(), attempts=1, max_steps=40)
    toy.until_step(3)
    testbed("ctld-stop")
    try:
        status = recipes_cli("status", toy.run.path, timeout=180)
        assert status.returncode == 0, status.stderr
        assert any(word in status.stdout for word in ("running", "saving", "done"))
    finally:
        testbed("ctld-start")
    time.sleep(1)
    toy.until_done()
