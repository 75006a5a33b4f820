"""The code of a job on its way to the nodes; whole jobs are in tests/slurm/test_payload.py."""

import os
import stat

import pytest

from superpod.runtime.attempts import job_code


@pytest.fixture
def unpacked(tmp_path):
    """What a batch script has unpacked."""
    folder = tmp_path / "unpacked"
    (folder / "superpod" / "runtime" / "processes").mkdir(parents=True)
    (folder / "superpod" / "runtime" / "processes" / "stray_processes.py").write_text("new")
    (folder / "recipe.py").write_text("new")
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder, and this process's environment put back afterwards."""
    for name in ("PYTHONPATH", job_code.FOLDER):
        monkeypatch.setenv(name, "")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_each_attempt_has_a_new_folder_and_the_earlier_ones_go(unpacked, run):
    (run / "code.earlier").mkdir()
    (run / "code").mkdir()  # of an earlier version
    folder = job_code.move_to_run(unpacked, run)
    assert sorted(path.name for path in run.iterdir()) == ["code", folder.name]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "recipe.py").read_text() == "new"
    assert not unpacked.exists()
    assert job_code.path_for_nodes("runtime/processes/stray_processes.py") == str(
        folder / "superpod/runtime/processes/stray_processes.py"
    )
    assert job_code.insert_folder(["python", "{code}/recipe.py"], folder) == ["python", f"{folder}/recipe.py"]


def test_the_path_of_an_earlier_job_and_the_current_folder_are_not_inherited(unpacked, run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{run}/code.earlier::/mine")
    folder = job_code.move_to_run(unpacked, run)
    assert os.environ["PYTHONPATH"] == f"{folder}:/mine"


def test_a_copy_that_fails_leaves_nothing_and_the_earlier_one(unpacked, run, monkeypatch):
    (run / "code.earlier").mkdir()

    def full(*_words, **_more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job_code.shutil, "copytree", full)
    with pytest.raises(OSError, match="No space left"):
        job_code.move_to_run(unpacked, run)
    assert [path.name for path in run.iterdir()] == ["code.earlier"]
