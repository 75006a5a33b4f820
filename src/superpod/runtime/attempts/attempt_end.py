"""Determine the end of an attempt that was killed before it could record it. Standard library only.

The evidence is the state of the Slurm job, the user who cancelled it, the signal that ended its script, and the
kernel's count of out-of-memory kills. Without evidence, the cause is reported as unknown.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from superpod.diagnosis import job_end
from superpod.runtime.runs import owner
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import UNRECORDED, Cause, State

KILLED = "killed_process"
"""Key of result.json: a sentence about the launcher process that was killed by a signal, as evidence for `diagnose`."""

OOM_KILLS = "oom_kills"
"""Key of result.json: the number of processes of the job that the OOM killer killed on the first node."""

_UNENDED_STATES = ("", "PENDING", "REQUEUED", *job_end.LIVE_STATES)
"""States of a Slurm job that has not ended; '' = unknown."""


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    state: State
    """CANCELLED or FAILED"""
    message: str
    killed: str = ""
    """the value of KILLED; '' = not killed"""


def find_end(run: RunFolder, attempt: Attempt, wait_s: float = 0.0) -> End | None:
    """Determine the end of an attempt; None if it is recorded in result.json, unknown, or the attempt is running.

    Waits up to `wait_s` seconds until Slurm reports the final state of the job.
    """
    job = str(attempt.result.get("job", ""))
    if "ended" in attempt.result:
        return None
    if not job:
        is_newest = run.attempts[-1].name == attempt.name
        was_killed = not is_newest or not attempt.result or run.status().cause is Cause.UNRECORDED
        return End(State.FAILED, UNRECORDED) if was_killed else None
    state = job_end.final_state(job, run.output(job), wait_s)
    if job_end.is_cancelled(state):
        return End(State.CANCELLED, f"cancelled by {who_cancelled(run, state)} (scancel)")
    if state in _UNENDED_STATES:
        return None
    if state != "FAILED":
        return End(State.FAILED, f"Slurm ended job {job}: {state}")

    number = job_end.exit_signal(job)
    if not number:
        return None
    killed = describe_kill("the batch script's process (attempt.py)", number)
    return End(State.FAILED, killed, killed)


def who_cancelled(run: RunFolder, state: str) -> str:
    """Return the user who cancelled a job with the Slurm state `state`: "the user" (the run's owner), or a name."""
    uid = job_end.cancelled_by_uid(state)
    if uid in (None, owner.owner_uid(run.path)):
        return "the user"
    return owner.user_name(uid)


def describe_kill(process: str, number: int, oom_kills: int = 0) -> str:
    """Return a sentence about a process that was killed by a signal.

    Args:
        process: the name of the process, for the sentence.
        number: the number of the signal.
        oom_kills: the number of processes of the job that the kernel's OOM killer has killed.
    """
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if oom_kills:
        killed = "1 process" if oom_kills == 1 else f"{oom_kills} processes"
        return f"{process} was killed by {name}; the kernel's OOM killer killed {killed} of the job"
    return f"{process} was killed by {name}; cause unknown (no cancellation and no out-of-memory kill is recorded)"


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of processes of this job that the OOM killer has killed on this node; 0 if unknown.

    Reads `oom_kill` in memory.events (cgroup v2) or memory.oom_control (v1) of the job's control group, `job_N`, which
    includes its steps in v2 (kernel Documentation/admin-guide/cgroup-v2.rst, memory.events).
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        match = re.match(r"/.*?/job_\d+(?=/|$)", path)
        if match and controllers in ("", "memory"):
            folder = root / controllers / match[0].lstrip("/")
            return _read_oom_kill(folder / ("memory.oom_control" if controllers else "memory.events"))
    return 0


def _read_oom_kill(file: Path) -> int:
    try:
        match = re.search(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0
