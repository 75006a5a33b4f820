"""The export step of a fine-tuning job: when the run is done, and how an interrupted export is repeated."""

from types import SimpleNamespace

import pytest

from superpod.errors import UserError
from superpod.launch import convert, model_job, subprocess_call
from superpod.launch.finetuning import export_artifacts, finetune
from superpod.reports.runs import checkpoint_list
from superpod.runtime.runs import pending_export
from superpod.weights.transfer import conversion


@pytest.fixture
def trained(run, monkeypatch):
    run.update(model_job.model_step_facts(run.path / "base"), [])
    exported = {"checkpoint": "step=9", "val_loss": 2.0, "notes": []}
    monkeypatch.setattr(finetune, "export", lambda run, target: exported)
    return run


def test_export_is_pending_until_all_artifacts_exist(trained, monkeypatch):
    """Ended between the folder and its adapter, a job had left a run that was done, and the next one left it so."""
    owed = []
    finish = lambda *_a, **_k: owed.append(pending_export.folder_of(trained.path))  # noqa: E731 - what it returns is None
    monkeypatch.setattr(export_artifacts, "write_artifacts", finish)
    model_job.export(trained)
    assert owed == ["hf"]
    assert pending_export.folder_of(trained.path) is None


def test_interrupted_export_is_repeated(trained, monkeypatch):
    """A launcher or a job that is killed between the folder and its record had left a run that could not end."""
    checkpoint = SimpleNamespace(name="step=9", val_loss=2.0)
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint_list, "list_checkpoints", lambda path: [checkpoint])
    monkeypatch.setattr(checkpoint_list, "choose_best", lambda known: checkpoint)
    monkeypatch.setattr(finetune.Task, "from_run", lambda run: finetune.Task("m", ("d",)))
    trained.new_attempt()
    target = trained.path / "hf"

    def convert_as_it_does(source, out, **_):
        conversion.require_new_output(out)
        return SimpleNamespace(function="", arguments={})

    def write(*_a, **_k):
        target.mkdir()
        return {"notes": []}

    monkeypatch.setattr(convert, "plan_conversion", convert_as_it_does)
    monkeypatch.setattr(subprocess_call, "call", write)
    for _ in range(2):  # the first one is killed before it is recorded
        assert finetune.export(trained, target)["checkpoint"] == "step=9"
    pending_export.record(trained.path, {})
    with pytest.raises(UserError, match="already exists"):
        finetune.export(trained, target)


def test_failed_evaluation_is_not_repeated(trained, monkeypatch):
    def finish(*_a, **_k):
        raise OSError("no room")

    monkeypatch.setattr(export_artifacts, "write_artifacts", finish)
    with pytest.raises(OSError, match="no room"):
        model_job.export(trained)
    assert pending_export.folder_of(trained.path) is None
    other = SimpleNamespace(agrees=False, mismatch_message=lambda target: "another model")
    monkeypatch.setattr(export_artifacts, "write_artifacts", lambda *_a, **_k: other)
    with pytest.raises(UserError, match="another model"):
        model_job.export(trained)
