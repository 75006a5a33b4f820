"""Queues the missing attempts of a run. Only its owner may do this, under a lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from superpod.common import locks
from superpod.errors import UserError
from superpod.runtime.health.node_checks import excluded_nodes
from superpod.runtime.runs import owner
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import CHAIN, State
from superpod.slurm.status import run_views
from superpod.slurm.submission import submit

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection

LOCK = ".queue"
"""File in a run folder that is locked while jobs are counted and queued, so that no attempt is queued twice."""


@contextmanager
def queue_lock(run: RunFolder) -> Iterator[None]:
    """Hold the lock for queueing jobs of a run within the block.

    Raises:
        UserError: the run belongs to another user, its folder is not writable, or another command holds the lock.
    """
    owner.refuse_others(run.path, "queue its jobs", root_may=False)
    owner.refuse_unsafe(run.path)
    try:
        handle = locks.acquire(run.path / LOCK)
    except OSError as error:
        raise UserError(f"{run.path}: {error.strerror}", "check the file system and your permissions there") from error
    if handle is None:
        holder = locks.holder(run.path / LOCK)
        raise UserError(f"{holder} is queueing jobs of {run.path}", "wait for it; `recipes status` shows the jobs")
    try:
        yield
    finally:
        os.close(handle)


def top_up(run: RunFolder, connection: Connection, attempts: int = 0) -> submit.QueuedJobs | None:
    """Queue jobs until a run has `attempts` pending and running ones; return the new jobs, or None if it has enough.

    `attempts` 0 is the number with which the run was submitted.

    Raises:
        UserError: the run cannot resume or belongs to another user, or Slurm does not answer or rejects the job.
    """
    with queue_lock(run):
        view = run_views.summarize_runs([run], connection)[0]
        if not (run.path / CHAIN).exists():  # existence suffices: even with a truncated file, the run was queued
            raise UserError(f"{run.path} was not queued by `recipes submit`", "queue its jobs with sbatch")
        if not run_views.may_continue(view):
            message = f"{run.path} is {view.state}"
            if view.message:
                message += f": {view.message}"
            hint = "to resume it: recipes submit NAME --cluster PROFILE --resume RUN"
            raise UserError(message, "" if view.state is State.DONE else hint)
        if view.jobs is None:
            raise UserError("Slurm's controller does not answer, so the queued jobs are unknown", "try again later")
        missing_attempts = run_views.missing_attempts(view, attempts or int(run.facts.get("attempts", 1)))
        if not missing_attempts:
            return None
        jobs = submit.queue(connection, str(run.path), missing_attempts, excluded_nodes(run))
        submit.append_jobs(run, jobs.ids)
        return jobs
