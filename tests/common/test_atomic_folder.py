"""Atomic writes of folders, and removal of the temporary folders of killed writers."""

import os
import signal
import subprocess
import sys

import pytest

from superpod.common import atomic_folder, locks
from tests.weights import tiny

WRITER = """
import sys, time
from pathlib import Path
from superpod.common.atomic_folder import create_atomically
with create_atomically(Path(sys.argv[1])) as folder:
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1000))
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path):
    """Start a process that is writing `tmp_path/out`."""
    command = [sys.executable, "-c", WRITER, tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        yield process
        process.kill()


def temporary_folders(folder):
    return sorted(path.name[:5] for path in folder.iterdir() if path.name.startswith("."))


def test_only_the_folder_of_a_killed_writer_is_removed(tmp_path, writer):
    out = tmp_path / "out"
    assert atomic_folder.remove_abandoned(out) == []
    assert temporary_folders(tmp_path) == [".out-"]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    (gone,) = atomic_folder.remove_abandoned(out)
    assert gone.name.startswith(".out-")
    assert [*tmp_path.iterdir()] == []


def test_a_terminated_writer_removes_its_folder(tmp_path, writer):
    writer.send_signal(signal.SIGINT)
    writer.wait()
    assert [*tmp_path.iterdir()] == []


def test_a_conversion_prints_the_removed_folder(tmp_path, writer, recipes_cli):
    writer.kill()
    writer.wait()
    words = (tiny.hollow(tmp_path / "m"), tmp_path / "out", "--cluster", "no such cluster")
    done = recipes_cli("ckpt", "convert", *words)
    assert done.returncode == 2
    assert f"removed {tmp_path / '.out-'}" in done.stderr
    assert "the incomplete output of a killed conversion" in done.stderr
    assert temporary_folders(tmp_path) == []


def test_folders_of_other_users_and_hosts_are_kept(tmp_path):
    (tmp_path / ".out-abcdefgh").mkdir()  # no writer's
    far = tmp_path / ".out-fareaway"
    far.mkdir()
    (far / atomic_folder.LOCK).write_text("another-machine")
    link = tmp_path / ".out-linkedto"
    link.symlink_to(far)
    if os.geteuid() == 0:
        other = tmp_path / ".out-notmine0"
        other.mkdir()
        (other / atomic_folder.LOCK).write_text(os.uname().nodename)
        os.chown(other, 65534, 65534)
    before = sorted(tmp_path.rglob("*"))
    assert atomic_folder.remove_abandoned(tmp_path / "out") == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_is_written_without_support_for_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with atomic_folder.create_atomically(tmp_path / "out") as folder:
        folder.mkdir()
        assert not list(tmp_path.rglob(atomic_folder.LOCK))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
