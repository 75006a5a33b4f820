"""Records every complete checkpoint of a training and writes its manifest, in a thread of one process per node."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.runtime.checkpoints import manifest, resume
from superpod.runtime.checkpoints.checkpoint_metadata import weights_of
from superpod.runtime.checkpoints.checkpoints import MARK

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

END_S = 240.0
"""How long the end of a training waits for its last manifest: srun kills the other ranks 300 s after the first
rank has ended (`--wait=300` in the batch script)."""

RECORD_S = 20.0
"""Seconds before the time limit that attempt.py needs to record and requeue the attempt."""

GRACE_S = 5.0
"""How long it waits after a SIGTERM, which Slurm soon follows by SIGKILL (KillWait, GraceTime)."""

REMOVE_S, RETRY_S = 30.0, 0.2
"""How long and how often a removal is repeated while a file of the checkpoint is still open on some node."""

_IN_USE = (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.ENOENT)
"""Errors of rmtree if NFS keeps a removed file until it is closed, or a part of the manifest was just written."""


class SavedCheckpoints:
    """Waits for saves to complete, in the background too, and hands them to a thread that reads them back.

    Lives in the process of local rank 0. It reads what the ranks of its own node have just written, so mostly from the
    node's memory; rank 0 also takes the files that there are once, and writes the line of `RUN/saved.jsonl`.
    """

    def __init__(self, run: Path, rank: int, local_size: int, nodes: int = 0) -> None:
        self._run, self._rank, self._local_size, self._nodes = run, rank, local_size, nodes
        self._incomplete: list[Path] = []
        self._removed: set[Path] = set()
        """checkpoints that are no longer read"""
        self._complete: queue.Queue[Path | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="manifests", daemon=True)
        self._thread.start()

    def watch(self, trainer: Trainer) -> None:
        """Record the path of every save and removal from now on, for which Lightning has no hook."""
        strategy: Any = trainer.strategy
        save, remove = trainer.save_checkpoint, strategy.remove_checkpoint

        def noted(filepath: str | Path, *args: Any, **kwargs: Any) -> None:
            checkpoint = _folder(filepath)
            self._removed.discard(checkpoint)
            if self._rank == 0:  # the manifest of an older checkpoint of this name is no longer valid
                shutil.rmtree(checkpoint / manifest.FOLDER, ignore_errors=True)
            save(filepath, *args, **kwargs)
            self._incomplete.append(checkpoint)

        def removed(filepath: str | Path, *args: Any, **kwargs: Any) -> None:
            self._removed.add(_folder(filepath))
            _removing(_folder(filepath), lambda: remove(filepath, *args, **kwargs))

        trainer.save_checkpoint = noted
        strategy.remove_checkpoint = removed

    def look(self, trainer: Trainer) -> None:
        """Pass complete checkpoints to the thread. Reads no files, so it can be called after every step."""
        if self._incomplete and not _is_saving(trainer):
            for checkpoint in self._incomplete:
                self._complete.put(checkpoint)
            self._incomplete.clear()

    def end(self, trainer: Trainer, *, wait_s: float = END_S) -> None:
        """At the end of the training, wait up to `wait_s` for the manifests that are being written."""
        self.look(trainer)
        self._complete.put(None)
        self._thread.join(min(wait_s, END_S))

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # on Linux, the niceness of this thread only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while (checkpoint := self._complete.get()) is not None:
            with contextlib.suppress(OSError):  # without a manifest on a full disk, or if it was removed meanwhile
                self._record(checkpoint)

    def _record(self, checkpoint: Path) -> None:
        if checkpoint in self._removed:
            return
        if not checkpoint.is_dir():  # strategies other than Megatron's write a single file
            return
        if self._rank == 0:
            resume.record_saved(self._run, checkpoint)
        files = list(own_files(checkpoint, self._rank, self._local_size))
        if not files or checkpoint.with_name(f"{checkpoint.name}{MARK}").exists():
            return
        for fully in (False, True):  # samples first: a job that is killed leaves at least these
            unremoved = self._unless_removed(checkpoint, files)
            parts = self._nodes if self._rank == 0 else 0
            manifest.write_part(checkpoint, str(self._rank), unremoved, fully=fully, parts=parts)

    def _unless_removed(self, checkpoint: Path, files: Iterable[Path]) -> Iterator[Path]:
        """Yield the files; raises FileNotFoundError once the checkpoint was removed."""
        for file in (*files, None):
            if checkpoint in self._removed:
                raise FileNotFoundError(errno.ENOENT, "is being removed", str(checkpoint))
            if file:
                yield file


def wait_s(number: int, deadline: float, now: float) -> float:
    """Seconds that the end of a training may wait: until its time limit (Unix time, 0 = none).

    After signal `number`, 0 = none. A SIGTERM leaves GRACE_S, whatever the limit is.
    """
    left = max(0.0, deadline - RECORD_S - now) if deadline else END_S
    return min(GRACE_S, left) if number == signal.SIGTERM else min(END_S, left)


def _folder(filepath: str | Path) -> Path:
    return Path(str(filepath).removesuffix(".ckpt"))


def _removing(checkpoint: Path, remove: Callable[[], None]) -> None:
    """Repeat NeMo's removal, a bare rmtree, until nothing is left: what stays without a mark would pass for complete.

    Raises OSError: what it raises still after REMOVE_S.
    """
    end = time.monotonic() + REMOVE_S
    while True:
        try:
            return remove()
        except OSError as error:
            if error.errno == errno.ENOENT and not checkpoint.exists():
                return None
            if error.errno not in _IN_USE or time.monotonic() > end:
                raise
        time.sleep(RETRY_S)


def own_files(checkpoint: Path, rank: int, local_size: int) -> Iterator[Path]:
    """The files of a checkpoint that the node of `rank`, its first, writes the manifest of.

    What its ranks have written, by the names of torch's writer, `__{rank}_{number}.distcp`; from rank 0 also all that
    no rank's name is on. Only rank 0 lists the folder, which may hold tens of thousands of files.
    """
    weights = weights_of(checkpoint)
    for own in range(rank, rank + local_size):
        number = 0
        while (file := weights / f"__{own}_{number}.distcp").is_file():
            yield file
            number += 1
    for folder, folders, names in os.walk(checkpoint) if rank == 0 else ():
        if manifest.FOLDER in folders:
            folders.remove(manifest.FOLDER)
        yield from (Path(folder) / name for name in names if not _is_others(name))


def _is_others(name: str) -> bool:
    """Whether a file is named after a rank, or is `.nfs*`, which NFS keeps while a file is open."""
    return bool(re.fullmatch(r"__\d+_\d+\.distcp", name)) or (name.startswith(".") and name != ".metadata")


def _is_saving(trainer: Trainer) -> bool:
    """Whether a checkpoint is still being written in the background, by NeMo's own queue of saves."""
    waiting = getattr(getattr(trainer.strategy, "checkpoint_io", None), "async_calls_queue", None)
    return bool(waiting and waiting.get_num_unfinalized_calls())
