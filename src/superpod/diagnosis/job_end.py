"""How a Slurm job ended: from the controller, from accounting, or from the line that slurmstepd left in its output.

The controller forgets a job after MinJobAge (300 s by default), accounting may be down or not set up, and COMPLETING
hides how a job ended, which accounting knows even then. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from superpod.common.files import tail_text

POLL_S = 1.0
ANSWER_S, SOON_S = 30.0, 5.0
"""How long to wait for an answer of Slurm, and from inside a job that it is about to kill."""

CANCELLED = "CANCELLED"

LIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "STOPPED")
"""States of a job that has its nodes."""

_LAST_WORDS = re.compile(r"\*\*\* JOB (\d+) ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*", re.IGNORECASE)
"""slurmstepd's line in a job's output; a `scancel` has no `DUE TO`, or names the signal."""


def final_state(job: str, output: Path, wait_s: float = 60.0, answer_s: float = ANSWER_S) -> str:
    """The state in which a job ended, `CANCELLED by UID` where accounting names who did it; '' when nobody knows.

    `output` is what the job wrote (`slurm-JOB.out`). Waits up to `wait_s` while the job is COMPLETING, and
    `answer_s` for each answer of Slurm.
    """
    end = time.monotonic() + wait_s
    while True:
        state = controller_state(job, answer_s)
        if state not in ("", "COMPLETING", CANCELLED):
            return state
        if accounted := _accounting(job, answer_s):
            return accounted
        if state == CANCELLED:
            return state
        if words := _last_words(job, output):
            return words
        if not state or time.monotonic() > end:
            return ""
        time.sleep(POLL_S)


def current_state(job: str, output: Path) -> str:
    """What is known at this moment, from inside a job that Slurm has begun to end."""
    return final_state(job, output, wait_s=0.0, answer_s=SOON_S)


def is_cancelled(state: str) -> bool:
    """Whether somebody ended the job by scancel."""
    return state.startswith(CANCELLED)


def cancelled_by_uid(state: str) -> int | None:
    """The user id of who did; None where it is not known."""
    match = re.fullmatch(rf"{CANCELLED} by (\d+)", state)
    return int(match[1]) if match else None


def job_field(job: str, name: str, answer_s: float = ANSWER_S) -> str:
    """A field of `scontrol show job`, such as EndTime; '' when the controller has forgotten the job or is silent."""
    match = re.search(rf"\b{name}=(\S+)", slurm_output("scontrol", "show", "job", "-o", job, answer_s=answer_s))
    return match[1] if match else ""


def controller_state(job: str, answer_s: float = ANSWER_S) -> str:
    """Slurm's state of a job, from the controller, not from accounting; '' when it has forgotten the job."""
    return job_field(job, "JobState", answer_s)


def exit_signal(job: str, answer_s: float = ANSWER_S) -> int:
    """The signal that ended a job's batch script, as `ExitCode=0:9` says; 0 = none, or nobody knows."""
    code = job_field(job, "ExitCode", answer_s)
    code = code or slurm_output("sacct", "-X", "-nP", "-j", job, "-o", "ExitCode", answer_s=answer_s)
    match = re.match(r"\d+:(\d+)", code)
    return int(match[1]) if match else 0


def _accounting(job: str, answer_s: float) -> str:
    """The state of a job that has ended, or is about to; '' while it waits or runs, or when accounting is silent.

    A requeued job has a line for each of its lives; sacct shows the newest.
    """
    line = slurm_output("sacct", "-X", "-nP", "-j", job, "-o", "State", answer_s=answer_s).strip().partition("\n")[0]
    return "" if line in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") else line


def _last_words(job: str, output: Path) -> str:
    try:
        text = tail_text(output)
    except OSError:
        return ""
    matches = [match for match in _LAST_WORDS.finditer(text) if match[1] == job]
    if not matches:
        return ""
    reason = matches[-1][2] or ""
    return CANCELLED if not reason or reason.upper().startswith("SIGNAL") else reason.upper()


def slurm_output(*words: str, answer_s: float = ANSWER_S) -> str:
    """What a Slurm command prints; '' when it is not installed or does not answer in time."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=answer_s).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
