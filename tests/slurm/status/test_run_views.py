"""States of runs from folder and queue; logs; pairs of nodes."""

import itertools
import json
import os
import shutil
import time

import pytest

from superpod.common.json_files import append_line
from superpod.reports.runs.logs import LogReader
from superpod.runtime.attempts import guard
from superpod.runtime.checkpoints import checkpoint_files, manifest
from superpod.runtime.health.bandwidth import rounds
from superpod.runtime.runs import run_state
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import QueuedJob
from superpod.slurm.slow_nodes import Pair, slow_nodes
from superpod.slurm.status.run_views import missing_attempts, summarize_run
from tests.reports.runs import checkpoint_files as made

RUNNING, PENDING = QueuedJob("1", "RUNNING", "None", "N/A"), QueuedJob("2", "PENDING", "Dependency", "N/A")


def begun(run, state="running", **more):
    attempt = run.new_attempt(job="1")
    if state == "running":
        attempt.mark("running", job="1", before=0)
        append_line(attempt.path / "heartbeat" / "0.jsonl", {"t": time.time(), "step": 3, "phase": "train"})
    else:
        attempt.finish(state, **more)
    return attempt


@pytest.mark.parametrize(
    ("last", "jobs", "state"),
    [
        (None, [PENDING], "queued"),
        (None, None, "queued"),
        (None, [], "failed"),
        ("running", [RUNNING, PENDING], "running"),
        ("running", None, "running"),
        ("running", [PENDING], "requeued"),
        ("running", [QueuedJob("1", "PENDING", "BeginTime", "N/A")], "requeued"),
        ("running", [], "failed"),
        ("requeued", [PENDING], "requeued"),
        ("requeued", [], "requeued"),
        ("failed", [PENDING], "requeued"),
        ("failed", [], "failed"),
        ("stalled", [PENDING], "requeued"),
    ],
)
def test_states(run, last, jobs, state):
    if last:
        begun(run, last)
    assert summarize_run(run, jobs).state == state


def test_only_the_marker_means_done(run):
    begun(run, "requeued")
    assert summarize_run(run, []).state != "done"
    (run.path / "done").write_text("{}")
    assert summarize_run(run, [RUNNING]).state == "done"


def test_stopping_party_is_not_parsed_from_the_reason(run):
    begun(run, "failed")
    guard.stop(
        run, "2 consecutive attempts wrote no new checkpoint; the last one: cancelled", by=run_state.StoppedBy.AUTOMATIC
    )
    seen = summarize_run(run, [])
    assert (seen.state, "2 consecutive attempts" in seen.message) == ("failed", True)
    guard.stop(run, "by hand", by=run_state.StoppedBy.USER)
    assert summarize_run(run, []).state == "cancelled"


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("cancelled by the user", "cancelled"),
        ("cancelled by the user (scancel)", "cancelled"),
        ("job 12 was cancelled by the user", "cancelled"),
        ("3 attempts failed, but only 2 are allowed; the last one: job 12 was cancelled by the user", "failed"),
    ],
)
def test_stop_marker_of_version_0_1(run, reason, state):
    begun(run, "failed")
    for marker in ({"reason": reason}, {"reason": reason, "by": None}, {"reason": reason, "by": "somebody"}):
        (run.path / run_state.STOP).write_text(json.dumps(marker))
        assert summarize_run(run, []).state == state


def test_silent_rank_means_stalled(run):
    attempt = begun(run)
    append_line(attempt.path / "heartbeat" / "0.jsonl", {"t": time.time() - 5000, "step": 3, "phase": "train"})
    seen = summarize_run(run, [RUNNING])
    assert seen.state == "stalled"
    assert "rank 0" in seen.message


