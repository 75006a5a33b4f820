"""What Slurm says of many runs' jobs, in one question to the controller and one to accounting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.runtime.runs.run_state import QueuedJob

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection

ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States of a job that never runs again (squeue(1), "JOB STATE CODES")."""

POLL_S = 30.0
"""A verb that looks for as long as a run lasts asks Slurm no more often than this."""


@dataclass(frozen=True)
class JobQueue:
    """Jobs as the controller knows them: those that wait or run by name, and how the others ended by id."""

    active: dict[str, list[QueuedJob]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)


def query_jobs(connection: Connection, users: Iterable[str]) -> JobQueue | None:
    """The jobs of these users (names or ids), those that ended lately too; None when the controller does not answer.

    squeue's own default is every user's job; `--me` would not see the runs of others.
    """
    words = ["squeue", f"--users={','.join(sorted(users))}", "--states=all", "-h", "-o", "%i\x1f%j\x1f%T\x1f%r\x1f%S"]
    try:
        output = connection.run(words, limit_s=30)
    except UserError:
        return None
    queue = JobQueue()
    for job, name, state, reason, start in _rows(output):
        if state in ENDED:
            queue.ended[job] = state
        else:
            queue.active.setdefault(name, []).append(QueuedJob(job, state, reason, start))
    for jobs in queue.active.values():
        jobs.sort(key=lambda job: [int(digits) for digits in re.findall(r"\d+", job.id)])
    return queue


def _rows(output: str) -> Iterator[list[str]]:
    rows = (line.split("\x1f") for line in output.splitlines())
    return (row for row in rows if len(row) == 5)


def visible_user(connection: Connection) -> tuple[str, ...] | None:
    """The one user, by id and name, whose jobs Slurm shows here; None where it shows everybody's.

    With PrivateData=jobs squeue leaves the jobs of others out and ends with 0 (slurm.conf(5)). Root sees all of them.
    Empty where the configuration cannot be read, so that nobody knows what is left out.
    """
    try:
        uid, name, *config = connection.shell("id -u && id -un && scontrol show config", limit_s=30).splitlines()
    except (UserError, ValueError):
        return ()
    pairs = (line.partition("=") for line in config)
    private = next((value for key, _, value in pairs if key.strip() == "PrivateData"), "")
    return (uid, name) if uid != "0" and "jobs" in private.strip().lower().split(",") else None


def query_ended_jobs(connection: Connection, jobs: Iterable[str]) -> dict[str, str]:
    """How jobs ended, by id, from accounting: the controller forgets a job after its MinJobAge, mostly 300 s.

    Empty where accounting does not answer or is not set up.
    """
    ids = sorted(set(jobs))
    if not ids:
        return {}
    try:
        output = connection.run(["sacct", "-X", "-nP", "-j", ",".join(ids), "-o", "JobIDRaw,State"], limit_s=30)
    except UserError:
        return {}
    # "CANCELLED by 1001": who cancelled follows the state.
    rows = (line.partition("|") for line in output.splitlines())
    return {job: state.split()[0] for job, _, state in rows if state.strip()}
