"""The state of runs on a cluster, from their folders and from Slurm, so that logging out loses nothing."""

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

from superpod.common.files import JsonObject, is_number, read_json
from superpod.diagnosis import drift, ending
from superpod.reports.runs.attempts import resume_notes
from superpod.runtime.attempts import full_disk, guard, progress
from superpod.runtime.checkpoints import checkpoint_files
from superpod.runtime.checkpoints.checkpoints import step_of
from superpod.runtime.runs import owner, run_state
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import QueuedJob, SlurmJobs, State
from superpod.slurm.status import job_queue
from superpod.slurm.status.job_queue import JobQueue
from superpod.slurm.submission.submit import job_name

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection


class JobsUnknown(enum.StrEnum):
    """Why the jobs of a run are not known."""

    NO_ANSWER = "Slurm does not answer"
    NOT_ASKED = "Slurm has not been asked since it began"
    HIDDEN = "squeue shows no job of it, but may hide those of others (PrivateData=jobs): this is by its files alone"
    UNREADABLE = "unreadable"
    """the run folder cannot be read"""


@dataclass(frozen=True)
class RunView:
    """One run, as `recipes status` shows it; None for unknown values."""

    run: RunFolder
    state: State
    message: str = ""
    user: str = ""
    attempt: str = ""
    attempts: int = 0
    step: int = 0
    max_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    eta_s: float | None = None
    checkpoint_step: int = 0
    checkpoint_age_s: float | None = None
    alarm: str = ""
    resumed: tuple[str, ...] = ()
    """what the newest attempt did about damaged checkpoints: set aside, steps lost"""
    jobs: list[QueuedJob] | None = field(default_factory=list)
    """those that wait or run; None if unknown"""
    jobs_unknown: JobsUnknown | None = None
    """why `jobs` is None"""


def summarize_run(
    run: RunFolder,
    jobs: list[QueuedJob] | None,
    now: float | None = None,
    *,
    newest_cancelled: bool = False,
    jobs_unknown: JobsUnknown = JobsUnknown.NO_ANSWER,
) -> RunView:
    """Summarize a run; writes nothing.

    Args:
        run: its folder.
        jobs: its jobs in the queue; None = unknown for the reason `jobs_unknown`, and the folder decides alone.
        now: Unix time.
        newest_cancelled: whether the newest attempt's job was ended by scancel, if Slurm knows.
        jobs_unknown: why `jobs` is None.
    """
    now = now or time.time()
    lines, facts, files = run.newest_metrics(), run.facts, run.state_files()
    status = run_state.status_of(files, None if jobs is None else SlurmJobs(jobs, newest_cancelled), now)
    state, message = status.state, status.message
    if state is State.REQUEUED and jobs and (shortage := _space_problem(run, jobs[0])):
        message = f"{message}; {shortage}"
    if jobs is None and jobs_unknown is JobsUnknown.HIDDEN:  # of this run alone; NO_ANSWER concerns all runs
        message = "; ".join(filter(None, (message, JobsUnknown.HIDDEN.value)))
    step_s = progress.steady_step_s(lines)
    step = _step(run, lines)
    most = facts.get("max_steps")
    newest = guard.newest_checkpoint(run, checkpoint_files.seems_intact)
    is_moving = state.continues and state is not State.STALLED
    return RunView(
        run=run,
        state=state,
        message=message,
        user=owner.name_of(owner.uid_of(run.path)),
        attempt=run.attempts[-1].name if run.attempts else "",
        attempts=len(run.attempts),
        step=step,
        max_steps=most,
        loss=next((line["loss"] for line in reversed(lines) if line.get("loss") is not None), None),
        tokens_per_s=_tokens_per_s(run, lines),
        mfu=_mfu(run, step_s),
        eta_s=(most - step) * step_s if most and step_s and is_moving else None,
        checkpoint_step=(step_of(newest.name) or 0) if newest else 0,
        checkpoint_age_s=_age_s(newest, lines, now) if newest else None,
        alarm=_alarm(run, lines, jobs, now) if state in (State.RUNNING, State.SAVING) else "",
        resumed=tuple(resume_notes(run.attempts[-1])) if run.attempts else (),
        jobs=jobs,
        jobs_unknown=jobs_unknown if jobs is None else None,
    )


