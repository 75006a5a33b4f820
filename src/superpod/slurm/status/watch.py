"""The state of runs on a cluster, from their folders and from Slurm, so that logging out loses nothing."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common.files import JsonObject, is_number, read_json, tail_text
from superpod.diagnosis import drift, ending
from superpod.reports.runs.attempts import resume_notes
from superpod.runtime.attempts import full_disk, guard, progress
from superpod.runtime.checkpoints import checkpoint_files
from superpod.runtime.checkpoints.checkpoints import step_of
from superpod.runtime.heartbeat import stall
from superpod.runtime.runs import owner
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.slurm.status import job_queue
from superpod.slurm.status.job_queue import JobQueue, Queued
from superpod.slurm.submission.submit import SCRIPT, job_name

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection

STALLED_S = 600.0

SILENT = "Slurm does not answer"
NOT_ASKED = "Slurm has not been asked since it began"
HIDDEN = "squeue shows no job of it, but may hide those of others (PrivateData=jobs): this is by its files alone"
"""Why the jobs of a run are not known."""

UNREADABLE = "unreadable"
"""The state of a run whose folder cannot be read: a row of its own, so that the others are shown."""

GOES_ON = ("queued", "running", "saving", "requeued", "stalled")
"""States of a run that goes on by itself as long as jobs are queued."""

SUBMITTING_S = 120.0
"""So long after its folder was made, a run without jobs may still be about to be queued."""


@dataclass(frozen=True)
class RunView:
    """One run, as `recipes status` shows it; None for unknown values."""

    run: RunFolder
    state: str
    """one of run_folder.STATES, or UNREADABLE"""
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
    jobs: list[Queued] | None = field(default_factory=list)
    """those that wait or run; None where nobody knows"""
    jobs_unknown: str = ""
    """why `jobs` is None, in words"""


def view(
    run: RunFolder,
    jobs: list[Queued] | None,
    now: float | None = None,
    *,
    ended: str = "",
    jobs_unknown: str = SILENT,
) -> RunView:
    """Sum a run up; writes nothing.

    `jobs` are its jobs in the queue; None = they are not known, for the reason `jobs_unknown`, and the folder decides
    alone. `ended` is Slurm's word for how the newest attempt's job ended, where it is over and Slurm knows.
    """
    now = now or time.time()
    lines, facts = run.newest_metrics(), run.facts
    state, message = local_state(run, now) if is_local(run) else state_of(run, jobs, now, ended=ended)
    if jobs is None and jobs_unknown == HIDDEN:  # of this run alone; that Slurm does not answer is true of all
        message = "; ".join(filter(None, (message, HIDDEN)))
    step_s = progress.steady_step_s(lines)
    step = _step(run, lines)
    most = facts.get("max_steps")
    newest = guard.newest_checkpoint(run, checkpoint_files.seems_intact)
    moving = state in ("running", "saving", "requeued", "queued")
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
        tokens_per_s=_tokens(run, lines),
        mfu=_mfu(run, step_s),
        eta_s=(most - step) * step_s if most and step_s and moving else None,
        checkpoint_step=(step_of(newest.name) or 0) if newest else 0,
        checkpoint_age_s=_age_s(newest, lines, now) if newest else None,
        alarm=_alarm(run, lines, jobs, now) if state in ("running", "saving") else "",
        resumed=tuple(resume_notes(run.attempts[-1])) if run.attempts else (),
        jobs=jobs,
        jobs_unknown="" if jobs is not None else jobs_unknown,
    )


def _alarm(run: RunFolder, lines: list[JsonObject], jobs: list[Queued] | None, now: float) -> str:
    """What is wrong with a run that runs: slower steps, or a chain that ends before it does."""
    if slower := drift.alarm(run.metrics()):
        return slower
    if jobs is None or is_local(run):
        return ""
    words = progress.alarm(run, lines, sum(job.state not in ending.LIVE for job in jobs), now)
    return f"{words}: recipes top-up {shlex.quote(str(run.path))} --attempts N" if words else ""


def is_local(run: RunFolder) -> bool:
    """Whether a run was started by `recipes run` or `finetune`, so that a lock and not Slurm knows whether it lives."""
    last = run.attempts[-1] if run.attempts else None
    return not (run.path / SCRIPT).exists() and last is not None and not last.result.get("job", "?")


def local_state(run: RunFolder, now: float) -> tuple[str, str]:
    """State and why, of a run on this machine."""
    status = run.status()
    return _live_state(run, run.attempts[-1], now) if status.state == "running" else (status.state, status.message)


def state_of(run: RunFolder, jobs: list[Queued] | None, now: float, *, ended: str = "") -> tuple[str, str]:
    """State and why: the done marker first, then the stop marker, then the last attempt against the queue."""
    if run.done:
        status = run.status()
        return status.state, status.message
    if marker := guard.stopped(run):
        return ("cancelled" if marker.by is guard.StoppedBy.USER else "failed"), marker.reason
    last = run.attempts[-1] if run.attempts else None
    if last is None:
        return _waiting_state(run, jobs, now)
    if jobs == [] and ended == "CANCELLED" and not guard.was_resumed(run):
        return "cancelled", "cancelled by the user (scancel)"
    if not last.result:
        message = f"attempts/{last.name}/result.json cannot be read"  # torn: Slurm alone knows whether it lives
        live = bool(jobs) and jobs[0].state in ending.LIVE
        return _live_state(run, last, now) if live else _between_attempts(last, "failed", message, jobs)
    state, message = str(last.result.get("state", "failed")), str(last.result.get("message", ""))
    if state in ("running", "saving", "stalled") and _is_live(last, state, jobs):
        return _live_state(run, last, now)
    state, message = _between_attempts(last, state, message, jobs)
    if state == "requeued" and jobs == [] and (run.path / guard.CHAIN).exists():
        message += f": recipes top-up {shlex.quote(str(run.path))}"
    return state, message


def _is_live(last: Attempt, state: str, jobs: list[Queued] | None) -> bool:
    """Whether the newest attempt's job has its nodes; without an answer of Slurm, what the attempt wrote decides."""
    if jobs is None:
        return state != "stalled"
    job = str(last.result.get("job", ""))
    return any(queued.id == job and queued.state in ending.LIVE for queued in jobs)


