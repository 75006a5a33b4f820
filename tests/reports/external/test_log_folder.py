"""Listing of log folders: large ones, cyclic links, and concurrent changes."""

import os
import shutil

import pytest

from superpod.errors import UserError
from superpod.reports import why
from superpod.reports.external import external_runs, log_folder
from superpod.reports.runs import run_list
from tests.reports.report_cases import MEGATRON


@pytest.fixture
def folder(tmp_path):
    """Create a folder with a log and cyclic links."""
    (tmp_path / "logs" / "a").mkdir(parents=True)
    shutil.copy(MEGATRON, tmp_path / "logs" / "a" / "one.log")
    (tmp_path / "logs" / "loop").symlink_to("loop")
    (tmp_path / "logs" / "a" / "up").symlink_to("..")
    (tmp_path / "logs" / "gone").symlink_to("nowhere")
    return tmp_path / "logs"


def test_cyclic_links_are_not_followed(folder):
    assert [path.name for path in log_folder.iterate_files(folder)] == ["one.log"]
    assert len(external_runs.read_run(folder).steps) == 20
    assert why.diagnose_logs([folder]).verdict.words
    assert run_list.resolve_run(str(folder)) == str(folder)
    assert run_list.list_runs(folder.parent) == []


def test_a_link_to_a_log_is_read(folder, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "it.log").symlink_to(folder / "a" / "one.log")
    assert len(external_runs.read_run(tmp_path / "one").steps) == 20


@pytest.mark.parametrize(
    "reads", [external_runs.read_run, lambda path: why.diagnose_logs([path])], ids=["report", "why"]
)
def test_a_too_large_folder_is_refused(reads, folder, monkeypatch):
    for i in range(20):
        (folder / f"{i}.py").touch()
    monkeypatch.setattr(log_folder, "MAX_VISITED", 10)
    with pytest.raises(UserError, match="contains more than 10 files") as refused:
        reads(folder)
    assert "specify the folder with the logs of one run" in refused.value.hint


def test_files_are_sorted_and_folders_skipped_by_name(tmp_path):
    for name in ("b/2", "b/1", "a", "c", "checkpoints/x", "b/checkpoints/y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    names = [str(path.relative_to(tmp_path)) for path in log_folder.iterate_files(tmp_path, ["checkpoints"])]
    assert names == ["a", "b/1", "b/2", "c"]


@pytest.mark.parametrize(
    "reads", [external_runs.read_run, lambda path: why.diagnose_logs([path])], ids=["report", "why"]
)
def test_a_file_that_vanishes_before_reading_is_skipped(reads, folder, monkeypatch):
    (folder / "a" / "two.log").write_text("gone soon\n")
    (folder / "b").mkdir()
    walked = log_folder.iterate_files

    def below(path, skipped=()):
        files = [*walked(path, skipped)]
        os.unlink(folder / "a" / "two.log")
        shutil.rmtree(folder / "b")
        return iter(files)

    monkeypatch.setattr(log_folder, "iterate_files", below)
    assert reads(folder)


def test_a_folder_that_vanishes_meanwhile_is_skipped(folder):
    (folder / "z").mkdir()
    (folder / "z" / "x").touch()
    walking = log_folder.iterate_files(folder)
    next(walking)
    shutil.rmtree(folder / "z")
    assert [*walking] == []


def test_a_folder_of_runs_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="not a folder of runs"):
        run_list.list_runs(tmp_path / "runs")
