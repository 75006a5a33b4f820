"""A full disk, on real file systems of a few MiB: jobs wait for space, write nothing meanwhile, and then complete."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from superpod.common.json_files import read_json, write_json
from superpod.runtime.attempts import attempt as launcher
from superpod.runtime.attempts import full_disk, guard
from superpod.runtime.runs import run_state
from superpod.runtime.runs.run_folder import RunFolder
from tests.reports.runs import checkpoint_files as made


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
def mount(tmp_path):
    """Mounts a tmpfs with options; unmounted at the end."""
    mounted = []

    def at(name: str, options: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder]).returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(folder)
        return folder

    yield at
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def small(mount):
    """A run on a disk of 4 MiB."""
    return RunFolder.create(mount("disk", "size=4m"), "x", facts={"max_steps": 5}, recipe_lines=[])


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], capture_output=True)
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=1", "oflag=append", "conv=notrunc"], capture_output=True)
    return filler


def disk_of(run: RunFolder) -> Path:
    return run.path.parents[1]


def test_it_waits_with_growing_pauses_until_there_is_space(small):
    assert full_disk.space_problem(small) == ""
    filler, heard = fill(disk_of(small)), []
    clock = FakeClock(100, filler.unlink)
    assert full_disk.wait_for_space(small, heard.append, clock=clock) is None
    assert clock.pauses == [10, 20, 40, 80]
    assert heard[0].endswith(f"are free under {small.path}, but a checkpoint needs 81.9 KiB: checking again in 10 s")


def test_it_does_not_hold_its_gpus_for_ever(small, commands):
    fill(disk_of(small))
    clock = FakeClock(1e9)
    given_up = full_disk.wait_for_space(small, lambda words: None, clock=clock)
    assert given_up is not None
    assert "are free under" in given_up.message
    assert sum(clock.pauses) == full_disk.HELD_S
    assert max(clock.pauses) == full_disk.MAX_PAUSE_S


def test_space_for_one_more_checkpoint_is_what_counts(small):
    small.update({"checkpoint_bytes": 64 << 20}, [])
    assert "but a checkpoint needs 64.0 MiB" in full_disk.space_problem(small)


def test_a_used_up_quota_is_seen_by_writing(run, monkeypatch):
    def refuse(handle):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", refuse)
    assert full_disk.space_problem(run) == f"your disk quota is exceeded under {run.path}"


def test_without_inodes_it_waits(mount):
    run = RunFolder.create(mount("disk", "size=4m,nr_inodes=100"), "x", facts={}, recipe_lines=[])
    assert full_disk.space_problem(run) == ""
    with contextlib.suppress(OSError):
        for number in range(100):
            (run.path / f"{number}").touch()
    assert "0 more files can be created under" in full_disk.space_problem(run)
    assert full_disk.missing_space(run) == full_disk.space_problem(run), "without writing, too"


def test_on_a_read_only_file_system_it_waits(small):
    subprocess.run(["mount", "-o", "remount,ro", disk_of(small)], check=True)
    clock = FakeClock(30, lambda: subprocess.run(["mount", "-o", "remount,rw", disk_of(small)], check=True))
    heard: list[str] = []
    assert full_disk.space_problem(small) == f"{small.path} is on a read-only file system"
    assert full_disk.wait_for_space(small, heard.append, clock=clock) is None
    assert len(heard) == 2


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME", "TMPDIR"])
def test_a_full_cache_or_scratch_folder_counts(run, mount, variable):
    disk = mount("other", "size=128k")
    (disk / ".cache").mkdir()
    environ = {"TMPDIR": str(run.path), variable: str(disk)}
    assert full_disk.space_problem(run, environ) == ""
    fill(disk)
    folder = disk / ".cache" if variable == "HOME" else disk
    assert full_disk.space_problem(run, environ) == f"the disk is full under {folder}"
    assert full_disk.space_problem(run, {"HOME": "/nowhere", "TMPDIR": "relative"}) == "", (
        "what is not there is not needed"
    )


def test_a_run_folder_that_is_gone_is_not_waited_for(run):
    with pytest.raises(FileNotFoundError):
        full_disk.space_problem(RunFolder(run.path / "gone"))


def test_the_jobs_behind_are_deferred_for_longer_each_time(run, commands):
    commands.queue("7")
    attempt = run.new_attempt(job="1")
    attempt.mark("failed", ended=1000.0)
    deferred = [full_disk._defer(run, "full", 1000.0 + ago, False).next_job_s for ago in (5, 3600, 1e6)]
    assert deferred == [600, 3600, 21600]
    assert commands.calls("scontrol")[1] == "update JobId=7 StartTime=now+3600"
    run.new_attempt(job="2").mark("requeued", ended=2000.0, counts=False)  # by an earlier version: it waited
    assert full_disk._defer(run, "full", 4600.0, False).next_job_s == 3600, "since the last attempt that had space"
    commands.write("scontrol", "exit 1")
    assert full_disk._defer(run, "full", 2000.0, False).next_job_s == 0


class Commands:
    """Slurm's commands as scripts that take everything; what was called is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        self._calls = folder / "calls"
        self.write("sbatch", "echo 8")
        self.write("scontrol", "exit 0")
        self.write("sacct", "exit 0")
        self.queue("")

    def write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.write_text(f'#!/bin/sh\necho {name} "$@" >>{self._calls}\n{text}\n')
        file.chmod(0o755)

    def queue(self, job: str) -> None:
        """A job of the run waits."""
        self.write("squeue", f"echo {job}")

    def calls(self, name: str) -> list[str]:
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{name} ")]


