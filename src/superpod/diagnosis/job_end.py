"""Determine the final state of a Slurm job: from the controller, accounting, or slurmstepd's message in its output.

The controller purges a job after MinJobAge (300 s by default), and accounting may be down or not configured. While a
job is COMPLETING, only accounting knows how it ended. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from superpod.common.json_files import tail_text

POLL_S = 1.0
TIMEOUT_S = 30.0
"""Timeout for a Slurm command, in seconds."""
SHORT_TIMEOUT_S = 5.0
"""Timeout inside a job that Slurm is about to kill."""

CANCELLED = "CANCELLED"

LIVE_STATES = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "STOPPED")
"""States of a job that still has its nodes."""

_CANCELLATION = re.compile(r"\*\*\* JOB (\d+) ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*", re.IGNORECASE)
"""slurmstepd's line in the output of a job; after `scancel`, `DUE TO` is missing or is followed by the signal."""


def final_state(job: str, output: Path, wait_s: float = 60.0, timeout_s: float = TIMEOUT_S) -> str:
    """Return the final state of a job, such as `COMPLETED`, or `CANCELLED by UID` if the uid is known; '' = unknown.

    Args:
        job: the job id.
        output: the output file of the job (`slurm-JOB.out`).
        wait_s: maximum time to wait while the job is COMPLETING, in seconds.
        timeout_s: timeout for each Slurm command, in seconds.
    """
    end = time.monotonic() + wait_s
    while True:
        state = controller_state(job, timeout_s)
        if state not in ("", "COMPLETING", CANCELLED):
            return state
        accounting_state = _accounting_state(job, timeout_s)
        if accounting_state:
            return accounting_state
        if state == CANCELLED:
            return state
        logged = _state_in_output(job, output)
        if logged:
            return logged
        if not state or time.monotonic() > end:
            return ""
        time.sleep(POLL_S)


def current_state(job: str, output: Path) -> str:
    """Return the final state of a job without waiting; '' if it is not known yet. For a job that Slurm is ending."""
    return final_state(job, output, wait_s=0.0, timeout_s=SHORT_TIMEOUT_S)


def is_cancelled(state: str) -> bool:
    """Return whether a state from `final_state` means that scancel cancelled the job."""
    return state.startswith(CANCELLED)


def cancelled_by_uid(state: str) -> int | None:
    """Return the uid in `CANCELLED by UID`; None for other states."""
    match = re.fullmatch(rf"{CANCELLED} by (\d+)", state)
    return int(match[1]) if match else None


def job_field(job: str, name: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return a field of `scontrol show job`, such as EndTime; '' if the job is unknown or Slurm does not respond."""
    match = re.search(rf"\b{name}=(\S+)", slurm_output("scontrol", "show", "job", "-o", job, timeout_s=timeout_s))
    return match[1] if match else ""


def controller_state(job: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return a job's state according to the controller; '' if it does not know the job or does not respond."""
    return job_field(job, "JobState", timeout_s)


def exit_signal(job: str, timeout_s: float = TIMEOUT_S) -> int:
    """Return the signal that killed the batch script of a job (9 for `ExitCode=0:9`); 0 = none or unknown."""
    code = job_field(job, "ExitCode", timeout_s) or slurm_output(
        "sacct", "-X", "-nP", "-j", job, "-o", "ExitCode", timeout_s=timeout_s
    )
    match = re.match(r"\d+:(\d+)", code)
    return int(match[1]) if match else 0


def _accounting_state(job: str, timeout_s: float) -> str:
    """Return the final state from accounting; '' if the job has not ended, or accounting does not respond.

    For a requeued job, sacct shows its newest start.
    """
    line = slurm_output("sacct", "-X", "-nP", "-j", job, "-o", "State", timeout_s=timeout_s).strip().partition("\n")[0]
    return "" if line in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") else line


def _state_in_output(job: str, output: Path) -> str:
    """Return the final state from slurmstepd's line in the output of the job; '' if there is none."""
    try:
        text = tail_text(output)
    except OSError:
        return ""
    matches = [match for match in _CANCELLATION.finditer(text) if match[1] == job]
    if not matches:
        return ""
    reason = matches[-1][2] or ""
    if not reason or reason.upper().startswith("SIGNAL"):
        return CANCELLED
    return reason.upper()


def slurm_output(*command: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run a Slurm command and return its stdout; '' if it is not installed or times out after `timeout_s` seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
