"""Run folders of version 0.1, which kept its attempts in `links/`."""

import pytest

from superpod.errors import UserError
from superpod.node.run_folder import RunFolder
from tests.conftest import NAME


def test_one_is_refused_with_the_command_that_renames_its_folder(run):
    run.new_attempt()
    (run.path / "attempts").rename(run.path / "links")
    for way_in in (RunFolder.open, lambda path: RunFolder.latest(path.parents[1], NAME)):
        with pytest.raises(UserError, match=r"written by version 0\.1") as refused:
            way_in(run.path)
        assert refused.value.hint == f"mv {run.path}/links {run.path}/attempts"
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