@pytest.mark.parametrize("damage", ["truncated", "deleted", "half", "common.pt"])
def test_damaged_checkpoint_is_not_the_checkpoint_step(run, damage):
    """It went by names: 'step 20, 7 s ago', when the next attempt would go on from step 10."""
    begun(run)
    older, newer = made.write(run.checkpoints / "toy--step=9"), made.write(run.checkpoints / "toy--step=19")
    os.utime(older, (time.time() - 500, time.time() - 500))
    assert summarize_run(run, [RUNNING]).checkpoint_step == 20
    weight = newer / "weights" / "__0_0.distcp"
    if damage == "truncated":
        weight.write_bytes(weight.read_bytes()[:-8])
    else:
        {"deleted": weight, "half": newer / "weights" / "metadata.json", "common.pt": newer / "weights" / damage}[
            damage
        ].unlink()
    seen = summarize_run(run, [RUNNING])
    assert (seen.checkpoint_step, round(seen.checkpoint_age_s or 0, -1)) == (10, 500)


def test_checkpoint_age_of_a_copied_run(run, tmp_path):
    """`cp -r` sets the time of folders to that of the copy."""
    begun(run)
    made.write(run.checkpoints / "toy--step=9")
    for step, age_s in ((9, 540), (10, 500), (11, 460)):
        append_line(run.path / "metrics.jsonl", {"t": time.time() - age_s, "step": step, "loss": 1.0, "attempt": "001"})
    copy = RunFolder.open(shutil.copytree(run.path, tmp_path / "copy"))
    seen = summarize_run(copy, [RUNNING])
    assert (seen.checkpoint_step, round(seen.checkpoint_age_s or 0, -1)) == (10, 500)


def test_status_of_a_large_checkpoint_does_not_read_manifests(run, monkeypatch):
    checkpoint = made.write(run.checkpoints / "toy--step=9")
    (checkpoint / manifest.FOLDER).mkdir()
    for part in range(checkpoint_files.MAX_PARTS + 1):
        (checkpoint / manifest.FOLDER / f"{part}.json").touch()
    (checkpoint / "weights" / "__0_0.distcp").unlink()
    monkeypatch.setattr(manifest, "read", lambda checkpoint: pytest.fail("it reads the manifest"))
    assert summarize_run(run, []).checkpoint_step == 10


def test_missing_attempts(run):
    begun(run)
    assert missing_attempts(summarize_run(run, [RUNNING]), 3) == 2
    assert missing_attempts(summarize_run(run, [RUNNING, PENDING, PENDING]), 3) == 0
    guard.stop(run, "cancelled by the user", by=run_state.StoppedBy.USER)
    assert missing_attempts(summarize_run(run, []), 3) == 0


def test_log_lines_are_ordered_and_unique(run):
    first, second = run.new_attempt(), run.new_attempt()
    (first.path / "logs" / "0.0.log").write_text("one\ntwo\n")
    (first.path / "logs" / "1.1.log").write_text("other\n")
    (second.path / "logs" / "0.0.log").write_text("three\nhal")
    reader = LogReader(run)
    assert list(reader.read_new()) == [
        "[001 node 0 rank 0] one",
        "[001 node 0 rank 0] two",
        "[002 node 0 rank 0] three",
    ]
    (second.path / "logs" / "0.0.log").write_text("three\nhalf\n")
    assert list(reader.read_new()) == ["[002 node 0 rank 0] half"]
    assert list(reader.read_new()) == []
    of_node_1 = [line for line in LogReader(run, all_ranks=True).read_new() if "node 1" in line]
    assert of_node_1 == ["[001 node 1 rank 1] other"]
    assert list(LogReader(run, attempt="1", rank=1).read_new()) == ["[001 node 1 rank 1] other"]
    assert list(LogReader(run, attempt="1", tail=1).read_new()) == ["[001 node 0 rank 0] two"]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_rounds_cover_each_pair_once(size):
    schedule = list(rounds(size))
    assert sorted(itertools.chain(*schedule)) == list(itertools.combinations(range(size), 2))
    for pairs in schedule:
        nodes = list(itertools.chain(*pairs))
        assert len(nodes) == len(set(nodes))


def test_slow_nodes():
    names = ["a", "b", "c", "d"]
    pairs = [Pair(p, 1.0 if "c" in p else 10.0) for p in itertools.combinations(names, 2)]
    assert slow_nodes(pairs) == ["c"]
    assert slow_nodes([Pair(p.nodes, 10.0) for p in pairs]) == []
    assert slow_nodes([]) == []
