"""Summarizes runs from their folders and from Slurm, for `recipes status`."""

from __future__ import annotations

import enum
import math
import os
import shlex
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common.json_files import JsonObject, is_number, read_json
from superpod.diagnosis import drift, job_end
from superpod.reports.runs.attempts import list_resume_notes
from superpod.runtime.attempts import full_disk, guard, progress
from superpod.runtime.checkpoints import checkpoint_files
from superpod.runtime.checkpoints.checkpoint_folder import step_of
from superpod.runtime.runs import owner, run_state
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import QueuedJob, SlurmJobs, State
from superpod.slurm.status import job_queue
from superpod.slurm.status.job_queue import JobQueue
from superpod.slurm.submission.submit import job_name

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection


class JobsUnknown(enum.StrEnum):
    """The reason for which the jobs of a run are unknown."""

    NO_ANSWER = "Slurm does not answer"
    NOT_ASKED = "Slurm has not been queried since the run began"
    HIDDEN = "the state is from the run folder only: squeue may hide the jobs of other users (PrivateData=jobs)"
    UNREADABLE = "unreadable"
    """the run folder cannot be read"""


@dataclass(frozen=True)
class RunView:
    """A row of `recipes status`; None = unknown."""

    run: RunFolder
    state: State
    message: str = ""
    user: str = ""
    attempt: str = ""
    """name of the latest attempt"""
    attempts: int = 0
    """number of attempts"""
    step: int = 0
    max_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    eta_s: float | None = None
    checkpoint_step: int = 0
    checkpoint_age_s: float | None = None
    alarm: str = ""
    """warning about slower steps or too few queued jobs; "" = none"""
    resumed: tuple[str, ...] = ()
    """notes on corrupt checkpoints that the latest attempt moved away, and on lost steps"""
    jobs: list[QueuedJob] | None = field(default_factory=list)
    """pending and running jobs"""
    jobs_unknown: JobsUnknown | None = None
    """reason if `jobs` is None"""


def summarize_run(
    run: RunFolder,
    jobs: list[QueuedJob] | None,
    *,
    newest_cancelled: bool = False,
    jobs_unknown: JobsUnknown = JobsUnknown.NO_ANSWER,
) -> RunView:
    """Return a summary of a run. Writes nothing.

    Args:
        run: the run folder.
        jobs: pending and running jobs of the run; None = unknown, so that only the folder is used.
        newest_cancelled: whether Slurm reports that the job of the latest attempt was cancelled.
        jobs_unknown: reason if `jobs` is None.
    """
    now = time.time()
    lines, files = run.newest_metrics(), run.state_files()
    latest_attempt = run.attempts[-1] if run.attempts else None
    status = run_state.status_of(files, None if jobs is None else SlurmJobs(jobs, newest_cancelled), now)

    step, max_steps = _current_step(run, lines), run.facts.get("max_steps")
    step_s = progress.steady_step_s(lines)
    eta_s = None
    if max_steps and step_s and status.state.continues and status.state is not State.STALLED:
        eta_s = (max_steps - step) * step_s

    checkpoint_step, checkpoint_age_s = 0, None
    newest_checkpoint = guard.newest_checkpoint(run, checkpoint_files.seems_intact)
    if newest_checkpoint:
        checkpoint_step, checkpoint_age_s = step_of(newest_checkpoint.name) or 0, _age_s(newest_checkpoint, lines, now)

    return RunView(
        run=run,
        state=status.state,
        message=_message(run, status, jobs, jobs_unknown),
        user=owner.user_name(owner.owner_uid(run.path)),
        attempt=latest_attempt.name if latest_attempt else "",
        attempts=len(run.attempts),
        step=step,
        max_steps=max_steps,
        loss=next((line["loss"] for line in reversed(lines) if line.get("loss") is not None), None),
        tokens_per_s=_tokens_per_s(run, lines),
        mfu=_mfu(run, step_s),
        eta_s=eta_s,
        checkpoint_step=checkpoint_step,
        checkpoint_age_s=checkpoint_age_s,
        alarm=_alarm(run, lines, jobs, now) if status.state in (State.RUNNING, State.SAVING) else "",
        resumed=tuple(list_resume_notes(latest_attempt)) if latest_attempt else (),
        jobs=jobs,
        jobs_unknown=jobs_unknown if jobs is None else None,
    )


def _message(run: RunFolder, status: run_state.Status, jobs: list[QueuedJob] | None, jobs_unknown: JobsUnknown) -> str:
    """Return the message of the state, with notes on missing disk space and hidden jobs."""
    parts = [status.message]
    if status.state is State.REQUEUED and jobs:
        parts.append(_space_problem(run, jobs[0]) or "")
    if jobs is None and jobs_unknown is JobsUnknown.HIDDEN:  # concerns this run; NO_ANSWER concerns all runs
        parts.append(JobsUnknown.HIDDEN.value)
    return "; ".join(filter(None, parts))


