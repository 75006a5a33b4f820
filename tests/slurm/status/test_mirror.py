"""The copy of runs behind SSH for `recipes status`; the real shell commands, without SSH."""

import os
import subprocess
import sys
import tarfile
from io import BytesIO

import pytest

from superpod.runtime.heartbeat import node_board
from superpod.runtime.heartbeat.heartbeat import Heartbeat
from superpod.runtime.heartbeat.heartbeat_pages import RankLocation
from superpod.runtime.runs.run_folder import Attempt
from superpod.slurm.status import mirror
from superpod.slurm.submission import connection


@pytest.mark.parametrize("nodes", [2, 3000])
def test_heartbeats_of_many_nodes_are_copied(run, nodes, tmp_path, monkeypatch):
    """The file of 3,000 nodes is larger than anything else that is copied."""
    monkeypatch.setattr(node_board, "shared_memory_folders", lambda: [tmp_path])
    attempt = run.new_attempt()
    for rank in (0, 2 * nodes - 1):
        place = RankLocation(node=rank // 2, local_rank=rank % 2, local_size=2, size=2 * nodes)
        Heartbeat(attempt.path / "heartbeat", rank, every_s=0.0, place=place).beat(9, "train")
    runs = run.path.parents[1]
    copy = mirror.fetch(connection.Connection(), str(runs))
    copied = Attempt(copy.path / attempt.path.relative_to(runs))
    assert copied.heartbeats() == attempt.heartbeats()
    assert sorted(copied.heartbeats()) == [0, 2 * nodes - 1]


WRITER = """
import os, sys
handle = os.open(sys.argv[1], os.O_WRONLY)
while True:
    os.pwrite(handle, os.urandom(4096), 0)
"""

VANISHING = """#!/bin/sh
PATH="$REAL_PATH" find "$@" >"$GONE.names" && rm "$GONE" && cat "$GONE.names"
"""


@pytest.fixture
def heartbeats(run):
    """Heartbeats of a running attempt, 8 MiB, like those of 1,000 nodes with 16 ranks, continuously written."""
    nodes = run.new_attempt().path / "heartbeat" / "nodes"
    nodes.write_bytes(os.urandom(8 << 20))
    with subprocess.Popen([sys.executable, "-c", WRITER, str(nodes)]) as writer:
        yield nodes
        writer.kill()


def picked(folder, **env):
    """What the command makes of a folder: files, exit code, stderr."""
    words = ["sh", "-s", "--", str(folder)]
    done = subprocess.run(words, input=mirror.ARCHIVE_SCRIPT.encode(), capture_output=True, env={**os.environ, **env})
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        return set(archive.getnames()), done.returncode, done.stderr.decode()


@pytest.mark.slow
def test_growing_files_are_copied(run, heartbeats):
    """tar exits with 1, "file changed as we read it"."""
    runs, changed = run.path.parents[1], ""
    for _ in range(5):
        names, code, errors = picked(runs)
        changed += errors
        assert (code, f"./{heartbeats.relative_to(runs)}" in names) == (0, True), errors
    assert "file changed as we read it" in changed, "or nothing is shown here"
    copy = mirror.fetch(connection.Connection(), str(runs))
    assert (copy.path / run.path.relative_to(runs) / "run.json").is_file()


def test_disappearing_file_does_not_affect_others(run, tmp_path):
    """`find` on the PATH is the real one, and a file is removed when it has ended."""
    attempt, runs = run.new_attempt(), run.path.parents[1]
    finder = tmp_path / "bin" / "find"
    finder.parent.mkdir()
    finder.write_text(VANISHING)
    finder.chmod(0o755)
    gone = attempt.path / "result.json"
    path = os.environ["PATH"]
    names, code, errors = picked(runs, PATH=f"{finder.parent}:{path}", REAL_PATH=path, GONE=str(gone))
    assert (code, f"./{run.path.relative_to(runs)}/run.json" in names) == (0, True), errors
    assert "result.json" in errors, "or nothing is shown here"
    assert not gone.exists()


def test_failure_of_tar_is_reported(run, tmp_path):
    """tar's other ends stay failures."""
    broken = tmp_path / "bin" / "tar"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\ncat >/dev/null\nexit 2\n")
    broken.chmod(0o755)
    done = subprocess.run(
        ["sh", "-s", "--", str(run.path.parents[1])],
        input=mirror.ARCHIVE_SCRIPT.encode(),
        env={**os.environ, "PATH": f"{broken.parent}:{os.environ['PATH']}"},
    )
    assert done.returncode
