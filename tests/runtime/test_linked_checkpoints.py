"""A checkpoint that its user has moved elsewhere and linked is none that is not there."""

import shutil
from pathlib import Path

import pytest

from superpod.reports.runs import checkpoint_list as kept
from superpod.runtime.attempts import guard
from superpod.runtime.checkpoints import checkpoint_folder, resume
from superpod.runtime.runs.run_folder import RunFolder
from tests.reports.runs import checkpoint_files as made
from tests.runtime.checkpoints.test_resume import DAMAGES, attempt_of, saved


def moved(folder: Path, elsewhere: Path) -> Path:
    """As a user does whose disk is full."""
    elsewhere.mkdir(exist_ok=True)
    shutil.move(folder, elsewhere)
    folder.symlink_to(elsewhere / folder.name)
    return elsewhere / folder.name


def test_a_link_to_a_checkpoint_elsewhere_is_one(run: RunFolder, tmp_path):
    """The run began at step 1 without a word."""
    [folder] = saved(run, (10,))
    moved(folder, tmp_path / "big")
    assert guard.newest_step(run) == 10
    decided, _ = attempt_of(run)
    assert decided.checkpoint == folder
    assert [entry.path for entry in kept.list_checkpoints(run.path)] == [folder]


def test_a_new_run_goes_on_from_a_link(run: RunFolder, tmp_path):
    (run.checkpoints / "step=9").symlink_to(made.write(tmp_path / "seed" / "step=9"))
    assert resume.decide(run).step == 10


def test_links_between_neighbours_stay_what_they_were(run: RunFolder):
    folders = saved(run)
    assert checkpoint_folder.candidates(run.checkpoints) == folders[::-1]


def test_a_damaged_one_is_set_aside_as_a_link(run: RunFolder, tmp_path):
    folders = saved(run)
    target = moved(folders[2], tmp_path / "big")
    DAMAGES["one flipped bit of a weight"](target)
    assert attempt_of(run)[0].checkpoint == folders[1]
    assert (run.path / resume.DAMAGED / folders[2].name).resolve() == target


def test_a_link_to_nothing_elsewhere_is_a_missing_checkpoint(run: RunFolder, tmp_path):
    folders = saved(run)
    target = moved(folders[2], tmp_path / "big")
    away = target.rename(tmp_path / "not mounted")
    decided, result = attempt_of(run)
    assert decided.checkpoint == folders[1]
    assert f"it does not exist: it links to {target}" in result["resume"]["words"]
    assert result["resume"]["lost_steps"] == 10
    aside = run.path / resume.DAMAGED / folders[2].name
    assert aside.is_symlink(), "out of the way of the next save of this name, and not deleted"
    away.rename(target)
    aside.rename(folders[2])
    assert resume.decide(run).checkpoint == folders[2], "it is mounted once more"


def test_with_nothing_but_a_link_to_nothing_the_run_stops(run: RunFolder, tmp_path):
    link = run.checkpoints / "step=9"
    link.symlink_to(tmp_path / "not mounted" / "step=9")
    with pytest.raises(resume.NoIntactCheckpointError, match="it does not exist: it links to"):
        resume.decide(run)
    run.discard_unfinished()
    assert link.is_symlink()


def test_prune_removes_the_link_and_not_what_lies_elsewhere(run: RunFolder, tmp_path):
    folders = saved(run)
    target = moved(folders[0], tmp_path / "big")
    [spare] = kept.choose_removable(kept.list_checkpoints(run.path), 2)
    kept.remove_checkpoint(spare)
    assert not folders[0].is_symlink()
    assert target.is_dir()
