"""Wait for disk space before an attempt writes anything, instead of failing one job of the chain after the other.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from superpod.node import next_attempt
from superpod.node.checkpoints import MARK
from superpod.node.files import is_full, is_number
from superpod.node.run_folder import RunFolder
from superpod.node.units import duration, size

LEAST_BYTES = 16 << 20
"""Written to see whether there is space: statvfs ignores a user's quota. Logs and small files need as much."""

LEAST_FILES = 256
"""Files that an attempt creates besides those of its ranks."""

FILES_PER_RANK = 3
"""Two of a checkpoint (Megatron's writers per rank) and one log."""

SCRATCH_BYTES = 64 << 10
"""Written to the cache folder and the folder for temporary files, where a full disk ends a training too."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
HELD_S = 900.0
"""A job holds its GPUs no longer than this while the disk stays full; then the jobs behind it are deferred."""

DEFERRED_S = (600.0, 6 * 3600.0)
"""The jobs behind are deferred by as long as the disk has been full already, within these limits."""


@dataclass(frozen=True)
class Clock:
    """Time, for tests."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


CLOCK = Clock()


@dataclass(frozen=True)
class Shortage:
    """Why a job has given up waiting for disk space."""

    message: str
    next_job_s: float
    """seconds until the next job of the run looks again; 0 = none is queued"""


def little_space(run: RunFolder) -> str:
    """What the file system's own figures say is missing for one more checkpoint; '' = nothing. Writes nothing.

    Raises OSError.
    """
    needed = run.facts.get("checkpoint_bytes")
    facts = os.statvfs(run.path)
    total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    least = max(float(needed) if is_number(needed) else 0.0, _least_bytes(total))
    if free < least:
        return f"{size(free)} are free under {run.path}, and a checkpoint takes {size(least)}"
    # Btrfs and some network file systems report no number of files at all.
    files = min(LEAST_FILES + FILES_PER_RANK * _ranks(run), facts.f_files / 50)
    if facts.f_favail < files:
        return f"{facts.f_favail} more files can be created under {run.path} (inodes), and an attempt needs {files:.0f}"
    return ""


def shortage(run: RunFolder, environ: Mapping[str, str] = os.environ) -> str:
    """Why this node cannot save now; '' when there is space for one more checkpoint of this run.

    Writes a file that is removed at once. A file system that cannot be written at all (read-only after an error, its
    server away) is reported like a full one: it may be repaired while the job waits.

    Raises:
        FileNotFoundError: the run folder is gone.
    """
    try:
        if problem := little_space(run):
            return problem
        facts = os.statvfs(run.path)
        _probe(run.path, int(_least_bytes(facts.f_blocks * facts.f_frsize)))
    except FileNotFoundError:
        raise
    except OSError as error:
        return _problem(run.path, error)
    for folder in _scratch_folders(environ):
        try:
            _probe(folder, SCRATCH_BYTES)
        except OSError as error:
            if is_full(error):  # a folder that is missing or not writable is none of this module's concern
                return _problem(folder, error)
    return ""


def _ranks(run: RunFolder) -> int:
    nodes, gpus = run.facts.get("nodes"), run.facts.get("gpus_per_node")
    return int(nodes * gpus) if is_number(nodes) and is_number(gpus) else 1


def _least_bytes(total: int) -> float:
    """LEAST_BYTES, or 2 % of a file system of so many bytes that is small itself."""
    return min(LEAST_BYTES, total / 50)


def _probe(folder: Path, bytes_: int) -> None:
    """Write a file without a name and sync it. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        left = memoryview(os.urandom(bytes_))  # random: zeros may take no space
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def _scratch_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """The folders for caches (Triton's kernels, Hugging Face) and temporary files of this node, where they exist."""
    home = environ.get("HOME", "")
    cache = environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    for name in dict.fromkeys([cache, environ.get("TMPDIR") or "/tmp"]):
        if name and os.path.isabs(name) and os.path.isdir(name):
            yield Path(name)


def _problem(folder: Path, error: OSError) -> str:
    if error.errno == errno.EDQUOT:
        return f"your quota is used up under {folder}"
    if error.errno == errno.ENOSPC:
        return f"the disk is full under {folder}"
    if error.errno == errno.EROFS:
        return f"{folder} is on a read-only file system"
    return f"{folder} cannot be written: {error.strerror or type(error).__name__}"


def wait_for_space(
    run: RunFolder,
    log: Callable[[str], None],
    *,
    held_s: float = HELD_S,
    self_submit: bool = False,
    clock: Clock = CLOCK,
) -> Shortage | None:
    """Wait until there is space, `held_s` at most; None then. Otherwise the jobs behind this one are deferred.

    Writes nothing: an attempt opened on a full disk would count as failed. `log` is told of each pause. With
    `self_submit`, a run that has no job in the queue queues one. Raises OSError when the run folder is gone.
    """
    problem = shortage(run)
    if not problem:
        return None
    _remove_unfinished(run)  # an incomplete checkpoint may be what fills it
    began, pause = clock.now(), FIRST_PAUSE_S
    while problem := shortage(run):
        left = began + held_s - clock.now()
        if left <= 0:
            return _defer(run, problem, clock.now(), self_submit)
        pause = min(pause, LONGEST_PAUSE_S, left)
        log(f"{problem}: looking again in {duration(pause)}")
        clock.sleep(pause)
        pause *= 2
    return None


def _remove_unfinished(run: RunFolder) -> None:
    """Remove incomplete checkpoints, unless an attempt of the run is still running."""
    with contextlib.suppress(Exception):
        if any(run.checkpoints.glob(f"*{MARK}")):
            with run.lock():
                run.discard_unfinished()


def _defer(run: RunFolder, problem: str, now: float, self_submit: bool) -> Shortage:
    """Have the queued jobs of the run start later; a run that queues its next job from a node queues it now."""
    least, most = DEFERRED_S
    ends = [attempt.result.get("ended") for attempt in reversed(run.attempts) if attempt.counts]
    ended = next((end for end in ends if is_number(end)), None)
    seconds = min(max(now - ended if is_number(ended) else least, least), most)
    jobs, refusal = next_attempt.queued(), ""
    is_deferred = any([_begin_later(job, seconds) for job in jobs])
    if not jobs and self_submit:
        refusal = next_attempt.submit(run, f"--begin=now+{int(seconds)}")
        is_deferred = not refusal
    if is_deferred:
        return Shortage(f"{problem}: the next job looks again in {duration(seconds)}", seconds)
    reasons = "; ".join(filter(None, [problem, refusal]))
    return Shortage(f"{reasons}; no further job is queued: free space, then `recipes top-up {run.path}`", 0.0)


def _begin_later(job: str, seconds: float) -> bool:
    words = ["scontrol", "update", f"JobId={job}", f"StartTime=now+{int(seconds)}"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, timeout=30).returncode == 0
    return False
