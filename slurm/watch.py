"""The state of runs on a cluster, from their folders and from Slurm, so that logging out loses nothing."""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.node import drift, guard, stall
from superpod.node.files import JsonObject, is_number, read_json
from superpod.node.run_folder import Attempt, RunFolder
from superpod.slurm.submit import job_name

if TYPE_CHECKING:
    from superpod.slurm.connection import Connection

LIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")
STALLED_S = 600.0


@dataclass(frozen=True)
class Queued:
    """A job in Slurm's queue."""

    id: str
    state: str
    reason: str
    start: str


@dataclass(frozen=True)
class RunView:
    """One run, as `recipes status` shows it; None for unknown values."""

    run: RunFolder
    state: str
    message: str = ""
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
    jobs: list[Queued] = field(default_factory=list)


def queue(connection: Connection) -> dict[str, list[Queued]] | None:
    """This user's jobs by name; None when the controller does not answer."""
    try:
        output = connection.run(["squeue", "--me", "-h", "-o", "%i\x1f%j\x1f%T\x1f%r\x1f%S"], limit_s=30)
    except UserError:
        return None
    jobs: dict[str, list[Queued]] = {}
    for line in output.splitlines():
        job, name, state, reason, start = line.split("\x1f")
        jobs.setdefault(name, []).append(Queued(job, state, reason, start))
    return jobs


def view(run: RunFolder, jobs: list[Queued] | None, now: float | None = None) -> RunView:
    """Sum a run up. `jobs` are its jobs in the queue; None = Slurm does not answer, and the folder decides alone."""
    now = now or time.time()
    lines, facts = run.metrics(), run.facts
    state, message = state_of(run, jobs, now)
    # The median of the last steps: a save or a validation in between does not count.
    steady = [line["step_time_s"] for line in lines[-20:] if is_number(line.get("step_time_s"))]
    step_s = statistics.median(steady) if steady else None
    step = lines[-1]["step"] if lines else 0
    most = facts.get("max_steps")
    newest = guard.newest_step(run)
    moving = state in ("running", "saving", "requeued", "queued")
    return RunView(
        run=run,
        state=state,
        message=message,
        attempt=run.attempts[-1].name if run.attempts else "",
        attempts=len(run.attempts),
        step=step,
        max_steps=most,
        loss=next((line["loss"] for line in reversed(lines) if line.get("loss") is not None), None),
        tokens_per_s=_tokens(lines, facts),
        mfu=_mfu(run, step_s),
        eta_s=(most - step) * step_s if most and step_s and moving else None,
        checkpoint_step=newest,
        checkpoint_age_s=_age(run, now) if newest else None,
        alarm=drift.alarm(lines) if state in ("running", "saving") else "",
        jobs=jobs or [],
    )


def state_of(run: RunFolder, jobs: list[Queued] | None, now: float) -> tuple[str, str]:
    """State and why: the done marker first, then the stop marker, then the last attempt against the queue."""
    if run.done:
        return "done", ""
    if marker := guard.stopped(run):
        return ("cancelled" if marker.by is guard.StoppedBy.USER else "failed"), marker.reason
    last = run.attempts[-1] if run.attempts else None
    if last is None:
        return _waiting_state(jobs)
    state, message = str(last.result.get("state", "failed")), str(last.result.get("message", ""))
    job = str(last.result.get("job", ""))
    if jobs is None:
        return (state, message) if state not in ("running", "saving") else _live_state(run, last, now)
    current = next((queued for queued in jobs if queued.id == job), None)
    if current and current.state in LIVE and state in ("running", "saving", "stalled"):
        return _live_state(run, last, now)
    if jobs:  # the attempt has ended, and another job waits to go on
        first = jobs[0]
        why = (
            message
            if state not in ("running", "saving")
            else f"attempt {last.name} was killed with its job or its node"
        )
        return "requeued", f"{why}; job {first.id} is {first.state.lower()} ({first.reason})".lstrip("; ")
    if state in ("running", "saving", "stalled"):
        return "failed", f"attempt {last.name} was killed with its job, and nothing is queued"
    if state == "requeued":
        return "requeued", f"{message}; nothing is queued"
    return state, message


