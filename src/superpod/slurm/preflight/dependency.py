"""`recipes submit --after JOB[:TYPE]`: Slurm's own dependencies, read and asked about before anything is queued.

sbatch takes a dependency on a job that has failed and leaves the new job in the queue for ever
(`DependencyNeverSatisfied`), and one on a number that was never a job. Both are refused here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection

TYPES = ("afterok", "afterany", "afternotok", "after")
"""As sbatch calls them: ended with exit code 0; ended; failed; started."""

ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
    *("PREEMPTED", "REVOKED"),
)


@dataclass(frozen=True)
class Dependency:
    """A job to wait for, and what has to have become of it."""

    job: str
    """its number, or 123_4 for one task of an array"""
    type: str = "afterok"

    def __str__(self) -> str:
        return f"{self.type}:{self.job}"


def parse(text: str) -> Dependency:
    """JOB or JOB:TYPE; Slurm's order, TYPE:JOB, is taken too.

    Raises:
        UserError: it is neither.
    """
    match = re.fullmatch(r"(\d+(?:_\d+)?)(?::(\w+))?", text) or re.fullmatch(
        r"(?=\w+:(\d+(?:_\d+)?)$)([a-z]+):.*", text
    )
    if match is None:
        raise UserError(f"--after {text!r} names no job", "such as --after 123, or --after 123:afterany")
    job, kind = match[1], match[2] or "afterok"
    if kind not in TYPES:
        raise UserError(
            f"--after {text}: {kind!r} is no type of dependency",
            did_you_mean(kind, list(TYPES)) or f"one of {', '.join(TYPES)}",
        )
    return Dependency(job, kind)


def unmet(dependencies: Sequence[Dependency], connection: Connection) -> list[Dependency]:
    """Those that still have to be waited for; the controller forgets ended jobs, so that they cannot stand in a job.

    Raises:
        UserError: Slurm knows no such job, or what is waited for can no longer happen.
    """
    return [dependency for dependency in dependencies if not _is_met(dependency, states(dependency.job, connection))]


def _is_met(dependency: Dependency, known: list[str]) -> bool:
    job, kind = dependency.job, dependency.type
    if not known:
        raise UserError(f"--after {job}: Slurm knows no job {job}", "`squeue --me` and `sacct -X` list yours")
    ended = all(state in ENDED for state in known)
    bad = next((state for state in known if state in ENDED and state != "COMPLETED"), "")
    if kind == "afterok" and bad:  # of an array, one task is enough
        raise UserError(
            f"--after {job}: job {job} has ended as {bad}, and afterok waits for an end without error",
            f"run it again, or wait for any end: --after {job}:afterany",
        )
    if kind == "after":
        return ended or "PENDING" not in known
    if not ended:
        return False
    if kind == "afterany":
        return True
    if kind == "afternotok" and not bad:
        raise UserError(f"--after {job}:afternotok: job {job} has ended without error", "leave it out")
    return True


def states(job: str, connection: Connection) -> list[str]:
    """The states of a job, of every task of an array; [] = no such job.

    Accounting says what the controller has forgotten: a job that has ended, or such tasks of an array (MinJobAge).
    """
    live = _run_quietly(connection, ["scontrol", "show", "job", "-o", job])
    known = re.findall(r"\bJobState=([A-Z_]+)", live)
    if known and "ArrayJobId=" not in live:
        return known
    listed = {*re.findall(r"\bJobId=(\d+)", live)}
    rows = re.findall(
        r"^(\d+)\|([A-Z_]+)",
        _run_quietly(connection, ["sacct", "-X", "-nP", "-j", job, "-o", "JobIDRaw,State"]),
        re.MULTILINE,
    )
    return [*known, *(state for number, state in rows if number not in listed)]


def _run_quietly(connection: Connection, words: list[str]) -> str:
    try:
        return connection.run(words, limit_s=30)
    except UserError:
        return ""  # the controller has forgotten it, or there is no accounting
