"""Queue the attempts that a run lacks: its owner's choice, made under a lock, and never a look's side effect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from superpod.common import locks
from superpod.errors import UserError
from superpod.runtime.health.first_step import excluded
from superpod.runtime.runs import owner
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import CHAIN, State
from superpod.slurm.status import run_views
from superpod.slurm.submission import submit

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection

LOCK = ".queue"
"""`RUN/.queue`, held by who counts the jobs of a run and queues more: two at once do not queue twice as many."""


@contextmanager
def queueing(run: RunFolder) -> Iterator[None]:
    """Hold the right to queue jobs of a run.

    Raises:
        UserError: the run is another user's, its folder cannot be written, or another command queues its jobs now.
    """
    owner.refuse_others(run.path, "queue its jobs", root_may=False)
    owner.refuse_unsafe(run.path)
    try:
        handle = locks.take(run.path / LOCK)
    except OSError as error:
        raise UserError(f"{run.path}: {error.strerror}", "look at that file system and your rights there") from error
    if handle is None:
        who = locks.holder(run.path / LOCK)
        raise UserError(f"jobs of {run.path} are being queued by {who}", "wait for it; `recipes status` shows them")
    try:
        yield
    finally:
        os.close(handle)


def top_up(run: RunFolder, connection: Connection, attempts: int = 0) -> submit.QueuedJobs | None:
    """Queue what a run lacks of `attempts` jobs (0: as many as it was submitted with); None when it lacks none.

    Raises:
        UserError: the run cannot go on by itself, is another user's, or Slurm does not answer or refuses.
    """
    with queueing(run):
        seen = run_views.summarize_runs([run], connection)[0]
        if not (run.path / CHAIN).exists():  # one that is torn was queued all the same
            raise UserError(f"{run.path} was not queued by `recipes submit`", "its user queues its jobs by sbatch")
        if not run_views.may_continue(seen):
            raise UserError(
                f"{run.path} is {seen.state}" + (f": {seen.message}" if seen.message else ""),
                "" if seen.state is State.DONE else "to resume it: recipes submit NAME --cluster PROFILE --resume RUN",
            )
        if seen.jobs is None:
            raise UserError("Slurm's controller does not answer, so nobody knows what is queued", "try again later")
        lacks = run_views.missing_attempts(seen, attempts or int(run.facts.get("attempts", 1)))
        if not lacks:
            return None
        jobs = submit.queue(connection, str(run.path), lacks, excluded(run))
        submit.append_jobs(run, jobs.ids)
        return jobs
