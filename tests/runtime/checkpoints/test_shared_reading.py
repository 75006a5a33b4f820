"""Several nodes read one checkpoint: with a stand-in for srun that starts the tasks here."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from superpod.runtime.checkpoints import checkpoint_files, manifest, shared_reading
from tests.reports.runs import checkpoint_files as made
from tests.runtime.checkpoints.test_resume import DAMAGES, write_manifest

FAKE_SRUN = """#!/bin/bash
# Stands in for srun: --ntasks tasks, one after another, with their numbers before their lines.
echo "$@" > "$0.called"
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && export SLURM_NTASKS=${1#*=}; shift; done
for ((SLURM_PROCID = 0; SLURM_PROCID < SLURM_NTASKS - ${SILENT:-0}; SLURM_PROCID++)); do
    [[ $SLURM_PROCID == "$STUCK" ]] && exec sleep 60
    SLURM_PROCID=$SLURM_PROCID "$@" | sed "s/^/$SLURM_PROCID: /"
done
"""


HERE = "the first node checks the sizes and samples of these files"


@pytest.fixture
def fake_srun(tmp_path, monkeypatch) -> Path:
    file = tmp_path / "bin" / "srun"
    file.parent.mkdir()
    file.write_text(FAKE_SRUN)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(file.parent), prepend=":")
    return file.with_name("srun.called")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = made.write(tmp_path / "step=9", files=5)
    (folder / "weights" / ".nfs0001").touch()  # as long as a reader has open what was removed
    write_manifest(folder)
    return folder


@pytest.mark.parametrize("silent", ["0", "1", "3"])
def test_every_share_is_read_even_if_a_node_does_not_answer(silent, fake_srun, checkpoint, monkeypatch):
    monkeypatch.setenv("SILENT", silent)
    reader = shared_reading.SharedReader(["node1", "node2", "node3"], checkpoint.parent, share_from=1)
    assert reader(checkpoint).problems == []
    for name in ("one flipped bit of a weight", "one flipped bit of common.pt"):
        DAMAGES[name](checkpoint)
    problems = reader(checkpoint).problems
    assert sorted(str(problem.file) for problem in problems) == ["weights/__1_0.distcp", "weights/common.pt"]
    assert reader.steps == 2
    assert "--ntasks=3 --ntasks-per-node=1" in fake_srun.read_text()


@pytest.mark.parametrize(("nodes", "share_from"), [(["node1"], 1), (["node1", "node2"], 1 << 30)])
def test_a_small_one_or_one_node_needs_no_step(nodes, share_from, fake_srun, checkpoint):
    reader = shared_reading.SharedReader(nodes, checkpoint.parent, share_from)
    DAMAGES["truncated"](checkpoint)
    assert len(reader(checkpoint).problems) == 1
    assert reader.steps == 0
    assert not fake_srun.exists()


def test_without_srun_one_node_reads_all(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    DAMAGES["truncated"](checkpoint)
    assert (
        len(shared_reading.SharedReader(["node1", "node2"], checkpoint.parent, share_from=1)(checkpoint).problems) == 1
    )


@pytest.mark.parametrize("stuck", [0, 2])
@pytest.mark.slow
def test_a_node_that_is_stuck_does_not_hold_the_others_for_ever(stuck, fake_srun, checkpoint, monkeypatch):
    """What the others have read is taken, the first node reads the rest, and both are logged."""
    monkeypatch.setenv("STUCK", str(stuck))
    heard: list[str] = []
    reader = shared_reading.SharedReader(["node1", "node2", "node3"], checkpoint.parent, 1, log=heard.append, start_s=8)
    DAMAGES["one flipped bit of a weight"](checkpoint)
    began = time.monotonic()
    assert [problem.file for problem in reader(checkpoint).problems] == ["weights/__1_0.distcp"]
    assert time.monotonic() - began < 30
    names = "node3" if stuck else "node1, node2, node3"
    assert heard == [f"{names} did not read their share of step=9 within 8.1 s; {HERE} instead"]


@pytest.mark.parametrize("fully", [False, True])
@pytest.mark.slow
def test_a_slow_file_system_fails_no_attempt(fully, fake_srun, checkpoint, monkeypatch):
    """Nodes that had not read their share in time failed the attempt, and two of these ended the run."""
    monkeypatch.setenv("STUCK", "0")
    heard: list[str] = []
    nodes = ["node1", "node2"]
    monkeypatch.setattr(shared_reading, "SHARE_FROM_BYTES", 1)
    reader = shared_reading.SharedReader(nodes, checkpoint.parent, 1, fully=fully, left_s=lambda: 2.0, log=heard.append)
    assert reader(checkpoint).problems == []
    assert heard == [f"node1, node2 did not read their share of step=9 within 1 s; {HERE} instead"]
    DAMAGES["truncated"](checkpoint)
    assert len(reader(checkpoint).problems) == 1, "sizes are always checked"


@pytest.mark.parametrize("fully", [False, True])
def test_every_byte_is_read_where_that_is_asked_for(fully, fake_srun, checkpoint, monkeypatch):
    """A flipped bit that keeps size and time, as bad memory makes it, is in no sample."""
    shard = checkpoint / "weights" / "__9_0.distcp"
    shard.write_bytes(bytes(1 << 20))
    manifest.write_part(checkpoint, "9", [shard])
    facts = shard.stat()
    data = bytearray(1 << 20)
    data[100] = 1
    shard.write_bytes(data)
    os.utime(shard, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    monkeypatch.setattr(shared_reading, "SHARE_FROM_BYTES", 1)
    reader = shared_reading.SharedReader(["node1", "node2"], checkpoint.parent, 1, fully=fully)
    found = reader(checkpoint).problems
    assert [problem.file for problem in found] == (["weights/__9_0.distcp"] if fully else [])
    assert fake_srun.exists()


def test_an_srun_that_fails_has_made_no_step(checkpoint, fake_srun):
    fake_srun.with_name("srun").write_text("#!/bin/sh\nexit 1\n")
    reader = shared_reading.SharedReader(["node1", "node2"], checkpoint.parent, share_from=1)
    assert reader(checkpoint).problems == []
    assert reader.steps == 0


def test_a_file_of_nfs_is_none_of_the_checkpoint(checkpoint):
    (checkpoint / "weights" / ".nfs0001").unlink()
    assert checkpoint_files.check_sizes(checkpoint).problems == []
    assert "weights/.metadata" in manifest.read(checkpoint).records


SPY = """
import os, sys
def note(event, args):
    if event == "open" and str(args[0]).startswith(spied):
        with os.fdopen(real(os.environ["SPY_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a") as log:
            log.write(f"{os.environ['SLURM_PROCID']} {args[0]}\\n")
real, spied = os.open, tuple(os.environ["SPIED"].split(":"))
sys.addaudithook(note)
"""
"""A `sitecustomize` of the tasks alone: every file that they open under a folder, with the number of the task."""


@pytest.mark.parametrize("nodes", [2, 12])
def test_s4_no_node_but_the_first_opens_the_manifest_and_each_file_is_opened_once(
    nodes, fake_srun, checkpoint, monkeypatch, tmp_path
):
    """At 2,048 nodes every node opened every part of the manifest, one of each node: 4.2 million opens at a resume."""
    shutil.rmtree(checkpoint / manifest.FOLDER)
    files = [f for f in sorted(checkpoint.rglob("*")) if f.is_file() and not f.name.startswith(".nfs")]
    for number, file in enumerate(files):
        manifest.write_part(checkpoint, str(number), [file], parts=len(files) if number == 0 else 0)
    log = tmp_path / "opened"
    (tmp_path / "spy").mkdir()
    (tmp_path / "spy" / "sitecustomize.py").write_text(SPY)
    srun = fake_srun.with_name("srun")
    srun.write_text(srun.read_text().replace('"$@" |', f'PYTHONPATH={tmp_path / "spy"} "$@" |'))
    monkeypatch.setenv("SPY_LOG", str(log))
    monkeypatch.setenv("SPIED", f"{checkpoint}:{checkpoint.parent / 'attempt'}")

    names = [f"node{number}" for number in range(nodes)]
    shared = checkpoint.parent / "attempt"
    shared.mkdir()
    reader = shared_reading.SharedReader(names, shared, share_from=1)
    assert reader(checkpoint).problems == []
    assert reader.steps == 1
    opened = [line.split(" ", 1) for line in log.read_text().splitlines()]
    of_tasks = [Path(path) for _, path in opened if Path(path) != shared / shared_reading.SHARES]
    assert sorted(of_tasks) == sorted(files)
    assert len(opened) == len(files) + nodes
    assert list(shared.iterdir()) == []


def test_a_share_is_read_as_it_was_written_whatever_the_names(tmp_path):
    odd = checkpoint_files.Content("weights/a \u00e4.distcp", 1 << 40, 7, 8, 9)
    shares = [[odd], [], [checkpoint_files.Content("b", 5, parts=[(0, 5), (5, 1 << 41)])]]
    shared_reading.write_shares(tmp_path / "shares", shares)
    read = [shared_reading.read_share(tmp_path / "shares", number) for number in range(3)]
    assert json.loads(json.dumps(read)) == json.loads(json.dumps(shares))