def _alarm(run: RunFolder, lines: list[JsonObject], jobs: list[QueuedJob] | None, now: float) -> str:
    """Return a warning if the steps of a run have become slower, or too few jobs are queued to finish it; else ""."""
    slowdown = drift.alarm(run.metrics())
    if slowdown or jobs is None or run.is_local:
        return slowdown
    shortage = progress.alarm(run, lines, sum(job.state not in job_end.LIVE_STATES for job in jobs), now)
    if not shortage:
        return ""
    return f"{shortage}; to queue more: recipes top-up {shlex.quote(str(run.path))} --attempts N"


def _space_problem(run: RunFolder, job: QueuedJob) -> str | None:
    """Return a message if a running job waits for disk space before it opens an attempt; otherwise None."""
    # A job that has opened an attempt no longer waits for disk space.
    if job.state != "RUNNING" or _newest_job(run) == job.id:
        return None
    try:
        problem = full_disk.missing_space(run)
    except OSError:
        return None
    return f"waiting for disk space: {problem}" if problem else None


def _current_step(run: RunFolder, lines: list[JsonObject]) -> int:
    """Return the newest step in the metrics, or before the first step of an attempt the step that it resumed from.

    The newest step is not always the highest, because a resumed run repeats steps.
    """
    latest_attempt = run.attempts[-1] if run.attempts else None
    resumed_step = latest_attempt.resume.get("step") if latest_attempt else None
    has_steps = bool(lines) and latest_attempt is not None and lines[-1].get("attempt") == latest_attempt.name
    if isinstance(resumed_step, int) and not has_steps and not run.done:
        return resumed_step
    return lines[-1]["step"] if lines else 0


def _tokens_per_s(run: RunFolder, lines: list[JsonObject]) -> float | None:
    """Return the median tokens per second of the last 20 steps over all ranks; None if unknown."""
    rates = [line["tokens_per_s_per_gpu"] for line in lines[-20:] if is_number(line.get("tokens_per_s_per_gpu"))]
    return statistics.median(rates) * _count_ranks(run) if rates else None


def _count_ranks(run: RunFolder) -> int:
    """Return the number of ranks from run.json or, for a local run of an earlier version, from the heartbeats."""
    nodes, gpus = run.facts.get("nodes"), run.facts.get("gpus_per_node")
    if is_number(nodes) and is_number(gpus):
        return int(nodes * gpus)
    return max((len(attempt.heartbeats()) for attempt in run.attempts[-1:]), default=1) or 1


def _mfu(run: RunFolder, step_s: float | None) -> float | None:
    """Return the planned MFU scaled by planned / measured step time; None if unknown, or for a rehearsal."""
    layouts = (read_json(run.path / "plan.json") or {}).get("layouts")
    planned_layout = layouts[0] if isinstance(layouts, list) and layouts else None
    if not isinstance(planned_layout, dict):
        return None
    mfu, planned = planned_layout.get("mfu"), planned_layout.get("step_time_s")
    if run.facts.get("rehearsal") or not (is_number(mfu) and is_number(planned) and step_s):
        return None
    return float(mfu or 0) * float(planned or 0) / step_s


def _age_s(checkpoint: Path, lines: list[JsonObject], now: float) -> float | None:
    """Return the seconds since the step of a checkpoint; None if its folder was removed.

    If the metrics lack that step, the modification time of the folder is used, which `cp -r` changes.
    """
    step = step_of(checkpoint.name)
    times = [line["t"] for line in lines if line.get("step") == step and is_number(line.get("t"))]
    if times:
        return now - times[-1]
    try:
        return now - checkpoint.stat().st_mtime
    except OSError:
        return None


def summarize_runs(
    runs: list[RunFolder], connection: Connection, users: Mapping[Path, str] | None = None
) -> list[RunView]:
    """Return a summary per run, in order, with one query of Slurm for all of them. Writes nothing.

    Args:
        runs: the run folders.
        connection: connection to the cluster.
        users: owners of the runs if the folders are local copies, which belong to this user; otherwise None.
    """
    return SlurmSnapshot.query(runs, connection, users).summarize(runs)


