"""A full disk (issue 14, finding 6): a real file system of 4 MiB where there is root, and a clock that is none."""

import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.node import attempt as launcher
from superpod.node import full_disk, guard
from superpod.node.run_folder import RunFolder


class FakeClock(full_disk.Clock):
    """Time that passes only by sleeping; `then` happens at a moment."""

    def __init__(self, at=0.0, then=lambda: None):
        self.time, self.at, self.then, self.pauses = 0.0, at, then, []
        super().__init__(now=lambda: self.time, sleep=self._sleep)

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)

    def _sleep(self, seconds):
        self.pauses.append(seconds)
        self.time += seconds
        if self.time >= self.at:
            self.then()


@pytest.fixture
def small(tmp_path):
    """A run on a disk of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk]).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield RunFolder.create(disk, "x", facts={"max_steps": 5}, recipe_lines=[])
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(run):
    filler = run.path.parents[1] / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], capture_output=True)
    return filler


def test_finding_6_it_waits_with_growing_pauses_until_there_is_room(small):
    assert full_disk.missing(small) == ""
    filler, heard = fill(small), []
    clock = FakeClock(100, filler.unlink)
    assert full_disk.wait_for_room(small, heard.append, 900, clock) == ""
    assert clock.pauses == [10, 20, 40, 80]
    assert heard[0].endswith(f"are free under {small.path}, and a checkpoint takes 81.9 KiB: looks again in 10 s")


def test_finding_6_it_does_not_hold_its_gpus_for_ever(small):
    fill(small)
    clock = FakeClock(1e9)
    assert "are free under" in full_disk.wait_for_room(small, lambda words: None, 900, clock)
    assert sum(clock.pauses) == 900
    assert max(clock.pauses) == full_disk.LONGEST_PAUSE_S


def test_room_for_one_more_checkpoint_is_what_counts(small):
    small.update({"checkpoint_bytes": 64 << 20}, [])
    assert "and a checkpoint takes 64.0 MiB" in full_disk.missing(small)


def test_a_used_up_quota_is_seen_by_writing(run, monkeypatch):
    def refuse(handle):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", refuse)
    assert full_disk.missing(run) == f"your quota is used up under {run.path}"
    assert not list(run.path.glob(".probe*"))


def test_finding_6_the_jobs_behind_are_put_off_for_longer_each_time(run, tmp_path, monkeypatch):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:/usr/bin:/bin")
    attempt = run.new_attempt(job="1")
    attempt.mark("failed", ended=1000.0)
    assert [full_disk.put_off(run, ["7"], 1000.0 + ago) for ago in (5, 3600, 1e6)] == [600, 3600, 21600]
    assert full_disk.put_off(run, [], 2000.0) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[1] == "update JobId=7 StartTime=now+3600"
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert full_disk.put_off(run, ["7"], 2000.0) == 0


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Slurm's commands as scripts that take everything, with no job in the queue; returns what was called."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name, answer in {"sbatch": "8", "squeue": "", "scontrol": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{calls}\necho {answer}\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_NAME", "recipes-x")
    return calls


@pytest.mark.parametrize("self_submit", [True, False])
def test_a_run_whose_nodes_submit_the_next_job_waits_with_it_for_room(run, commands, monkeypatch, self_submit):
    """Review of issue 14: it has no job in the queue to be put off, and was stopped after 15 minutes."""
    monkeypatch.setattr(full_disk, "missing", lambda run: "full")
    monkeypatch.setattr(full_disk, "wait_for_room", lambda run, log, held: "full")
    job: Any = SimpleNamespace(deadline=lambda: 0.0)
    words = launcher._wait_for_room(run, job, self_submit)
    submitted = [line for line in commands.read_text().splitlines() if line.startswith("sbatch")]
    if self_submit:
        assert words == "full: the next job looks again in 10 min"
        assert len(submitted) == 1
        assert " --dependency=singleton " in submitted[0]
        assert submitted[0].endswith(f" --begin=now+600 {run.path}/job.sbatch")
        assert guard.stopped(run) is None
    else:
        assert (words[:35], submitted) == ("full, and no job is left to wait: m", [])
        assert guard.stopped(run) is not None
