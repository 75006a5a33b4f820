"""The thread that reads completed checkpoints back, beside what else happens to them."""

import errno
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.runtime.checkpoints import manifest, saved_checkpoints
from superpod.runtime.checkpoints.saved_checkpoints import SavedCheckpoints
from tests.reports.runs import checkpoint_files


@pytest.fixture
def trainer() -> Any:
    """As much of Lightning's as is used, with NeMo's removal: a bare rmtree of the folder."""
    strategy = SimpleNamespace(remove_checkpoint=lambda path: shutil.rmtree(str(path).removesuffix(".ckpt")))
    return SimpleNamespace(save_checkpoint=lambda path: None, strategy=strategy)


@pytest.fixture
def reading(run, monkeypatch):
    """Holds the run's thread in the middle of its first file: `begun` is set then, and it goes on once `go` is."""
    gates = SimpleNamespace(begun=threading.Event(), go=threading.Event(), files=[])
    real = manifest.record

    def slow(file, *, fully=True):
        if run.path not in file.parents or not fully:  # the thread of an earlier test's run; the samples
            return real(file, fully=fully)
        gates.files.append(file)
        gates.begun.set()
        gates.go.wait(20)
        return real(file)

    monkeypatch.setattr(manifest, "record", slow)
    yield gates
    gates.go.set()


def saved(run, trainer) -> tuple[SavedCheckpoints, Path]:
    checkpoint = run.checkpoints / "step=1-last"
    checkpoint_files.write(checkpoint)
    saves = SavedCheckpoints(run.path, 0, 1, nodes=1)
    saves.watch(trainer)
    trainer.save_checkpoint(f"{checkpoint}.ckpt")
    saves.collect(trainer)
    return saves, checkpoint


def test_the_end_waits_as_long_as_it_may_and_has_the_samples_at_once(run, trainer, reading):
    saves, checkpoint = saved(run, trainer)
    assert reading.begun.wait(20)
    began = time.monotonic()
    saves.end(trainer, wait_s=0.1)
    assert time.monotonic() - began < 0.8
    records = manifest.read(checkpoint).records
    assert {record.crc for record in records.values()} == {None}, "a job that is killed now leaves samples of all files"
    assert all(record.sample is not None for record in records.values())
    threading.Timer(0.5, reading.go.set).start()
    saves.end(trainer, wait_s=20)
    assert manifest.read(checkpoint).is_complete
    assert all(record.crc is not None for record in manifest.read(checkpoint).records.values())


def test_the_time_limit_decides_how_long_the_last_manifest_may_take():
    now = 1000.0
    usr1, term = signal.SIGUSR1, signal.SIGTERM
    assert saved_checkpoints.wait_s(0, 0.0, now) == saved_checkpoints.END_S, "no limit: until srun would end the rest"
    assert saved_checkpoints.wait_s(usr1, now + 120, now) == 120 - saved_checkpoints.RECORD_S
    assert saved_checkpoints.wait_s(0, now + 120, now) == 120 - saved_checkpoints.RECORD_S
    assert saved_checkpoints.wait_s(usr1, now + 9999, now) == saved_checkpoints.END_S
    assert saved_checkpoints.wait_s(usr1, now - 5, now) == 0
    assert saved_checkpoints.wait_s(term, now + 9999, now) == saved_checkpoints.GRACE_S, "KillWait is 30 s by default"


def test_a_checkpoint_that_is_removed_is_not_read_on(run, trainer, reading):
    saves, checkpoint = saved(run, trainer)
    assert reading.begun.wait(20)
    trainer.strategy.remove_checkpoint(f"{checkpoint}.ckpt")
    reading.go.set()
    saves.end(trainer)
    assert len(reading.files) == 1
    assert not checkpoint.exists()


def test_a_removed_checkpoint_that_is_saved_once_more_gets_its_manifest(run, trainer):
    saves, checkpoint = saved(run, trainer)
    trainer.strategy.remove_checkpoint(f"{checkpoint}.ckpt")
    checkpoint_files.write(checkpoint)
    trainer.save_checkpoint(f"{checkpoint}.ckpt")
    saves.end(trainer)
    assert manifest.read(checkpoint).is_complete


def test_a_removal_that_meets_a_new_part_of_the_manifest_leaves_no_half_checkpoint(run, trainer, monkeypatch):
    """A node's part is written between rmtree's look into the folder and its rmdir: real files, real ENOTEMPTY."""
    part = run.checkpoints / "step=1-last" / manifest.FOLDER / "8.json"
    part.parent.mkdir(parents=True)
    rmdir, late = saved_checkpoints.os.rmdir, [part]

    def meets(path, *args, **kwargs):
        while late:
            late.pop().write_text("{}")
        rmdir(path, *args, **kwargs)

    monkeypatch.setattr(saved_checkpoints.os, "rmdir", meets)
    _, checkpoint = saved(run, trainer)
    trainer.strategy.remove_checkpoint(f"{checkpoint}.ckpt")
    assert not checkpoint.exists()


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.EBUSY])
def test_a_removal_waits_until_a_file_is_closed_as_nfs_would_have_it(run, trainer, monkeypatch, number):
    """No NFS here: what its client answers, made up, until the third time."""
    real, left = trainer.strategy.remove_checkpoint, [1, 2]

    def held(path):
        if left:
            left.pop()
            raise OSError(number, ".nfs0001")
        real(path)

    trainer.strategy.remove_checkpoint = held
    monkeypatch.setattr(saved_checkpoints, "RETRY_S", 0.01)
    _, checkpoint = saved(run, trainer)
    trainer.strategy.remove_checkpoint(f"{checkpoint}.ckpt")
    assert not checkpoint.exists()


def test_a_removal_that_cannot_be_is_told_at_once_or_after_its_time(run, trainer, monkeypatch):
    errors = [errno.EACCES, *[errno.ENOTEMPTY] * 1000]

    def refuse(path):
        raise OSError(errors.pop(0), "no")

    trainer.strategy.remove_checkpoint = refuse
    monkeypatch.setattr(saved_checkpoints, "RETRY_S", 0.01)
    monkeypatch.setattr(saved_checkpoints, "REMOVE_S", 0.1)
    _, checkpoint = saved(run, trainer)
    for number, calls in ((errno.EACCES, 1), (errno.ENOTEMPTY, 3)):
        before = len(errors)
        with pytest.raises(OSError, match="no") as raised:
            trainer.strategy.remove_checkpoint(f"{checkpoint}.ckpt")
        assert raised.value.errno == number
        assert before - len(errors) >= calls
