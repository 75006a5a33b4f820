"""Run folders of version 0.1, which kept its attempts in `links/`."""

import json

import pytest

from superpod.errors import UserError
from superpod.runtime.attempts import guard
from superpod.runtime.heartbeat import stall
from superpod.runtime.runs.run_folder import RunFolder
from tests.conftest import NAME


def test_one_is_refused_with_the_command_that_renames_its_folder(run):
    run.new_attempt()
    (run.path / "attempts").rename(run.path / "links")
    for way_in in (RunFolder.open, lambda path: RunFolder.latest(path.parents[1], NAME)):
        with pytest.raises(UserError, match=r"written by version 0\.1") as refused:
            way_in(run.path)
        assert refused.value.hint == f"run `mv {run.path}/links {run.path}/attempts`"
    (run.path / "job.sbatch").touch()
    with pytest.raises(UserError) as refused:
        RunFolder.open(run.path)
    assert refused.value.hint == "start a new run"
    (run.path / "links").rename(run.path / "attempts")
    assert [attempt.name for attempt in RunFolder.open(run.path).attempts] == ["001"]


def test_status_shows_one_as_a_row_that_says_why(run, recipes_cli):
    (run.path / "attempts").rename(run.path / "links")
    done = recipes_cli("status", "--runs", run.path.parents[1])
    assert done.returncode == 0
    assert "written by version 0.1" in " ".join(done.stdout.split())
    assert "unreadable" in done.stdout


def test_heartbeats_and_logs_of_a_file_a_rank_are_read(run, recipes_cli):
    """As every rank wrote them in version 0.1: nothing of such a run looks different."""
    attempt = run.new_attempt()
    for rank in range(3):
        line = {"t": 100.0, "moved": 90.0, "step": 7 + rank, "phase": "train", "host": f"n{rank}", "save_s": 50.0}
        (attempt.path / "heartbeat" / f"{rank}.jsonl").write_text(json.dumps(line) + "\n" + '{"t": 1')
        (attempt.path / "logs" / f"0.{rank}.log").write_text(f"words of {rank}\n")
    assert {rank: beat["step"] for rank, beat in attempt.heartbeats().items()} == {0: 7, 1: 8, 2: 9}
    assert attempt.heartbeat(2)["host"] == "n2"
    assert guard.save_seconds(run, 10) == 100
    assert stall.silent_rank(attempt.heartbeats(), [], 30, 130.5, 130.5) == (
        "rank 0 on n0 no longer answers since step 7 (train), 30 s ago, before the others"
    )
    assert "words of 2" in recipes_cli("logs", run.path, "--rank", 2).stdout
