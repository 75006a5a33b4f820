"""A file system that fails for a moment, or on one node, condemns no checkpoint."""

import errno
import os

import pytest

from superpod.errors import UserError
from superpod.reports.runs import checkpoint_list as kept
from superpod.runtime.checkpoints import checkpoint_files, checkpoint_metadata, manifest, resume
from superpod.runtime.checkpoints.checkpoint_files import Problem
from superpod.runtime.runs.run_folder import RunFolder
from tests.reports.runs import checkpoint_files as made
from tests.runtime.checkpoints.test_resume import DAMAGES, WEIGHTS, attempt_of, files_of, saved


class FailingReads:
    """Stands in for a function on files: EIO for those of one checkpoint, `times` often."""

    def __init__(self, real, step, times):
        self.real, self.step, self.left = real, step, times

    def __call__(self, given, *more, **named):
        file = given
        if isinstance(file, int):  # an open file
            file = os.readlink(f"/proc/self/fd/{file}")
        if self.left and f"step={self.step - 1}-" in str(file) and str(file).endswith("__1_0.distcp"):
            self.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return self.real(given, *more, **named)


WAYS = {
    "opening it": (os, "open"),
    "its sample": (manifest, "sample_of"),
    "its content by torch's table": (checkpoint_files, "is_part_intact"),
}


@pytest.fixture(params=WAYS)
def failing(request, run: RunFolder, monkeypatch):
    """The run's folders, and what makes the newest fail so many times."""
    folders = saved(run, with_manifest="torch" not in request.param)
    module, name = WAYS[request.param]
    real = getattr(module, name)
    return folders, lambda looks: monkeypatch.setattr(module, name, FailingReads(real, 30, looks))


def test_a_hiccup_costs_a_pause_and_no_step(failing, run: RunFolder):
    folders, fail = failing
    fail(1)
    pauses = []
    decided = resume.decide(run, pause=lambda: pauses.append(1))
    assert (decided.checkpoint, decided.damaged, len(pauses)) == (folders[2], (), 1)


def test_what_cannot_be_read_stays_where_it_is(failing, run: RunFolder):
    folders, fail = failing
    before = files_of(run)
    fail(2)
    decided = resume.decide(run)
    attempt = run.new_attempt()
    resume.apply_decision(run, attempt, decided)
    assert decided.checkpoint == folders[1]
    assert "cannot be read and is kept: weights/__1_0.distcp cannot be read: Input" in decided.message
    assert "10 steps are lost" in decided.message
    assert attempt.result["resume"]["set_aside"] == []
    assert folders[2].is_dir()
    assert files_of(run) == before
    assert attempt_of(run)[0].checkpoint == folders[2], "the next attempt can read it"


def test_with_nothing_else_left_the_run_fails_and_does_not_stop(failing, run: RunFolder):
    folders, fail = failing
    for folder in folders[:2]:
        DAMAGES["truncated"](folder)
    fail(2)
    with pytest.raises(UserError, match=r"cannot be resumed now: .*Input/output error") as failed:
        resume.decide(run)
    assert not isinstance(failed.value, resume.NoIntactCheckpointError)


def test_a_marked_one_that_cannot_be_read_is_not_removed(failing, run: RunFolder):
    folders, fail = failing
    mark = folders[2].with_name(f"{folders[2].name}-unfinished")
    mark.touch()
    fail(2)
    resume.apply_decision(run, run.new_attempt(), resume.decide(run))
    assert folders[2].is_dir()
    assert mark.is_file()


def test_prune_leaves_what_cannot_be_read(failing, run: RunFolder, monkeypatch):
    folders, fail = failing
    monkeypatch.setattr(
        manifest, "crc_of", lambda handle: manifest.sample_of(handle, os.fstat(handle).st_size)
    )  # it reads every byte, and these are all samples
    fail(2)
    assert [spare.path for spare in kept.choose_removable(kept.list_checkpoints(run.path), 1)] == [folders[0]]


def test_one_node_that_reads_wrongly_condemns_nothing(run: RunFolder):
    """The second look is the first node's own."""
    folders = saved(run)
    bad_node = checkpoint_files.Findings([Problem.of_file(WEIGHTS, "has changed since it was written")], False)
    assert resume.decide(run, lambda checkpoint: bad_node).checkpoint == folders[2]
    DAMAGES["one flipped bit of a weight"](folders[2])
    assert resume.decide(run, lambda checkpoint: bad_node).checkpoint == folders[1]


def test_the_second_look_reads_only_what_the_first_names(run: RunFolder, monkeypatch):
    [folder] = saved(run, (10,))
    seen, real = [], manifest.sample_of
    note = lambda handle, size: seen.append(os.readlink(f"/proc/self/fd/{handle}")) or real(handle, size)  # noqa: E731
    monkeypatch.setattr(manifest, "sample_of", note)
    found = checkpoint_files.check_samples(folder, files=[WEIGHTS])
    assert (found.problems, found.is_verified) == ([], True)
    assert seen == [str(folder / WEIGHTS)]


def test_an_archive_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    """The zipfile module calls a file whose end it cannot read "not a zip file"."""
    file = made.write(tmp_path / "step=9") / "weights" / "common.pt"
    assert checkpoint_metadata.is_intact(file)

    def fail(part, buffer):
        part.error = OSError(errno.EIO, "Input/output error")
        raise part.error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_metadata._Part, "readinto", fail)
        with pytest.raises(OSError, match="Input/output"):
            checkpoint_metadata.is_intact(file)
    os.truncate(file, 10)
    assert not checkpoint_metadata.is_intact(file)