@pytest.fixture
def commands(tmp_path, monkeypatch) -> Commands:
    made = Commands(tmp_path)
    monkeypatch.setenv("PATH", f"{made.folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_NAME", "recipes-x")
    return made


@pytest.mark.parametrize("self_submit", [True, False])
def test_a_run_whose_nodes_submit_the_next_job_waits_with_it_for_space(run, commands, monkeypatch, self_submit):
    """It has no job in the queue to be deferred, and was stopped after 15 minutes."""
    monkeypatch.setattr(full_disk, "space_problem", lambda run: "full")
    monkeypatch.setattr(full_disk, "HELD_S", 0.0)
    job: Any = SimpleNamespace(deadline=lambda: 0.0)
    given_up = launcher._wait_for_space(run, job, self_submit)
    assert given_up is not None
    submitted = commands.calls("sbatch")
    if self_submit:
        assert given_up.message == "full: the next job checks again in 10 min"
        assert len(submitted) == 1
        assert " --dependency=singleton " in submitted[0]
        assert submitted[0].endswith(f" --begin=now+600 {run.path}/job.sbatch")
    else:
        expected = f"full; no further job is queued: free up space, then run `recipes top-up {run.path}`"
        assert (given_up.message, submitted) == (expected, [])
    assert run.stop is None


# -- jobs one after another, by the real attempt.py ------------------------------------------------------------------

TORN = {"whole": None, "empty": b"", "torn": b'{"attempt": "001", "sta', "zeros": bytes(300), "a list": b"[1]\n"}


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below a folder: inode, time of its last change, content."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "filler"]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


class Jobs:
    """Starts the jobs of a run, whose time limit lets them wait for two seconds; the log of each is on another disk."""

    def __init__(self, run: RunFolder, commands: Commands) -> None:
        self.run, self.commands, self.number = run, commands, 0

    def start(self, ranks: str, log: int | IO[bytes] = subprocess.PIPE) -> subprocess.CompletedProcess:
        self.number += 1
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 5))
        answer = f'[ "$2" = hostnames ] && echo node1; [ "$2" = job ] && echo EndTime={at}; exit 0'
        self.commands.write("scontrol", answer)
        words = ["--recipe", self.run.recipe, "--runs", str(disk_of(self.run)), "--second-look-s", "0"]
        words += ["--idle-attempts", "2", "--failures", "1", "--", "sh", "-c", ranks]
        environ = {"PATH": os.environ["PATH"], "SUPERPOD_RUN_DIR": str(self.run.path), "SLURM_JOB_NAME": "x"}
        environ |= {"SLURM_JOB_ID": str(self.number), "SLURM_JOB_NODELIST": "node1"}
        command = [sys.executable, launcher.__file__, *words]
        return subprocess.run(command, env=environ, stdout=log, stderr=subprocess.PIPE, text=True, timeout=60)


