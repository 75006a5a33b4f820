"""Wait for disk space before an attempt starts, so that a full disk does not fail one job of the chain after another.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from superpod.common.json_files import is_full, is_number
from superpod.common.units import duration, size
from superpod.runtime.attempts import next_attempt
from superpod.runtime.checkpoints.checkpoint_folder import MARK
from superpod.runtime.processes.command import output_of
from superpod.runtime.runs.run_folder import RunFolder

MIN_BYTES = 16 << 20
"""Bytes of the test file in the run folder: statvfs ignores quotas. An attempt's logs need about as much."""

MIN_FILES = 256
"""Number of files that an attempt creates, excluding those of its ranks."""

FILES_PER_RANK = 3
"""Number of files that a rank creates: two checkpoint files (Megatron has two writers per rank) and one log."""

SCRATCH_BYTES = 64 << 10
"""Bytes of the test files in the folders for caches and temporary files, which training needs too."""

FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 300.0
HELD_S = 900.0
"""Seconds that a job waits for disk space, holding its GPUs, before it ends and defers the next jobs."""

DEFERRED_S = (600.0, 6 * 3600.0)
"""Minimum and maximum of the seconds by which the next jobs are deferred, which is the time since the last attempt."""


@dataclass(frozen=True)
class Clock:
    """The functions for the time and for sleeping. Tests replace them."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


CLOCK = Clock()


@dataclass(frozen=True)
class Shortage:
    """A lack of disk space that remains after the wait."""

    message: str
    next_job_s: float
    """seconds until the next job of the run checks again; 0 = no job is queued"""


def missing_space(run: RunFolder) -> str:
    """Return the reason why statvfs reports too little space for another checkpoint; '' if there is enough.

    Writes nothing. Raises OSError.
    """
    needed_bytes = run.facts.get("checkpoint_bytes")
    facts = os.statvfs(run.path)
    total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    min_bytes = max(float(needed_bytes) if is_number(needed_bytes) else 0.0, _min_bytes(total))
    if free < min_bytes:
        return f"{size(free)} are free under {run.path}, but a checkpoint needs {size(min_bytes)}"
    # Btrfs and some network file systems report 0 inodes.
    files = min(MIN_FILES + FILES_PER_RANK * _ranks(run), facts.f_files / 50)
    if facts.f_favail < files:
        return f"{facts.f_favail} more files can be created under {run.path} (inodes), but an attempt needs {files:.0f}"
    return ""


def space_problem(run: RunFolder, environ: Mapping[str, str] = os.environ) -> str:
    """Return the reason why this node cannot save a checkpoint now; '' if it can.

    Writes and removes test files. A file system that is not writable (read-only after an error, server down) counts as
    full, since it may be repaired while the job waits. Raises FileNotFoundError if the run folder no longer exists.
    """
    try:
        problem = missing_space(run)
        if problem:
            return problem
        facts = os.statvfs(run.path)
        _write_test_file(run.path, int(_min_bytes(facts.f_blocks * facts.f_frsize)))
    except FileNotFoundError:
        raise
    except OSError as error:
        return _describe_error(run.path, error)
    for folder in _scratch_folders(environ):
        try:
            _write_test_file(folder, SCRATCH_BYTES)
        except OSError as error:
            if is_full(error):  # other errors are ignored: a run may not need this folder
                return _describe_error(folder, error)
    return ""


def _ranks(run: RunFolder) -> int:
    """Return the number of ranks of a run; 1 if it is unknown."""
    nodes, gpus = run.facts.get("nodes"), run.facts.get("gpus_per_node")
    return int(nodes * gpus) if is_number(nodes) and is_number(gpus) else 1


def _min_bytes(total: int) -> float:
    """Return the bytes that must be free on a file system of `total` bytes: MIN_BYTES, or 2% of a small one."""
    return min(MIN_BYTES, total / 50)


def _write_test_file(folder: Path, size_bytes: int) -> None:
    """Write an unnamed file of `size_bytes` random bytes and sync it to the disk. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        unwritten = memoryview(os.urandom(size_bytes))  # random, since file systems may compress zeros
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]
        # Some file systems report a full disk or an exceeded quota only when the data are written back.
        os.fsync(file.fileno())


def _scratch_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield this node's existing folders for caches (Triton, Hugging Face) and temporary files."""
    home = environ.get("HOME", "")
    cache = environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    for name in dict.fromkeys([cache, environ.get("TMPDIR") or "/tmp"]):
        if name and os.path.isabs(name) and os.path.isdir(name):
            yield Path(name)


def _describe_error(folder: Path, error: OSError) -> str:
    if error.errno == errno.EDQUOT:
        return f"your disk quota is exceeded under {folder}"
    if error.errno == errno.ENOSPC:
        return f"the disk is full under {folder}"
    if error.errno == errno.EROFS:
        return f"{folder} is on a read-only file system"
    return f"{folder} is not writable: {error.strerror or type(error).__name__}"


def wait_for_space(
    run: RunFolder,
    log: Callable[[str], None],
    *,
    held_s: float = HELD_S,
    self_submit: bool = False,
    clock: Clock = CLOCK,
) -> Shortage | None:
    """Wait for disk space; if there is too little after `held_s` seconds, defer the run's next jobs.

    Call it before an attempt is opened, since an attempt on a full disk would count as failed. `log` is called with a
    message before each pause. With `self_submit`, a deferred job is submitted if the run has none in the queue. Returns
    None as soon as there is space, or the shortage that remains. Raises OSError if the run folder no longer exists.
    """
    if not space_problem(run):
        return None

    _remove_unfinished(run)  # an incomplete checkpoint may have filled the disk
    began, pause = clock.now(), FIRST_PAUSE_S
    while True:
        problem = space_problem(run)
        if not problem:
            return None
        seconds_left = began + held_s - clock.now()
        if seconds_left <= 0:
            return _defer(run, problem, clock.now(), self_submit)
        pause = min(pause, MAX_PAUSE_S, seconds_left)
        log(f"{problem}: checking again in {duration(pause)}")
        clock.sleep(pause)
        pause *= 2


def _remove_unfinished(run: RunFolder) -> None:
    """Remove incomplete checkpoints, unless an attempt of the run is still running."""
    with contextlib.suppress(Exception):
        if any(run.checkpoints.glob(f"*{MARK}")):
            with run.lock():
                run.discard_unfinished()


def _defer(run: RunFolder, problem: str, now: float, self_submit: bool) -> Shortage:
    """Postpone the queued jobs of the run because of `problem`; if none is queued, submit one that starts later."""
    min_s, max_s = DEFERRED_S
    ends = [attempt.result.get("ended") for attempt in reversed(run.attempts) if attempt.counts]
    end_time = next((end for end in ends if is_number(end)), None)
    seconds = min(max(now - end_time, min_s), max_s) if is_number(end_time) else min_s
    jobs, error = next_attempt.pending_jobs(), ""
    start = f"StartTime=now+{int(seconds)}"
    outputs = [output_of(["scontrol", "update", f"JobId={job}", start], timeout_s=30) for job in jobs]
    is_deferred = any(output is not None for output in outputs)
    if not jobs and self_submit:
        error = next_attempt.submit(run, f"--begin=now+{int(seconds)}")
        is_deferred = not error
    if is_deferred:
        return Shortage(f"{problem}: the next job checks again in {duration(seconds)}", seconds)
    reasons = "; ".join(filter(None, [problem, error]))
    return Shortage(f"{reasons}; no further job is queued: free up space, then run `recipes top-up {run.path}`", 0.0)
