"""Wait for room on the disk before ranks start, with growing pauses, instead of burning one job after the other.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from superpod.node.files import is_full, is_number
from superpod.node.run_folder import RunFolder
from superpod.node.units import duration, size

LEAST_BYTES = 16 << 20
"""Written to see whether there is room: statvfs knows nothing of a user's quota. Logs and small files need as much."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
HELD_S = 900.0
"""A job holds its GPUs no longer than this for a disk that stays full; then the jobs behind it are put off."""

PUT_OFF_S = (600.0, 6 * 3600.0)
"""The jobs behind are put off by as long as the disk has been full already, within these limits."""


@dataclass(frozen=True)
class Clock:
    """Time, for tests."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


CLOCK = Clock()


def missing(run: RunFolder) -> str:
    """Why nothing more can be saved, in words; '' when there is room for one more checkpoint of this run."""
    needed = run.facts.get("checkpoint_bytes")
    least = max(float(needed) if is_number(needed) else 0.0, _small(run.path))
    free = shutil.disk_usage(run.path).free
    if free < least:
        return f"{size(free)} are free under {run.path}, and a checkpoint takes {size(least)}"
    probe = run.path / f".probe.{os.getpid()}"
    try:
        with open(probe, "wb") as file:
            file.write(os.urandom(int(_small(run.path))))  # random: zeros may take no space
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if is_full(error):
            what = "your quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
            return f"{what} under {run.path}"
        raise
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return ""


def _small(path: Path) -> float:
    """LEAST_BYTES, or 2 % of a disk that is smaller than that would be worth."""
    return min(LEAST_BYTES, shutil.disk_usage(path).total / 50)


def wait_for_room(run: RunFolder, log: Callable[[str], None], held_s: float = HELD_S, clock: Clock = CLOCK) -> str:
    """Wait until there is room, up to `held_s`; returns '' then, or what is missing. `log` hears of each pause."""
    began, pause = clock.now(), FIRST_PAUSE_S
    while reason := missing(run):
        left = began + held_s - clock.now()
        if left <= 0:
            return reason
        pause = min(pause, LONGEST_PAUSE_S, left)
        log(f"{reason}: looks again in {duration(pause)}")
        clock.sleep(pause)
        pause *= 2
    return ""


def put_off(run: RunFolder, jobs: list[str], now: float, submit: Callable[[float], bool] | None = None) -> float:
    """Have the queued `jobs` of the run start later; returns by how many seconds, 0 where Slurm takes none of them.

    A run that queues its next job only when one ends has none there: `submit` queues it, to begin in so many seconds.
    """
    least, most = PUT_OFF_S
    ends = [attempt.result.get("ended") for attempt in reversed(run.attempts) if attempt.counts]
    ended = next((end for end in ends if is_number(end)), None)
    seconds = min(max(now - ended if is_number(ended) else least, least), most)
    taken = [job for job in jobs if _begin(job, seconds)]
    return seconds if taken or (submit and not jobs and submit(seconds)) else 0.0


def _begin(job: str, seconds: float) -> bool:
    words = ["scontrol", "update", f"JobId={job}", f"StartTime=now+{int(seconds)}"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, timeout=30).returncode == 0
    return False