@pytest.mark.parametrize(
    "damage", [damage if damage == "torn" else pytest.param(damage, marks=pytest.mark.slow) for damage in TORN]
)
def test_a_disk_that_stays_full_over_two_jobs_costs_no_attempt(damage, small, commands):
    """Four attempts failed in six seconds, result.json was torn, and `top-up` refused."""
    jobs, disk = Jobs(small, commands), disk_of(small)
    commands.queue("9")
    first = jobs.start(f"dd if=/dev/zero of={disk}/filler bs=4k; exit 3")
    assert first.returncode == 1, first.stdout
    fill(disk)
    result = small.attempts[0].path / "result.json"
    assert (read_json(result) or {}).get("state") == "failed", "written although the disk is full"
    if (content := TORN[damage]) is not None:
        result.write_bytes(b"")
        result.write_bytes(content)
    before = snapshot(disk)
    for _ in range(2):
        waited = jobs.start("exit 9")
        assert waited.returncode == 0, waited.stdout + waited.stderr
        assert "the next job checks again in" in waited.stdout
        assert waited.stderr == ""
        assert snapshot(disk) == before, "nothing is written before there is space"
    assert len(small.attempts) == 1
    (disk / "filler").unlink()
    last = jobs.start('echo \'{"step": 5}\' >"$SUPERPOD_RUN_DIR/done"')
    assert last.returncode == 0, last.stdout + last.stderr
    assert small.done
    assert [attempt.result["state"] for attempt in small.attempts] == ["failed", "done"]


def test_a_log_on_the_full_disk_ends_no_job(small, commands):
    """slurm-JOB.out lies in the run folder, too."""
    jobs, log = Jobs(small, commands), small.path / "slurm-1.out"
    commands.queue("9")
    log.touch()
    fill(disk_of(small))
    with log.open("ab") as output:
        waited = jobs.start("exit 9", output)
    assert (waited.returncode, waited.stderr) == (0, "")
    assert log.read_bytes() == b""


def test_an_incomplete_checkpoint_is_removed_to_make_space(small, commands):
    half = made.write(small.checkpoints / "step=19-consumed_samples=160.0")
    (half / "weights" / "metadata.json").unlink()
    half.with_name(f"{half.name}-unfinished").touch()
    (half / "weights" / "__9_0.distcp").write_bytes(bytes(1 << 20))
    fill(disk_of(small))
    assert full_disk.wait_for_space(small, lambda words: pytest.fail(words)) is None
    assert not half.exists()


def test_a_document_is_never_written_in_part(small):
    """In place of the old one within its blocks, or not at all."""
    file, new = small.path / "result.json", small.path / "stop"
    write_json(file, {"state": "running", "nodes": ["node1"] * 50})
    fill(disk_of(small))
    write_json(file, {"state": "failed"}, even_in_place=True)
    assert read_json(file) == {"state": "failed"}
    with pytest.raises(OSError, match="No space left"):
        write_json(file, {"state": "x" * 8000}, even_in_place=True)
    assert read_json(file) == {"state": "failed"}
    with pytest.raises(OSError, match="No space left"):
        write_json(new, {"reason": "x"}, even_in_place=True)
    assert not new.exists()
    guard.stop(small, "cancelled by the user", by=run_state.StoppedBy.USER)
    assert small.stop is not None, "the empty marker stops the run too"
