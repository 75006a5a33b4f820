"""Queries the jobs of many runs with one call of squeue and one of sacct."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.runtime.runs.run_state import QueuedJob

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection

ENDED_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""Final states of a job (squeue(1), "JOB STATE CODES")."""

POLL_S = 30.0
"""Seconds between two queries of a command that follows runs."""


@dataclass(frozen=True)
class JobQueue:
    """The jobs known to the controller."""

    active: dict[str, list[QueuedJob]] = field(default_factory=dict)
    """pending and running jobs by name"""
    ended: dict[str, str] = field(default_factory=dict)
    """final states of the other jobs by id"""


def query_jobs(connection: Connection, users: Iterable[str]) -> JobQueue | None:
    """Return the jobs of some users (names or ids), including recently ended ones; None if Slurm does not answer."""
    command = ["squeue", f"--users={','.join(sorted(users))}", "--states=all", "-h", "-o", "%i\x1f%j\x1f%T\x1f%r\x1f%S"]
    try:
        output = connection.run(command, limit_s=30)
    except UserError:
        return None
    queue = JobQueue()
    rows = (line.split("\x1f") for line in output.splitlines())
    for job, name, state, reason, start in (row for row in rows if len(row) == 5):
        if state in ENDED_STATES:
            queue.ended[job] = state
        else:
            queue.active.setdefault(name, []).append(QueuedJob(job, state, reason, start))
    for jobs in queue.active.values():
        jobs.sort(key=lambda job: [int(digits) for digits in re.findall(r"\d+", job.id)])
    return queue


def visible_user(connection: Connection) -> tuple[str, ...] | None:
    """Return the id and name of the only user whose jobs squeue lists; None if it lists the jobs of all users.

    With PrivateData=jobs, squeue omits the jobs of other users and still exits with 0 (slurm.conf(5)), except for root.
    If the configuration cannot be read, return ().
    """
    try:
        uid, name, *config = connection.shell("id -u && id -un && scontrol show config", limit_s=30).splitlines()
    except (UserError, ValueError):
        return ()
    settings = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in config)}
    hides_jobs = "jobs" in settings.get("PrivateData", "").lower().split(",")
    return (uid, name) if hides_jobs and uid != "0" else None


def query_ended_jobs(connection: Connection, jobs: Iterable[str]) -> dict[str, str]:
    """Return the final states of jobs from accounting, by job id; {} if accounting does not answer.

    The controller purges ended jobs after MinJobAge, often 300 s.
    """
    ids = sorted(set(jobs))
    if not ids:
        return {}
    try:
        output = connection.run(["sacct", "-X", "-nP", "-j", ",".join(ids), "-o", "JobIDRaw,State"], limit_s=30)
    except UserError:
        return {}
    # The state may be followed by the user who cancelled the job: "CANCELLED by 1001".
    rows = (line.partition("|") for line in output.splitlines())
    return {job: state.split()[0] for job, _, state in rows if state.strip()}
