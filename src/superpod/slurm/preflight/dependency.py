"""`recipes submit --after JOB[:TYPE]`: parses job dependencies and checks them before anything is queued.

sbatch accepts a dependency on a failed job, and leaves the new job pending forever (`DependencyNeverSatisfied`). It
also accepts a dependency on a job that never existed. This module rejects both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.errors import UserError, did_you_mean
from superpod.slurm.status.job_queue import ENDED_STATES

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection

TYPES = ("afterok", "afterany", "afternotok", "after")
"""sbatch's dependency types: the job has ended with exit code 0; has ended; has failed; has started."""


@dataclass(frozen=True)
class Dependency:
    """A job to wait for, and the condition under which the wait ends."""

    job: str
    """job id, such as 123, or 123_4 for a task of an array"""
    type: str = "afterok"
    """one of TYPES"""

    def __str__(self) -> str:
        return f"{self.type}:{self.job}"


def parse(text: str) -> Dependency:
    """Return the dependency in a text JOB, JOB:TYPE or, in Slurm's order, TYPE:JOB.

    Raises:
        UserError: the format is invalid, or the type is unknown.
    """
    match = re.fullmatch(r"(?P<job>\d+(?:_\d+)?)(?::(?P<type>\w+))?", text) or re.fullmatch(
        r"(?P<type>[a-z]+):(?P<job>\d+(?:_\d+)?)", text
    )
    if match is None:
        raise UserError(f"--after {text!r} must be JOB or JOB:TYPE", "for example --after 123, or --after 123:afterany")
    job, kind = match["job"], match["type"] or "afterok"
    if kind not in TYPES:
        raise UserError(
            f"--after {text}: {kind!r} is not a Slurm dependency type",
            did_you_mean(kind, list(TYPES)) or f"types: {', '.join(TYPES)}",
        )
    return Dependency(job, kind)


def unmet_dependencies(dependencies: Sequence[Dependency], connection: Connection) -> list[Dependency]:
    """Return the dependencies that are not met yet.

    Those that are met are omitted, because sbatch may reject a dependency on a job that the controller has purged.

    Raises:
        UserError: Slurm does not know a job, or a condition can no longer be met.
    """
    return [dependency for dependency in dependencies if not _is_met(dependency, states(dependency.job, connection))]


def _is_met(dependency: Dependency, job_states: list[str]) -> bool:
    """Return whether a dependency is met, given the states of its job or tasks. Raises UserError if it cannot be."""
    job, kind = dependency.job, dependency.type
    if not job_states:
        raise UserError(f"--after {job}: Slurm has no job {job}", "`squeue --me` and `sacct -X` list your jobs")
    has_ended = all(state in ENDED_STATES for state in job_states)
    failed_state = next((state for state in job_states if state in ENDED_STATES and state != "COMPLETED"), "")
    if kind == "afterok" and failed_state:  # one failed task of an array is enough
        raise UserError(
            f"--after {job}: job {job} ended as {failed_state}, but afterok requires exit code 0",
            f"run the job again, or accept any exit code: --after {job}:afterany",
        )
    if kind == "after":
        return has_ended or "PENDING" not in job_states
    if not has_ended:
        return False
    if kind == "afterany":
        return True
    if kind == "afternotok" and not failed_state:
        raise UserError(f"--after {job}:afternotok: job {job} succeeded", "leave out the dependency")
    return True


def states(job: str, connection: Connection) -> list[str]:
    """Return the state of a job, or of every task of an array; [] if Slurm does not know the job.

    The states of jobs and tasks that the controller has purged (MinJobAge) are from accounting.
    """
    controller_output = _run_quietly(connection, ["scontrol", "show", "job", "-o", job])
    known_states = re.findall(r"\bJobState=([A-Z_]+)", controller_output)
    if known_states and "ArrayJobId=" not in controller_output:
        return known_states
    listed_jobs = {*re.findall(r"\bJobId=(\d+)", controller_output)}
    accounting_output = _run_quietly(connection, ["sacct", "-X", "-nP", "-j", job, "-o", "JobIDRaw,State"])
    rows = re.findall(r"^(\d+)\|([A-Z_]+)", accounting_output, re.MULTILINE)
    return [*known_states, *(state for number, state in rows if number not in listed_jobs)]


def _run_quietly(connection: Connection, command: list[str]) -> str:
    """Return the output of a command; "" if it fails."""
    try:
        return connection.run(command, limit_s=30)
    except UserError:
        return ""  # the controller has purged the job, or there is no accounting
