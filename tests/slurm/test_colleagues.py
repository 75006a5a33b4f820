"""Runs of other users, on this machine and behind SSH: hidden jobs and hostile files."""

import json
import os
import time
from pathlib import Path

import pytest

from superpod.common.json_files import append_line, write_json
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.profiles import profiles
from superpod.slurm.status import mirror, run_views
from superpod.slurm.submission import connection, submit
from tests.slurm.fake_slurm import FakeSlurm
from tests.slurm.slurm_runs import submitted, with_attempt

COLLEAGUE = 12345
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")


@pytest.fixture
def behind_ssh(tmp_path, slurm):
    """A profile whose login uses a fake ssh, which runs commands on this machine."""
    ssh = slurm.bin / "ssh"
    ssh.write_text('#!/bin/sh\nfor words; do :; done\nexec sh -c "$words"\n')
    ssh.chmod(0o755)
    file = tmp_path / "there.toml"
    file.write_text((profiles.DEFAULT_PROFILES / "testbed.toml").read_text() + '\n[login]\nhost = "login"\n')
    return file


def colleagues_run(runs: Path, slurm: FakeSlurm, state: str = "RUNNING") -> RunFolder:
    run = submitted(runs)
    with_attempt(run, slurm.add(submit.job_name(str(run.path)), state, user=COLLEAGUE))
    os.chown(run.path, COLLEAGUE, COLLEAGUE)
    return run


@needs_root
def test_run_with_hidden_jobs_is_not_failed(tmp_path, slurm):
    """With PrivateData=jobs squeue shows nothing of it and ends with 0."""
    run, waits, mine = colleagues_run(tmp_path, slurm), submitted(tmp_path), submitted(tmp_path)
    os.chown(waits.path, COLLEAGUE, COLLEAGUE)
    slurm.hide("jobs,usage")
    seen, queued, own = run_views.summarize_runs([run, waits, mine], connection.Connection())
    assert (seen.state, seen.jobs, seen.jobs_unknown) == ("running", None, run_views.JobsUnknown.HIDDEN)
    assert "PrivateData=jobs" in seen.message
    assert (queued.state, queued.jobs) == ("queued", None)
    assert (own.state, own.jobs) == ("failed", []), "of one's own runs Slurm hides nothing"
    assert len(slurm.calls("scontrol")) == 1
    attempt = run.attempts[0]
    append_line(attempt.path / "heartbeat" / "0.jsonl", {"t": time.time() - 5000, "step": 3, "phase": "train"})
    assert run_views.summarize_runs([run], connection.Connection())[0].state == "stalled", (
        "silent, whatever its jobs do"
    )


@needs_root
@pytest.mark.parametrize(("kinds", "user"), [("none", 1001), ("accounts,usage", 1001), ("jobs", 0)])
def test_run_without_jobs_has_failed_if_none_are_hidden(tmp_path, slurm, kinds, user):
    run = submitted(tmp_path)
    with_attempt(run, "7")
    os.chown(run.path, COLLEAGUE, COLLEAGUE)
    slurm.hide(kinds, user)
    seen = run_views.summarize_runs([run], connection.Connection())[0]
    assert (seen.state, seen.jobs) == ("failed", [])


def test_private_data_is_not_queried_for_own_runs(tmp_path, slurm):
    run = submitted(tmp_path)
    slurm.hide("jobs")
    assert run_views.summarize_runs([run], connection.Connection())[0].jobs == []
    assert slurm.calls("scontrol") == []


@needs_root
def test_jobs_are_hidden_behind_ssh_too(tmp_path, slurm, behind_ssh, recipes_cli):
    run = colleagues_run(tmp_path / "runs", slurm)
    slurm.hide("jobs")
    done = recipes_cli("status", "--cluster", behind_ssh, "--runs", tmp_path / "runs", "--all", "--json")
    (row,) = json.loads(done.stdout)
    assert (row["run"], row["state"], row["jobs"]) == (str(run.path), "running", None)


def test_hints_name_the_run_on_the_cluster(tmp_path, slurm, behind_ssh, recipes_cli):
    runs = tmp_path / "my runs"
    run, torn = submitted(runs), submitted(runs)
    with_attempt(run, "7", "requeued")
    write_json(torn.path / "run.json", {**torn.facts, "max_steps": "many"})
    done = recipes_cli("status", "--cluster", behind_ssh, "--runs", runs, "--json")
    rows = {row["run"]: row for row in json.loads(done.stdout)}
    assert f"recipes top-up '{run.path}'" in rows[str(run.path)]["message"]
    assert str(torn.path) in rows[str(torn.path)]["message"]
    assert "recipes-mirror" not in done.stdout + done.stderr
    assert "recipes-mirror" not in recipes_cli("status", "--cluster", behind_ssh, "--runs", runs).stdout


def test_paths_of_the_copy_are_replaced(tmp_path):
    copy = mirror.Mirror(tmp_path, "/data/runs")
    text = f"{tmp_path}/tiny/1/run.json: torn; recipes top-up {tmp_path}/tiny/1 --attempts N; see {tmp_path}/tiny/2"
    there = "/data/runs/tiny/1/run.json: torn; recipes top-up /data/runs/tiny/1 --attempts N; see /data/runs/tiny/2"
    assert copy.with_remote_paths(tmp_path / "tiny" / "1", text) == there


def test_escape_sequences_of_a_run_are_not_printed(tmp_path, slurm, recipes_cli):
    made = submitted(tmp_path / "runs")
    run = RunFolder(made.path.rename(made.path.with_name(f"{made.path.name}{ESCAPE}")))
    write_json(run.path / "run.json", {**run.facts, "recipe": ESCAPE})
    attempt = with_attempt(run, "7", "failed")
    odd = {"state": "failed", "message": f"[/]{ESCAPE}it broke", "nodes": [ESCAPE], "job": ESCAPE}
    write_json(attempt.path / "result.json", {**attempt.result, **odd})
    outputs = [recipes_cli("status", "--runs", tmp_path / "runs"), recipes_cli("history", run.path)]
    write_json(run.path / "run.json", {**run.facts, "max_steps": ESCAPE})
    write_json(attempt.path / "result.json", {**attempt.result, **odd, "state": f"{ESCAPE}failed"})
    outputs += [recipes_cli("status", "--runs", tmp_path / "runs"), recipes_cli("status", run.path)]
    assert [done.returncode for done in outputs] == [0, 0, 0, 2], outputs
    for done in outputs:
        assert not {"\x1b", "\x07"} & {*done.stdout, *done.stderr}, done
    assert "it broke" in outputs[0].stdout
    assert "it broke" in outputs[1].stdout


@pytest.mark.parametrize("name", ["run.json", "stop", "metrics.jsonl", "plan.json", "slurm-1.out"])
def test_pipe_in_a_run_folder_does_not_block(tmp_path, slurm, recipes_cli, name):
    run, good = submitted(tmp_path / "runs"), submitted(tmp_path / "runs")
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    done = recipes_cli("status", "--runs", tmp_path / "runs", "--json", timeout=60)
    rows = {Path(row["run"]).name: row for row in json.loads(done.stdout)}
    assert rows.keys() == {run.path.name, good.path.name}
    assert (rows[run.path.name]["state"] == "unreadable") == (name == "run.json")
