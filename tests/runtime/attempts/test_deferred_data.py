"""A run whose data another job was to make looks for them before its ranks start: the real attempt.py as a process."""

import pytest

from superpod.runtime.attempts import deferred_data, guard
from tests.runtime.attempts.test_attempt_resume import job

assert job  # a fixture


@pytest.fixture
def data(run, tmp_path):
    folder = tmp_path / "web"
    run.update({"data": str(folder), deferred_data.KEY: True}, [])
    return folder


def test_without_its_data_the_run_stops_and_says_so(run, job, data):
    done = job(7)
    words = f"the data folder {data} does not exist or has no dataset.json"
    assert done.returncode == 1
    assert words in done.stdout
    assert f"`recipes run {run.recipe} --resume {run.path}` resumes it" in done.stdout
    assert not (run.path / "seen").exists(), "no rank was started"
    assert words in run.attempts[0].result["message"]
    marker = run.stop
    assert marker is not None
    assert words in marker.reason
    assert "is stopped" in job(8).stdout


def test_once_the_folder_is_there_it_goes_on(run, job, data):
    job(7)
    data.mkdir()
    (data / "dataset.json").write_text("{}")
    guard.allow_resume(run)
    job(8)
    assert (run.path / "seen").exists()


def test_it_looks_twice(run, data):
    """A file system may show a folder that another node has made only after a moment."""

    def pause():
        data.mkdir()
        (data / "dataset.json").touch()

    deferred_data.require(run, pause)
    (data / "dataset.json").unlink()
    with pytest.raises(deferred_data.MissingDataError):
        deferred_data.require(run, lambda: None)
    run.update({deferred_data.KEY: False}, [])
    deferred_data.require(run, lambda: None)
