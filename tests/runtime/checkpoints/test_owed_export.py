"""A run owes its folder until it is recorded; what an ended export has put in place is its own, and replaced."""

import contextlib

import pytest

from superpod.common.files import write_json
from superpod.runtime.checkpoints import owed_export


@pytest.fixture
def owing(run):
    write_json(run.path / "run.json", {**run.facts, owed_export.EXPORTS_TO: "hf"})
    return run.path


def exported(run):
    """As an export does it: beside its place, then renamed there."""
    (run / ".hf-1").mkdir()
    (run / ".hf-1" / "config.json").write_text("{}")
    (run / ".hf-1").rename(run / "hf")


def test_a_folder_that_was_put_in_place_and_not_recorded_is_replaced(owing):
    with owed_export.begun(owing, owing / "hf"):
        exported(owing)
    assert owed_export.left(owing) == "hf", "killed here: nothing is recorded"
    assert owed_export.is_left_behind(owing, owing / "hf")
    (owing / "hf" / "old").write_text("")
    with owed_export.begun(owing, owing / "hf"):
        assert not (owing / "hf").exists()
        exported(owing)
    owed_export.note(owing, {})
    assert [path.name for path in (owing / "hf").iterdir()] == ["config.json"]
    assert owed_export.left(owing) == ""
    assert not owed_export.is_left_behind(owing, owing / "hf"), "recorded, it is a folder as any other"


def test_a_folder_of_the_user_stays(owing, tmp_path):
    exported(owing)
    with owed_export.begun(owing, owing / "hf"):
        assert (owing / "hf" / "config.json").exists(), "there before any export: refused by the export itself"
    assert not owed_export.is_left_behind(owing, owing / "hf")
    with contextlib.suppress(OSError), owed_export.begun(owing, owing / "other"):
        raise OSError("no room")
    (owing / "other").mkdir()
    assert not owed_export.is_left_behind(owing, owing / "other"), "it came after an export that failed"
    (tmp_path / "mine").mkdir()
    (owing / "link").symlink_to(tmp_path / "mine")
    write_json(owing / owed_export.BEGUN, {"folder": str(owing / "link")})
    (tmp_path / "mine" / "new").write_text("")
    assert not owed_export.is_left_behind(owing, owing / "link")