def _alarm(run: RunFolder, lines: list[JsonObject], jobs: list[QueuedJob] | None, now: float) -> str:
    """What is wrong with a run that runs: slower steps, or a chain that ends before it does."""
    if slower := drift.alarm(run.metrics()):
        return slower
    if jobs is None or run.is_local:
        return ""
    words = progress.alarm(run, lines, sum(job.state not in ending.LIVE for job in jobs), now)
    return f"{words}: recipes top-up {shlex.quote(str(run.path))} --attempts N" if words else ""


def _space_problem(run: RunFolder, job: QueuedJob) -> str | None:
    """The disk space that a job with nodes waits for before it opens an attempt; None if there is enough."""
    if job.state != "RUNNING" or _newest_job(run) == job.id:
        return None
    try:
        problem = full_disk.missing_space(run)
    except OSError:
        return None
    return f"waiting for disk space: {problem}" if problem else None


def _step(run: RunFolder, lines: list[JsonObject]) -> int:
    """The step that the run is at: the last one written, not the largest, as a resumed run repeats some.

    Before an attempt's first step it is the one that the attempt resumed from.
    """
    last = run.attempts[-1] if run.attempts else None
    resumed = last.resume.get("step") if last else None
    if last and isinstance(resumed, int) and not run.done and (not lines or lines[-1].get("attempt") != last.name):
        return resumed
    return lines[-1]["step"] if lines else 0


def _tokens_per_s(run: RunFolder, lines: list[JsonObject]) -> float | None:
    rates = [line["tokens_per_s_per_gpu"] for line in lines[-20:] if is_number(line.get("tokens_per_s_per_gpu"))]
    return statistics.median(rates) * _count_ranks(run) if rates else None


def _count_ranks(run: RunFolder) -> int:
    """Ranks of a run; where its facts do not tell (a local run of an earlier version), those that sent heartbeats."""
    nodes, gpus = run.facts.get("nodes"), run.facts.get("gpus_per_node")
    if is_number(nodes) and is_number(gpus):
        return int(nodes * gpus)
    return max((len(attempt.heartbeats()) for attempt in run.attempts[-1:]), default=1) or 1


def _mfu(run: RunFolder, step_s: float | None) -> float | None:
    """The plan's MFU, scaled by how long a step really takes; none for a rehearsal."""
    layouts = (read_json(run.path / "plan.json") or {}).get("layouts")
    planned_layout = layouts[0] if isinstance(layouts, list) and layouts else None
    if not isinstance(planned_layout, dict):
        return None
    mfu, planned = planned_layout.get("mfu"), planned_layout.get("step_time_s")
    if run.facts.get("rehearsal") or not (is_number(mfu) and is_number(planned) and step_s):
        return None
    return float(mfu or 0) * float(planned or 0) / step_s


def _age_s(checkpoint: Path, lines: list[JsonObject], now: float) -> float | None:
    """Seconds since the step that a checkpoint holds; since its folder changed, which `cp -r` does, where no line of
    metrics tells.
    """
    step = step_of(checkpoint.name)
    if times := [line["t"] for line in lines if line.get("step") == step and is_number(line.get("t"))]:
        return now - times[-1]
    try:
        return now - checkpoint.stat().st_mtime
    except OSError:
        return None  # removed meanwhile


def summarize_runs(
    runs: list[RunFolder], connection: Connection, users: Mapping[Path, str] | None = None
) -> list[RunView]:
    """Every run, in order; writes nothing. Slurm is asked once for all of them, and not at all where none needs it.

    `users` are the runs' owners where the folders here do not tell (copies of a remote cluster's).
    """
    return SlurmSnapshot.query(runs, connection, users).views(runs)


