"""Metrics that are read as they grow, the ranks, the last lines and the curve of a run that somebody looks at."""

import json
import time

import pytest

from superpod.reports.runs import followed_run, live_run
from superpod.reports.runs.followed_run import FollowedRun, MetricsFile
from superpod.runtime.runs.run_folder import RunFolder
from tests.reports.growing_run import GrowingRun


@pytest.fixture
def growing(tmp_path):
    return GrowingRun(tmp_path / "runs")


def test_each_byte_is_read_once_and_the_lines_are_those_of_the_run(growing):
    growing.grow(50)
    followed = FollowedRun.follow(growing.run)
    assert followed.metrics() == growing.run.metrics()
    for _ in range(5):
        growing.grow(3)
        assert followed.metrics() == growing.run.metrics()
        assert followed.newest_metrics() == growing.run.newest_metrics()
        followed.metrics()
    assert followed.file.bytes_read == (growing.path / "metrics.jsonl").stat().st_size


def test_a_line_that_is_being_written_waits(growing):
    growing.grow(2)
    path = growing.path / "metrics.jsonl"
    whole = path.read_text()
    torn = whole + whole.splitlines()[-1].replace('"step": 2', '"step": 3')
    file = MetricsFile(path)
    path.write_text(torn)
    file.refresh()
    assert [line["step"] for line in file.lines] == [1, 2]
    path.write_text(torn + "\n")
    file.refresh()
    assert [line["step"] for line in file.lines] == [1, 2, 3]


def test_a_file_that_is_replaced_cut_or_gone_is_read_anew(growing):
    growing.grow(9)
    path = growing.path / "metrics.jsonl"
    file = MetricsFile(path)
    file.refresh()
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    assert file.refresh()
    assert [line["step"] for line in file.lines] == [1, 2, 3, 4]
    path.unlink()
    assert file.refresh()
    assert file.lines == []
    path.mkdir()
    assert not file.refresh()
    assert file.begun == 2


def test_of_a_long_file_the_beginning_and_the_end_are_read(growing, monkeypatch):
    monkeypatch.setattr(followed_run, "HEAD_BYTES", 4096)
    monkeypatch.setattr(followed_run, "TAIL_BYTES", 8192)
    growing.grow(500)
    file = MetricsFile(growing.path / "metrics.jsonl")
    file.refresh()
    steps = [line["step"] for line in file.lines]
    assert steps == sorted(set(steps))
    assert steps[0] == 1
    assert steps[-1] == 500
    assert 20 < len(steps) < 100
    growing.grow(5)
    file.refresh()
    assert [line["step"] for line in file.lines][-6:] == [*range(500, 506)]


def test_lines_are_thinned_and_curves_too(growing, monkeypatch):
    monkeypatch.setattr(followed_run, "MAX_LINES", 400)
    growing.grow(1000)
    file = MetricsFile(growing.path / "metrics.jsonl")
    file.refresh()
    steps = [line["step"] for line in file.lines]
    assert len(steps) <= 400
    assert steps == sorted(steps)
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert steps[-50:] == [*range(951, 1001)]
    points = followed_run.extract_curve(file.lines, "loss", max_points=20)
    assert len(points) <= 21
    assert points[-1] == (1000, file.lines[-1]["loss"])
    assert [x for x, _ in points] == sorted({x for x, _ in points})


def test_a_step_that_a_resumed_run_repeats_counts_as_written_last(tmp_path):
    lines = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}, {"step": 2, "loss": 3.0}, {"step": 3, "loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.refresh()
    assert followed_run.extract_curve(file.lines, "loss") == [(1, 5.0), (2, 3.0)]


def test_the_slowest_and_the_silent_ranks_are_named(growing):
    growing.grow(10)
    assert live_run.describe_ranks(growing.run) == []
    growing.beat(behind=[3], silent=[5, 6])
    words = live_run.describe_ranks(growing.run)
    assert words[0] == "8 ranks on 1 node: 8 train"
    assert words[1].startswith("slowest: rank 3 on node1, step 8, 2 steps behind, last progress ")
    assert words[2] == "no heartbeat for up to 5 min: ranks 5-6"
    growing.beat()
    assert len(live_run.describe_ranks(growing.run)) == 2
    growing.attempt.finish("failed", message="boom")
    assert live_run.describe_ranks(growing.run, time.time() + 3600) == ["8 ranks on 1 node: 8 train"]


def test_last_lines_are_those_of_the_newest_attempt(growing, monkeypatch):
    monkeypatch.setattr(live_run, "LOG_BYTES", 200)
    for i in range(100):
        growing.grow(1, f"words {i}")
    lines = live_run.LastLines(growing.run)
    assert lines.refresh()[-1] == "step 100 words 99"
    assert len(lines.refresh()) < 15
    growing.grow(1, "newer")
    assert lines.refresh()[-1] == "step 101 newer"
    second = growing.run.new_attempt()
    assert lines.refresh() == []
    (second.path / "logs" / "0.0.log").write_text("of the second\n")
    assert lines.refresh() == ["of the second"]


def test_a_run_without_attempts_has_no_lines(tmp_path):
    run = RunFolder.create(tmp_path, "a", facts={}, recipe_lines=[])
    assert live_run.LastLines(run).refresh() == []
    assert live_run.describe_ranks(run) == []