def _between_attempts(last: Attempt, state: str, message: str, jobs: list[Queued] | None) -> tuple[str, str]:
    """State and why, after an attempt has ended; another job may wait to go on."""
    killed = state in ("running", "saving", "stalled")
    if jobs is None:
        return state, message
    if jobs:
        why = f"attempt {last.name} was killed with its job or its node" if killed else message
        job = f"job {jobs[0].id} is {jobs[0].state.lower()} ({jobs[0].reason})"
        return "requeued", "; ".join(filter(None, [why, job, _space_problem(last, jobs[0])]))
    if killed:
        return "failed", f"attempt {last.name} was killed with its job, and nothing is queued"
    return (state, f"{message}; nothing is queued") if state == "requeued" else (state, message)


def _space_problem(last: Attempt, job: Queued) -> str:
    """What a job that has its nodes, and opens no attempt, waits for: disk space."""
    if job.state != "RUNNING" or str(last.result.get("job", "")) == job.id:
        return ""
    try:
        problem = full_disk.missing_space(RunFolder(last.path.parents[1]))
    except OSError:
        return ""
    return f"waiting for disk space: {problem}" if problem else ""


def _waiting_state(run: RunFolder, jobs: list[Queued] | None, now: float) -> tuple[str, str]:
    """State and why, before the first attempt."""
    if jobs is None:
        return "queued", "no attempt has begun"
    if jobs:
        if jobs[0].reason == "DependencyNeverSatisfied":
            return "queued", "never starts: the job that it waits for has failed (DependencyNeverSatisfied); cancel it"
        starts = jobs[0].start if jobs[0].start not in ("N/A", "") else ""
        return "queued", jobs[0].reason + (f", expected to start {starts}" if starts else "")
    made = run.facts.get("t")
    submitted = (run.path / SCRIPT).exists() and not (run.path / guard.CHAIN).exists()
    if submitted and is_number(made) and now - made < SUBMITTING_S:
        return "queued", "being submitted"
    outputs = sorted(run.path.glob("slurm-*.out"))
    words = last_line(outputs[-1]) if outputs else ""
    why = f"{outputs[-1].name}: {words}" if words else "its jobs left the queue before they began"
    return "failed", f"no attempt has begun, and nothing is queued; {why}"


def last_line(path: Path) -> str:
    """The last line with words in it of a job's output; '' when there is none."""
    try:
        lines = tail_text(path, 4096).splitlines()
    except OSError:
        return ""
    return next((line.strip()[-400:] for line in reversed(lines) if line.strip()), "")


def _live_state(run: RunFolder, attempt: Attempt, now: float) -> tuple[str, str]:
    limit = run.facts.get("stalled_s")
    limit = float(limit) if is_number(limit) and limit else STALLED_S
    began = attempt.result.get("started")
    silent = stall.first_silent(attempt, limit, began if is_number(began) and began else now, now)
    if silent:
        return "stalled", silent
    return ("saving" if attempt.heartbeat().get("phase") == "save" else "running"), ""


def _step(run: RunFolder, lines: list[JsonObject]) -> int:
    """The step that the run is at: the last one written, not the largest, as a resumed run repeats some.

    Before an attempt's first step it is the one that the attempt resumed from.
    """
    last = run.attempts[-1] if run.attempts else None
    resumed = last.resume.get("step") if last else None
    if last and isinstance(resumed, int) and not run.done and (not lines or lines[-1].get("attempt") != last.name):
        return resumed
    return lines[-1]["step"] if lines else 0


def _tokens(run: RunFolder, lines: list[JsonObject]) -> float | None:
    rates = [line["tokens_per_s_per_gpu"] for line in lines[-20:] if is_number(line.get("tokens_per_s_per_gpu"))]
    return statistics.median(rates) * _ranks(run) if rates else None


