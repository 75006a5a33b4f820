"""Record each complete checkpoint and write its manifest, in a thread of one process per node."""

from __future__ import annotations

import contextlib
import errno
import itertools
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
from superpod.runtime.checkpoints.checkpoint_folder import MARK
from superpod.runtime.checkpoints.checkpoint_metadata import weights_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

END_S = 240.0
"""Maximum seconds to wait for the last manifest at the end of training. srun kills the remaining ranks 300 s after the
first rank has exited (`--wait=300` in the batch script)."""

RECORD_S = 20.0
"""Seconds before the time limit that attempt.py needs to record and requeue the attempt."""

GRACE_S = 5.0
"""Maximum seconds to wait after a SIGTERM, since Slurm soon sends SIGKILL (KillWait, GraceTime)."""

REMOVE_S, RETRY_S = 30.0, 0.2
"""Timeout and interval in seconds of retries to remove a checkpoint while a node has one of its files open."""

_IN_USE_ERRORS = (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.ENOENT)
"""Errors of rmtree while NFS keeps a removed file that is still open, or if a part of the manifest was just written."""


class SavedCheckpoints:
    """Writes the manifest of each complete save, including asynchronous ones, in a thread.

    Runs in the process of local rank 0, and reads the files that the ranks of its node have just written, mostly from
    the page cache. Rank 0 also reads the files that exist once per checkpoint, and writes to `RUN/saved.jsonl`.
    """

    def __init__(self, run: Path, rank: int, local_size: int, nodes: int = 0) -> None:
        self._run, self._rank, self._local_size, self._nodes = run, rank, local_size, nodes
        self._incomplete: list[Path] = []
        self._removed: set[Path] = set()
        """checkpoints that must no longer be read"""
        self._complete: queue.Queue[Path | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write_manifests, name="manifests", daemon=True)
        self._thread.start()

    def watch(self, trainer: Trainer) -> None:
        """Wrap the trainer's methods that save and remove checkpoints, since Lightning has no hook for these."""
        strategy: Any = trainer.strategy
        save, remove = trainer.save_checkpoint, strategy.remove_checkpoint

        def save_and_record(filepath: str | Path, *args: Any, **kwargs: Any) -> None:
            checkpoint = _folder(filepath)
            self._removed.discard(checkpoint)
            if self._rank == 0:  # remove the manifest of an earlier checkpoint with this name
                shutil.rmtree(checkpoint / manifest.FOLDER, ignore_errors=True)
            save(filepath, *args, **kwargs)
            self._incomplete.append(checkpoint)

        def remove_and_record(filepath: str | Path, *args: Any, **kwargs: Any) -> None:
            self._removed.add(_folder(filepath))
            _retry_removal(_folder(filepath), lambda: remove(filepath, *args, **kwargs))

        trainer.save_checkpoint = save_and_record
        strategy.remove_checkpoint = remove_and_record

    def collect(self, trainer: Trainer) -> None:
        """Pass checkpoints whose save is complete to the thread. Reads no files, so it may be called at every step."""
        if self._incomplete and not _is_saving(trainer):
            for checkpoint in self._incomplete:
                self._complete.put(checkpoint)
            self._incomplete.clear()

    def end(self, trainer: Trainer, *, wait_s: float = END_S) -> None:
        """Wait up to `wait_s` seconds until all manifests are written. Call it at the end of training."""
        self.collect(trainer)
        self._complete.put(None)
        self._thread.join(min(wait_s, END_S))

    def _write_manifests(self) -> None:
        with contextlib.suppress(OSError):  # on Linux, the niceness of this thread only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            checkpoint = self._complete.get()
            if checkpoint is None:
                return
            with contextlib.suppress(OSError):  # no manifest on a full disk, or if the checkpoint has been removed
                self._record(checkpoint)

    def _record(self, checkpoint: Path) -> None:
        if checkpoint in self._removed or not checkpoint.is_dir():  # strategies other than Megatron's write one file
            return
        if self._rank == 0:
            resume.record_saved(self._run, checkpoint)
        files = list(own_files(checkpoint, self._rank, self._local_size))
        if not files or checkpoint.with_name(f"{checkpoint.name}{MARK}").exists():
            return
        for fully in (False, True):  # samples first, so that a killed job leaves at least these
            present_files = self._iterate_unless_removed(checkpoint, files)
            parts = self._nodes if self._rank == 0 else 0
            manifest.write_part(checkpoint, str(self._rank), present_files, fully=fully, parts=parts)

    def _iterate_unless_removed(self, checkpoint: Path, files: Iterable[Path]) -> Iterator[Path]:
        """Yield `files`; raise FileNotFoundError once the checkpoint is being removed."""
        for file in (*files, None):
            if checkpoint in self._removed:
                raise FileNotFoundError(errno.ENOENT, "is being removed", str(checkpoint))
            if file:
                yield file


def wait_s(number: int, deadline: float, now: float) -> float:
    """Return the maximum seconds to wait for the last manifest at the end of training.

    `number` is the signal that stopped the training, 0 = none; `deadline` is the Unix time at which the job's time
    limit expires, 0 = no limit.
    """
    seconds_left = max(0.0, deadline - RECORD_S - now) if deadline else END_S
    return min(GRACE_S, seconds_left) if number == signal.SIGTERM else min(END_S, seconds_left)


def _folder(filepath: str | Path) -> Path:
    return Path(str(filepath).removesuffix(".ckpt"))


def _retry_removal(checkpoint: Path, remove: Callable[[], None]) -> None:
    """Call NeMo's `remove`, an rmtree, until it succeeds, since remaining files without a mark would appear complete.

    Raises OSError if it still fails after REMOVE_S seconds.
    """
    end = time.monotonic() + REMOVE_S
    while True:
        try:
            return remove()
        except OSError as error:
            if error.errno == errno.ENOENT and not checkpoint.exists():
                return None
            if error.errno not in _IN_USE_ERRORS or time.monotonic() > end:
                raise
        time.sleep(RETRY_S)


def own_files(checkpoint: Path, rank: int, local_size: int) -> Iterator[Path]:
    """Yield the files of a checkpoint for a node's part of the manifest; `rank` is the first of its `local_size` ranks.

    These are the files of its ranks (`__{rank}_{number}.distcp`, written by torch), and on the first node all files
    without a rank in the name. Only rank 0 lists the folder, which may contain tens of thousands of files.
    """
    weights = weights_of(checkpoint)
    for own in range(rank, rank + local_size):
        for number in itertools.count():
            file = weights / f"__{own}_{number}.distcp"
            if not file.is_file():
                break
            yield file
    if rank != 0:
        return
    for folder, folders, names in os.walk(checkpoint):
        if manifest.FOLDER in folders:
            folders.remove(manifest.FOLDER)
        yield from (Path(folder) / name for name in names if not _is_rank_or_hidden_file(name))


def _is_rank_or_hidden_file(name: str) -> bool:
    """Return whether a file name contains a rank or is hidden, like the `.nfs*` files that NFS keeps for open files."""
    return bool(re.fullmatch(r"__\d+_\d+\.distcp", name)) or (name.startswith(".") and name != ".metadata")


def _is_saving(trainer: Trainer) -> bool:
    """Return whether an asynchronous save is in progress, based on NeMo's queue."""
    save_queue = getattr(getattr(trainer.strategy, "checkpoint_io", None), "async_calls_queue", None)
    return bool(save_queue and save_queue.get_num_unfinalized_calls())
