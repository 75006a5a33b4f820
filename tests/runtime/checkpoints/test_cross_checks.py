"""A checkpoint of which no manifest tells that its files belong to one save (issue 25, A5)."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from superpod.reports.runs import attempts, checkpoint_list
from superpod.runtime.checkpoints import cross_checks, manifest, resume
from superpod.runtime.checkpoints.saved_checkpoints import own_files
from superpod.runtime.runs.run_folder import RunFolder
from tests.reports.runs import checkpoint_files as made
from tests.runtime.checkpoints.test_resume import attempt_of

SHARD = "weights/__1_0.distcp"


def save(run: RunFolder, step: int, *, with_manifest: bool) -> Path:
    """A checkpoint whose shards are of its own, as two nodes leave it."""
    folder = made.write(run.checkpoints / f"step={step - 1}-consumed_samples={step * 8}.0", step=step)
    if with_manifest:
        for rank in (0, 1):
            manifest.write_part(folder, str(rank), own_files(folder, rank, 1), parts=2 * (rank == 0))
    time.sleep(0.02)  # times of files come in ticks of a few milliseconds
    return folder


def copied(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def copied_with_its_time(source: Path, target: Path) -> None:
    shutil.copy2(source, target)


def moved(source: Path, target: Path) -> None:
    os.replace(source, target)


@pytest.mark.parametrize("place", [copied, copied_with_its_time, moved])
@pytest.mark.parametrize("has_manifest", ["the older", "both", "none", "the newer"])
def test_a_shard_of_another_step_is_not_trained_on(has_manifest: str, place: Callable, run: RunFolder):
    """A shard of step 50, placed in step 52, was."""
    save(run, 48, with_manifest=True)
    older = save(run, 50, with_manifest=has_manifest in ("the older", "both"))
    newer = save(run, 52, with_manifest=has_manifest in ("the newer", "both"))
    assert resume.decide(run).checkpoint == newer
    place(older / SHARD, newer / SHARD)
    decided, _ = attempt_of(run)
    assert decided.step == (48 if place is moved else 50)
    [set_aside] = [damaged for damaged in decided.damaged if damaged.path == newer]
    assert SHARD.removeprefix("weights/") in set_aside.why
    assert (run.path / resume.DAMAGED / newer.name / SHARD).is_file(), "nothing is deleted"


def test_a_shard_of_a_step_that_is_gone_is_a_doubt_and_the_verified_one_is_preferred(run):
    """Nothing is left to compare it with but its time."""
    gone = save(run, 48, with_manifest=False)
    verified = save(run, 50, with_manifest=True)
    newer = save(run, 52, with_manifest=False)
    copied_with_its_time(gone / SHARD, newer / SHARD)
    shutil.rmtree(gone)
    decided, _ = attempt_of(run)
    assert decided.checkpoint == verified
    assert "__1_0.distcp (1 of 2 files) was not written between common.pt and metadata.json" in decided.message


def test_a_doubt_alone_is_taken_and_said(run):
    """A copy of the only checkpoint has the times of the copying."""
    folder = save(run, 50, with_manifest=False)
    for number, file in enumerate(sorted((folder / "weights").iterdir(), reverse=True)):
        os.utime(file, (1000 + number, 1000 + number))
    decided, result = attempt_of(run)
    assert decided.checkpoint == folder
    assert "(step=49-consumed_samples=400.0, unverified: __0_0.distcp, __1_0.distcp (2 of 2 files)" in decided.message
    assert result["resume"]["verified"] is False
    assert attempts.list_resume_notes(run.attempts[-1]) == [decided.message], "history and status say so"


def test_the_common_state_of_another_step_is_not_trained_on(run):
    older, newer = save(run, 50, with_manifest=False), save(run, 52, with_manifest=False)
    copied(older / "weights" / "common.pt", newer / "weights" / "common.pt")
    decided, _ = attempt_of(run)
    assert decided.checkpoint == older
    assert "common.pt contains step 50, but the folder is named after step 52" in decided.message


def test_an_unverified_one_of_one_save_costs_no_step(run):
    save(run, 50, with_manifest=True)
    newer = save(run, 52, with_manifest=False)
    decided, _ = attempt_of(run)
    assert decided.checkpoint == newer
    assert decided.message.endswith("(step=51-consumed_samples=416.0, unverified: it has no complete manifest)")
    assert [checkpoint.state for checkpoint in checkpoint_list.list_checkpoints(run.path)] == ["verified", "unverified"]


def test_a_copy_of_a_checkpoint_under_another_name_is_no_mixture(run):
    """Its common.pt tells, where Lightning has written it."""
    older = made.write(run.checkpoints / "step=49")
    shutil.copytree(older, run.checkpoints / "step=51")
    assert cross_checks.cross_check(run.checkpoints / "step=51", [older]).problems == []


@pytest.mark.parametrize("gone", ["0.json", "1.json"])
def test_a_manifest_without_a_part_verifies_nothing(gone, run):
    """Its node was killed before it wrote the part."""
    folder = save(run, 50, with_manifest=True)
    (folder / manifest.FOLDER / gone).unlink()
    assert resume.decide(run).is_verified is False
    assert manifest.read(folder).is_complete is False


def test_samples_alone_verify_nothing_but_find_another_save_s_shard(run):
    """What a job leaves that was killed right after a save."""
    older, newer = (save(run, step, with_manifest=False) for step in (50, 52))
    for folder in (older, newer):
        for rank in (0, 1):
            files = own_files(folder, rank, 1)
            manifest.write_part(folder, str(rank), files, fully=False, parts=2 * (rank == 0))
    decided = resume.decide(run)
    assert (decided.checkpoint, decided.is_verified) == (newer, False)
    copied(older / SHARD, newer / SHARD)
    decided = resume.decide(run)
    assert decided.checkpoint == older
    assert f"{SHARD} has changed since it was written: a sample of its bytes differs" in decided.message
