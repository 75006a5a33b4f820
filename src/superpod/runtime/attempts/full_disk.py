"""Waits for disk space before an attempt writes anything, so that a full disk does not fail every job of the chain.

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

from superpod.common.files import is_full, is_number
from superpod.common.units import duration, size
from superpod.runtime.attempts import next_attempt
from superpod.runtime.checkpoints.checkpoints import MARK
from superpod.runtime.runs.run_folder import RunFolder

LEAST_BYTES = 16 << 20
"""Bytes of a test file: statvfs does not know a user's quota. Logs and small files need as much."""

LEAST_FILES = 256
"""Files that an attempt creates besides those of its ranks."""

FILES_PER_RANK = 3
"""Two of a checkpoint (Megatron's writers per rank) and one log."""

SCRATCH_BYTES = 64 << 10
"""Bytes of a test file in the folders for caches and temporary files, where a full disk ends a training too."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
HELD_S = 900.0
"""How long a job keeps its GPUs while the disk stays full; then it ends, and the next jobs are deferred."""

DEFERRED_S = (600.0, 6 * 3600.0)
"""The next jobs are deferred by as long as the disk has been full so far, within these limits."""


@dataclass(frozen=True)
class Clock:
    """The time and sleep functions, which tests replace."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


CLOCK = Clock()


@dataclass(frozen=True)
class Shortage:
    """Why a job has given up waiting for disk space."""

    message: str
    next_job_s: float
    """seconds until the next job of the run checks again; 0 = none is queued"""


def missing_space(run: RunFolder) -> str:
    """What one more checkpoint lacks by the file system's figures, '' if nothing; writes nothing. Raises OSError."""
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


def space_problem(run: RunFolder, environ: Mapping[str, str] = os.environ) -> str:
    """Why this node cannot save now; '' if there is space for one more checkpoint of this run.

    Writes a test file and removes it. A file system that cannot be written at all (read-only after an error, its server
    down) is reported like a full one: it may be repaired while the job waits.

    Raises:
        FileNotFoundError: the run folder is gone.
    """
    try:
        if problem := missing_space(run):
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
            if is_full(error):  # a training may need no scratch folder: one that cannot be written is no problem
                return _problem(folder, error)
    return ""


def _ranks(run: RunFolder) -> int:
    nodes, gpus = run.facts.get("nodes"), run.facts.get("gpus_per_node")
    return int(nodes * gpus) if is_number(nodes) and is_number(gpus) else 1


def _least_bytes(total: int) -> float:
    """LEAST_BYTES, or 2 % of the `total` bytes of a small file system."""
    return min(LEAST_BYTES, total / 50)


def _probe(folder: Path, bytes_: int) -> None:
    """Write a file without a name and sync it. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        left = memoryview(os.urandom(bytes_))  # random: zeros may take no space
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def _scratch_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """This node's folders for caches (Triton, Hugging Face) and temporary files that exist."""
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
    """Wait up to `held_s` for space and return None; if there is still none, defer the run's next jobs.

    No attempt is opened meanwhile: on a full disk it would count as failed.

    Args:
        run: the run.
        log: called before each pause.
        held_s: how long the job may keep its GPUs.
        self_submit: whether to queue a job if the run has none in the queue.
        clock: for tests.

    Raises:
        OSError: the run folder is gone.
    """
    problem = space_problem(run)
    if not problem:
        return None
    _remove_unfinished(run)  # an incomplete checkpoint may be what fills the disk
    began, pause = clock.now(), FIRST_PAUSE_S
    while problem := space_problem(run):
        left = began + held_s - clock.now()
        if left <= 0:
            return _defer(run, problem, clock.now(), self_submit)
        pause = min(pause, LONGEST_PAUSE_S, left)
        log(f"{problem}: checking again in {duration(pause)}")
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
    """Defer the queued jobs of the run; with `self_submit` and none queued, submit a deferred one."""
    least, most = DEFERRED_S
    ends = [attempt.result.get("ended") for attempt in reversed(run.attempts) if attempt.counts]
    ended = next((end for end in ends if is_number(end)), None)
    seconds = min(max(now - ended if is_number(ended) else least, least), most)
    jobs, refusal = next_attempt.queued(), ""
    is_deferred = any([_defer_job(job, seconds) for job in jobs])
    if not jobs and self_submit:
        refusal = next_attempt.submit(run, f"--begin=now+{int(seconds)}")
        is_deferred = not refusal
    if is_deferred:
        return Shortage(f"{problem}: the next job checks again in {duration(seconds)}", seconds)
    reasons = "; ".join(filter(None, [problem, refusal]))
    return Shortage(f"{reasons}; no further job is queued: free space, then `recipes top-up {run.path}`", 0.0)


def _defer_job(job: str, seconds: float) -> bool:
    command = ["scontrol", "update", f"JobId={job}", f"StartTime=now+{int(seconds)}"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    return False
