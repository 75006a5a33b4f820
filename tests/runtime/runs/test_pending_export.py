"""An export is pending until it is recorded; a folder that a killed export has written is replaced."""

import contextlib
import json

import pytest

from superpod.common.json_files import write_json
from superpod.runtime.runs import pending_export


@pytest.fixture
def fine_tuning(run):
    write_json(run.path / "run.json", {**run.facts, pending_export.EXPORTS_TO: "hf"})
    return run.path


def exported(run):
    """As an export does it: beside its place, then renamed there."""
    (run / ".hf-1").mkdir()
    (run / ".hf-1" / "config.json").write_text("{}")
    (run / ".hf-1").rename(run / "hf")


def test_a_folder_that_was_put_in_place_and_not_recorded_is_replaced(fine_tuning):
    with pending_export.record_running_export(fine_tuning, fine_tuning / "hf"):
        exported(fine_tuning)
    assert pending_export.folder_of(fine_tuning) == "hf", "killed here: nothing is recorded"
    assert pending_export.is_unrecorded(fine_tuning, fine_tuning / "hf")
    (fine_tuning / "hf" / "old").write_text("")
    with pending_export.record_running_export(fine_tuning, fine_tuning / "hf"):
        assert not (fine_tuning / "hf").exists()
        exported(fine_tuning)
    pending_export.record(fine_tuning, {})
    assert [path.name for path in (fine_tuning / "hf").iterdir()] == ["config.json"]
    assert pending_export.folder_of(fine_tuning) is None
    assert not pending_export.is_unrecorded(fine_tuning, fine_tuning / "hf"), "recorded, it is a folder as any other"


def test_a_folder_of_the_user_stays(fine_tuning, tmp_path):
    exported(fine_tuning)
    with pending_export.record_running_export(fine_tuning, fine_tuning / "hf"):
        assert (fine_tuning / "hf" / "config.json").exists(), "there before any export: refused by the export itself"
    assert not pending_export.is_unrecorded(fine_tuning, fine_tuning / "hf")
    with contextlib.suppress(OSError), pending_export.record_running_export(fine_tuning, fine_tuning / "other"):
        raise OSError("no room")
    (fine_tuning / "other").mkdir()
    assert not pending_export.is_unrecorded(fine_tuning, fine_tuning / "other"), "it came after an export that failed"
    (tmp_path / "mine").mkdir()
    (fine_tuning / "link").symlink_to(tmp_path / "mine")
    write_json(fine_tuning / pending_export.EXPORTING, {"folder": str(fine_tuning / "link")})
    (tmp_path / "mine" / "new").write_text("")
    assert not pending_export.is_unrecorded(fine_tuning, fine_tuning / "link")


def test_a_run_with_a_pending_export_is_not_done(run):
    pending_export.set_folder(run.path, "/out/hf")
    (run.path / "done").write_text(json.dumps({"step": 5}))
    status = run.status()
    assert status.state == "failed"
    assert status.message.startswith("trained to its last step, but /out/hf was not written; `recipes run ")
    with run.lock():
        assert run.status().state == "running"
    pending_export.record(run.path, {"folder": "/out/hf"})
    assert run.status().state == "done"
    assert pending_export.folder_of(run.path) is None
    pending_export.discard_record(run.path)
    assert run.status().state == "failed"