def _waiting_state(jobs: list[Queued] | None) -> tuple[str, str]:
    if jobs is None:
        return "queued", "Slurm does not answer"
    if not jobs:
        return "failed", "no attempt has begun, and nothing is queued: see slurm-*.out in the run folder"
    starts = jobs[0].start if jobs[0].start not in ("N/A", "") else ""
    return "queued", jobs[0].reason + (f", expected to start {starts}" if starts else "")


def _live_state(run: RunFolder, attempt: Attempt, now: float) -> tuple[str, str]:
    limit = run.facts.get("stalled_s")
    limit = float(limit) if is_number(limit) and limit else STALLED_S
    began = attempt.result.get("started")
    silent = stall.first_silent(attempt, limit, began if is_number(began) and began else now, now)
    if silent:
        return "stalled", silent
    return ("saving" if attempt.heartbeat().get("phase") == "save" else "running"), ""


def _tokens(lines: list[JsonObject], facts: JsonObject) -> float | None:
    rates = [line["tokens_per_s_per_gpu"] for line in lines[-20:] if is_number(line.get("tokens_per_s_per_gpu"))]
    gpus = facts.get("nodes", 1) * facts.get("gpus_per_node", 1)
    return statistics.median(rates) * gpus if rates else None


def _mfu(run: RunFolder, step_s: float | None) -> float | None:
    """The plan's MFU, scaled by how long a step really takes; none for a rehearsal."""
    plan = (read_json(run.path / "plan.json") or {}).get("layouts") or [{}]
    mfu, planned = plan[0].get("mfu"), plan[0].get("step_time_s")
    if run.facts.get("rehearsal") or not (is_number(mfu) and is_number(planned) and step_s):
        return None
    return float(mfu or 0) * float(planned or 0) / step_s


def _age(run: RunFolder, now: float) -> float | None:
    times = [p.stat().st_mtime for p in run.checkpoints.glob("*") if p.is_dir() and not p.is_symlink()]
    return now - max(times) if times else None


def views(runs: list[RunFolder], connection: Connection) -> list[RunView]:
    """Every run, in order; Slurm is asked once for all of them."""
    queued = queue(connection)
    seen = []
    for run in runs:
        # No jobs is [], an unknown queue None.
        jobs = None if queued is None else queued.get(job_name(str(run.path)), [])
        if jobs == [] and not run.done and _was_cancelled(run, connection):
            guard.stop(run, "cancelled by the user (scancel)", by=guard.StoppedBy.USER)
        seen.append(view(run, jobs))
    return seen


def _was_cancelled(run: RunFolder, connection: Connection) -> bool:
    """Whether the newest attempt's job was cancelled: the controller knows for a while, then accounting does."""
    job = str(run.attempts[-1].result.get("job", "")) if run.attempts else ""
    if not job or guard.stopped(run) or guard.was_resumed(run):
        return False
    for words, pattern in _ENDINGS:
        try:
            output = connection.run([word.replace("JOB", job) for word in words], limit_s=20)
        except UserError:
            continue
        if match := re.search(pattern, output):
            return match[1] == "CANCELLED"
    return False


_ENDINGS = (
    (("scontrol", "show", "job", "-o", "JOB"), r"\bJobState=([A-Z_]+)"),
    (("sacct", "-X", "-nP", "-j", "JOB", "-o", "State"), r"^([A-Z_]+)"),
)
"""Commands that tell how a job ended, and where their output has the state."""


def missing_attempts(seen: RunView, attempts: int) -> int:
    """How many attempts to add to the queue so that the run goes on by itself."""
    if seen.state not in ("queued", "running", "saving", "requeued", "stalled"):
        return 0
    return max(0, attempts - len(seen.jobs))