def _ranks(run: RunFolder) -> int:
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


def views(runs: list[RunFolder], connection: Connection, users: Mapping[Path, str] | None = None) -> list[RunView]:
    """Every run, in order; writes nothing. Slurm is asked once for all of them, and not at all where none needs it.

    `users` are the runs' owners where the folders here do not tell (copies of a remote cluster's).
    """
    return Answers.of(runs, connection, users).views(runs)


@dataclass(frozen=True)
class Answers:
    """What Slurm says of runs at one moment; their folders may go on changing."""

    queue: JobQueue | None = None
    """None = it does not answer"""
    ended: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[Path] = frozenset()
    """runs of which nobody knows the jobs: those of others, which Slurm does not show"""
    at: float = math.inf
    """Unix time; of jobs that have begun since, nothing is known"""

    @classmethod
    def of(cls, runs: list[RunFolder], connection: Connection, users: Mapping[Path, str] | None = None) -> Answers:
        """Ask, once for all runs that are Slurm's; `users` as of `views`."""
        users, at = users or {}, time.time()
        asking = [run for run in runs if not is_local(run)]
        owners = {users.get(run.path) or str(uid) for run in asking if (uid := owner.uid_of(run.path)) is not None}
        queue = job_queue.ask(connection, owners or {str(os.geteuid())}) if asking else JobQueue()
        idle = _idle(asking, queue) if queue else []
        ended = _ended(idle, connection, queue) if queue else {}
        return cls(queue, ended, frozenset(_hidden(idle, connection, users)), at)

    def views(self, runs: list[RunFolder], *, later: bool = False) -> list[RunView]:
        """Every run, in order, from these answers and its folder. `later`: of what has begun since, files decide."""
        seen = []
        for run in runs:
            words = HIDDEN if run.path in self.hidden else NOT_ASKED if later and self._is_new(run) else SILENT
            # No jobs is [], unknown ones None.
            known = self.queue if words == SILENT else None
            jobs = known.active.get(job_name(str(run.path)), []) if known else None
            seen.append(_view_or_why_not(run, jobs, self.ended.get(_newest_job(run), ""), words))
        return seen

    def _is_new(self, run: RunFolder) -> bool:
        """Whether the run, or its newest attempt, began after the answers."""
        attempts = run.attempts
        began = attempts[-1].result.get("started") if attempts else run.facts.get("t")
        return is_number(began) and began > self.at


def _view_or_why_not(run: RunFolder, jobs: list[Queued] | None, ended: str, jobs_unknown: str) -> RunView:
    try:
        return view(run, jobs, ended=ended, jobs_unknown=jobs_unknown)
    except Exception as error:  # whatever a folder holds, the other runs are shown
        return unreadable(run, f"{type(error).__name__}: {error}")


def unreadable(run: RunFolder, why: str) -> RunView:
    """The row of a run that cannot be read."""
    return RunView(run, UNREADABLE, why, user=owner.name_of(owner.uid_of(run.path)), jobs=None, jobs_unknown=UNREADABLE)


def _newest_job(run: RunFolder) -> str:
    return str(run.attempts[-1].result.get("job", "")) if run.attempts else ""


def _idle(runs: list[RunFolder], queue: JobQueue) -> list[RunFolder]:
    """Those that go on or have failed, by their files, and have no job in the queue."""
    return [run for run in runs if job_name(str(run.path)) not in queue.active and not (run.done or guard.stopped(run))]


def _ended(idle: list[RunFolder], connection: Connection, queue: JobQueue) -> dict[str, str]:
    """How the newest jobs of runs without one in the queue ended: the controller knows for a while, then accounting."""
    jobs = [_newest_job(run) for run in idle]
    forgotten = [job for job in jobs if job not in queue.ended and job.isdecimal()]
    return job_queue.accounted(connection, forgotten) | queue.ended


def _hidden(idle: list[RunFolder], connection: Connection, users: Mapping[Path, str]) -> set[Path]:
    """Of runs without a job in the queue, those of others, where this user sees only own jobs; they may have some."""
    owners = {run.path: users.get(run.path) if users else owner.uid_of(run.path) for run in idle}
    others = {path: str(who) for path, who in owners.items() if who is not None and (users or who != os.geteuid())}
    shown = job_queue.only_shown(connection) if others else None
    return set() if shown is None else {path for path, who in others.items() if who not in shown}


def may_continue(seen: RunView) -> bool:
    """Whether jobs, once queued, would continue the run: neither done, cancelled nor stopped, nor unreadable.

    A run whose jobs all failed without being stopped (a full disk, a torn result.json) only lacks jobs.
    """
    is_unstopped = seen.state == "failed" and not seen.run.done and guard.stopped(seen.run) is None
    return seen.state in GOES_ON or is_unstopped


def missing_attempts(seen: RunView, attempts: int) -> int:
    """How many attempts to add to the queue so that the run continues by itself."""
    if not may_continue(seen) or seen.jobs is None:
        return 0
    return max(0, attempts - len(seen.jobs))