@dataclass(frozen=True)
class SlurmSnapshot:
    """Slurm's answers about runs at one point in time."""

    queue: JobQueue | None = None
    """None = the controller did not answer"""
    ended: Mapping[str, str] = field(default_factory=dict)
    """final states by job id"""
    hidden: frozenset[Path] = frozenset()
    """runs of other users whose jobs Slurm may hide"""
    at: float = math.inf
    """Unix time of the query; jobs that began later are unknown"""

    @classmethod
    def query(
        cls, runs: list[RunFolder], connection: Connection, users: Mapping[Path, str] | None = None
    ) -> SlurmSnapshot:
        """Query Slurm once for all runs that run under Slurm; the arguments are those of `summarize_runs`."""
        users, at = users or {}, time.time()
        slurm_runs = [run for run in runs if not run.is_local]
        if not slurm_runs:
            return cls(JobQueue(), at=at)
        owners: set[str] = set()
        for run in slurm_runs:
            uid = owner.owner_uid(run.path)
            if uid is not None:
                owners.add(users.get(run.path) or str(uid))
        queue = job_queue.query_jobs(connection, owners or {str(os.geteuid())})
        if queue is None:
            return cls(None, at=at)
        idle_runs = [
            run for run in slurm_runs if job_name(str(run.path)) not in queue.active and not (run.done or run.stop)
        ]
        final_states = _ended_jobs(idle_runs, connection, queue)
        return cls(queue, final_states, frozenset(_hidden_runs(idle_runs, connection, users)), at)

    def summarize(self, runs: list[RunFolder], *, ask_later: bool = False) -> list[RunView]:
        """Return a summary per run, in order, from these answers and the run folders.

        With `ask_later`, the answers may be old: they are not used for runs and attempts that began after the query.
        """
        return [self._view(run, ask_later=ask_later) for run in runs]

    def _view(self, run: RunFolder, *, ask_later: bool) -> RunView:
        try:
            if run.path in self.hidden:
                return summarize_run(run, None, jobs_unknown=JobsUnknown.HIDDEN)
            if ask_later and self._is_new(run):
                return summarize_run(run, None, jobs_unknown=JobsUnknown.NOT_ASKED)
            if self.queue is None:
                return summarize_run(run, None, jobs_unknown=JobsUnknown.NO_ANSWER)
            jobs = self.queue.active.get(job_name(str(run.path)), [])
            return summarize_run(run, jobs, newest_cancelled=self.ended.get(_newest_job(run)) == job_end.CANCELLED)
        except Exception as error:  # one unreadable folder must not hide the other runs
            return unreadable_view(run, f"{type(error).__name__}: {error}")

    def _is_new(self, run: RunFolder) -> bool:
        """Return whether the run or its latest attempt began after the query."""
        attempts = run.attempts
        began = attempts[-1].result.get("started") if attempts else run.facts.get("t")
        return is_number(began) and began > self.at


def unreadable_view(run: RunFolder, reason: str) -> RunView:
    """Return the row of a run that cannot be read, with the reason as its message."""
    user = owner.user_name(owner.owner_uid(run.path))
    return RunView(run, State.UNREADABLE, reason, user=user, jobs=None, jobs_unknown=JobsUnknown.UNREADABLE)


def _newest_job(run: RunFolder) -> str:
    """Return the job id of the latest attempt; "" if there is none."""
    return str(run.attempts[-1].result.get("job", "")) if run.attempts else ""


def _ended_jobs(idle: list[RunFolder], connection: Connection, queue: JobQueue) -> dict[str, str]:
    """Return the final states of ended jobs by id, those purged from the controller from accounting.

    `idle` are runs without pending or running jobs.
    """
    jobs = [_newest_job(run) for run in idle]
    purged_jobs = [job for job in jobs if job not in queue.ended and job.isdecimal()]
    return job_queue.query_ended_jobs(connection, purged_jobs) | queue.ended


def _hidden_runs(idle: list[RunFolder], connection: Connection, users: Mapping[Path, str]) -> set[Path]:
    """Return the runs among `idle` that belong to other users and whose jobs Slurm may hide from this user."""
    others: dict[Path, str] = {}
    for run in idle:
        user = users.get(run.path) if users else owner.owner_uid(run.path)
        if user is not None and (users or user != os.geteuid()):
            others[run.path] = str(user)
    visible_user = job_queue.visible_user(connection) if others else None
    if visible_user is None:
        return set()
    return {path for path, user in others.items() if user not in visible_user}


def may_continue(view: RunView) -> bool:
    """Return whether more jobs can resume a run: not if it is done, cancelled, stopped or unreadable.

    A run whose jobs all failed without a stop marker, for example because of a full disk, can be resumed.
    """
    is_unstopped = view.state is State.FAILED and not view.run.done and view.run.stop is None
    return view.state.continues or is_unstopped


def missing_attempts(view: RunView, attempts: int) -> int:
    """Return the number of jobs to queue so that a run has `attempts` of them; 0 if it cannot resume."""
    if not may_continue(view) or view.jobs is None:
        return 0
    return max(0, attempts - len(view.jobs))