@dataclass(frozen=True)
class SlurmSnapshot:
    """What Slurm says of runs at one moment; their folders may go on changing."""

    queue: JobQueue | None = None
    """None = it does not answer"""
    ended: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[Path] = frozenset()
    """runs of which nobody knows the jobs: those of others, which Slurm does not show"""
    at: float = math.inf
    """Unix time; of jobs that have begun since, nothing is known"""

    @classmethod
    def query(
        cls, runs: list[RunFolder], connection: Connection, users: Mapping[Path, str] | None = None
    ) -> SlurmSnapshot:
        """Ask, once for all runs that are Slurm's; `users` like in `summarize_runs`."""
        users, at = users or {}, time.time()
        asking = [run for run in runs if not run.is_local]
        owners = {users.get(run.path) or str(uid) for run in asking if (uid := owner.uid_of(run.path)) is not None}
        queue = job_queue.query_jobs(connection, owners or {str(os.geteuid())}) if asking else JobQueue()
        idle = _runs_without_jobs(asking, queue) if queue else []
        ended = _ended_jobs(idle, connection, queue) if queue else {}
        return cls(queue, ended, frozenset(_hidden_runs(idle, connection, users)), at)

    def summarize_runs(self, runs: list[RunFolder], *, later: bool = False) -> list[RunView]:
        """Every run, in order, from these answers and its folder. `later`: of what has begun since, files decide."""
        return [self._view(run, later=later) for run in runs]

    def _view(self, run: RunFolder, *, later: bool) -> RunView:
        try:
            unknown = self._why_unknown(run, later=later)
            if self.queue is None or unknown:
                return summarize_run(run, None, jobs_unknown=unknown or JobsUnknown.NO_ANSWER)
            jobs = self.queue.active.get(job_name(str(run.path)), [])
            return summarize_run(run, jobs, newest_cancelled=self.ended.get(_newest_job(run)) == ending.CANCELLED)
        except Exception as error:  # whatever a folder holds, the other runs are shown
            return unreadable_view(run, f"{type(error).__name__}: {error}")

    def _why_unknown(self, run: RunFolder, *, later: bool) -> JobsUnknown | None:
        if run.path in self.hidden:
            return JobsUnknown.HIDDEN
        return JobsUnknown.NOT_ASKED if later and self._is_new(run) else None

    def _is_new(self, run: RunFolder) -> bool:
        """Whether the run, or its newest attempt, began after the answers."""
        attempts = run.attempts
        began = attempts[-1].result.get("started") if attempts else run.facts.get("t")
        return is_number(began) and began > self.at


def unreadable_view(run: RunFolder, why: str) -> RunView:
    """The row of a run that cannot be read."""
    user = owner.name_of(owner.uid_of(run.path))
    return RunView(run, State.UNREADABLE, why, user=user, jobs=None, jobs_unknown=JobsUnknown.UNREADABLE)


def _newest_job(run: RunFolder) -> str:
    return str(run.attempts[-1].result.get("job", "")) if run.attempts else ""


def _runs_without_jobs(runs: list[RunFolder], queue: JobQueue) -> list[RunFolder]:
    """Those that go on or have failed, by their files, and have no job in the queue."""
    return [run for run in runs if job_name(str(run.path)) not in queue.active and not (run.done or run.stop)]


def _ended_jobs(idle: list[RunFolder], connection: Connection, queue: JobQueue) -> dict[str, str]:
    """How the newest jobs of runs without one in the queue ended: the controller knows for a while, then accounting."""
    jobs = [_newest_job(run) for run in idle]
    forgotten = [job for job in jobs if job not in queue.ended and job.isdecimal()]
    return job_queue.query_ended_jobs(connection, forgotten) | queue.ended


def _hidden_runs(idle: list[RunFolder], connection: Connection, users: Mapping[Path, str]) -> set[Path]:
    """Of runs without a job in the queue, those of others, where this user sees only own jobs; they may have some."""
    owners = {run.path: users.get(run.path) if users else owner.uid_of(run.path) for run in idle}
    others = {path: str(who) for path, who in owners.items() if who is not None and (users or who != os.geteuid())}
    shown = job_queue.visible_user(connection) if others else None
    return set() if shown is None else {path for path, who in others.items() if who not in shown}


def may_continue(seen: RunView) -> bool:
    """Whether jobs, once queued, would continue the run: neither done, cancelled nor stopped, nor unreadable.

    A run whose jobs all failed without being stopped (a full disk, a torn result.json) only lacks jobs.
    """
    is_unstopped = seen.state is State.FAILED and not seen.run.done and seen.run.stop is None
    return seen.state.continues or is_unstopped


def missing_attempts(seen: RunView, attempts: int) -> int:
    """How many attempts to add to the queue so that the run continues by itself."""
    if not may_continue(seen) or seen.jobs is None:
        return 0
    return max(0, attempts - len(seen.jobs))
