"""Decide whether an attempt may start. It may not if the run is done, stopped or cancelled, or makes no progress.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from superpod.common.json_files import read_json, write_json
from superpod.diagnosis import job_end
from superpod.runtime.attempts import attempt_end, diagnose, progress
from superpod.runtime.checkpoints.checkpoint_folder import is_incomplete, is_own_folder, marked_names, step_of
from superpod.runtime.heartbeat import heartbeat_pages
from superpod.runtime.processes.command import output_of
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import CHAIN, RESUMED, STOP, State, StoppedBy


def newest_checkpoint(
    run: RunFolder, is_complete: Callable[[Path], bool] = lambda folder: not is_incomplete(folder)
) -> Path | None:
    """Return the newest checkpoint of a run for which `is_complete` returns True; None if there is none.

    By default, a checkpoint is complete if its save was not interrupted.
    """
    with contextlib.suppress(OSError):
        folders = list(run.checkpoints.iterdir())
        marked_folders = marked_names(folders)
        saved_folders = [folder for folder in folders if folder.name not in marked_folders and step_of(folder.name)]
        for folder in sorted(saved_folders, key=lambda folder: step_of(folder.name) or 0, reverse=True):
            with contextlib.suppress(OSError):
                if is_own_folder(folder) and is_complete(folder):
                    return folder
    return None


def newest_step(run: RunFolder) -> int:
    """Return the step of the newest checkpoint whose save was not interrupted; 0 if there is none."""
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        return 0
    return step_of(checkpoint.name) or 0


def reason_to_skip(
    run: RunFolder, end_of: Callable[[str], str], own_job: str, *, has_pending_export: bool = False
) -> str | None:
    """Return the reason why this job has nothing to do (the run is done, stopped or cancelled); None = it must run.

    `end_of` returns the final Slurm state of a job id; `own_job` is the id of this job. With `has_pending_export`, a
    trained run is not done, since it must still be exported.
    """
    files = run.state_files()
    if files.is_done and not has_pending_export:
        return f"{run.path} is done"
    if files.stop:
        return f"{run.path} is stopped: {files.stop.reason}"
    if files.attempt is None or files.was_resumed:
        return None
    job = str(files.attempt.result.get("job", ""))
    if not job or job == own_job:
        return None
    state = end_of(job)
    if not job_end.is_cancelled(state):
        return None
    canceller = attempt_end.who_cancelled(run, state)
    record_cancellation(run, job, state)
    with contextlib.suppress(Exception):
        run.attempts[-1].finish(State.CANCELLED, message=f"cancelled by {canceller} (scancel)")
    return f"{run.path}: job {job} was cancelled by {canceller}, so the run ends"


def record_cancellation(run: RunFolder, job: str, state: str) -> None:
    """Stop the run because its job `job` was cancelled. `state` is the job's state in Slurm, with the user's id.

    Slurm itself forgets the cancellation after MinJobAge.
    """
    stop(run, f"job {job} was cancelled by {attempt_end.who_cancelled(run, state)}", by=StoppedBy.USER)


def is_cancelled(run: RunFolder) -> bool:
    """Return whether the user has stopped the run. `recipes cancel` writes the marker before it calls scancel."""
    marker = run.stop
    return marker is not None and marker.by is StoppedBy.USER


def reason_to_stop(run: RunFolder, idle_attempts: int, failures: int) -> str | None:
    """Return the reason why no further attempt may start automatically; None if one may start.

    A run stops after `idle_attempts` consecutive attempts without progress, or more than `failures` failed attempts.
    """
    # Attempts before the user resumed the run are ignored.
    ended_attempts = [_finish(attempt) for attempt in run.attempts if int(attempt.name) > run.resumed_after]
    ended_attempts = [attempt for attempt in ended_attempts if attempt.counts]
    messages = [str(attempt.result.get("message", "")) for attempt in ended_attempts]
    idle = progress.idle_streak(progress.measure_attempts(run, ended_attempts, newest_step(run)))
    if len(idle) >= idle_attempts:
        newest_message = next(filter(None, reversed(messages)), "ended without a result")
        return f"{progress.describe_idle(idle)}; the last one: {newest_message}"
    failed_count = sum(attempt.result.get("state") == State.FAILED for attempt in ended_attempts)
    if failed_count > failures:
        return f"{failed_count} attempts failed, but only {failures} are allowed; the last one: {messages[-1]}"
    return None


def _finish(attempt: Attempt) -> Attempt:
    """Record the end of an attempt that was killed with its job, and return it. The caller holds the run's lock."""
    if "ended" in attempt.result:
        return attempt
    with contextlib.suppress(Exception):
        job = str(attempt.result.get("job", ""))
        if job and job == os.environ.get("SLURM_JOB_ID"):  # this job has started before, so Slurm has requeued it
            step_end = diagnose.step_end_reason(attempt)
            reason = step_end or "its node failed, it was preempted, or somebody ran scontrol requeue"
            attempt.finish(State.REQUEUED, message=f"Slurm requeued job {job}: {reason}")
            return attempt
        run = RunFolder(attempt.path.parents[1])
        end = attempt_end.find_end(run, attempt)
        if end:
            attempt.mark(State.RUNNING, **{attempt_end.KILLED: end.killed})
            attempt.finish(end.state, message=end.message)
            return attempt
        cause = diagnose.summarize(run, attempt).cause
        attempt.finish(State.FAILED, message=f"killed with its job or its node ({cause})")
    return attempt


def stop(run: RunFolder, reason: str, *, by: StoppedBy) -> None:
    """Write the marker `RUN/stop`, which prevents further attempts. On a full disk, the marker is an empty file."""
    try:
        write_json(run.path / STOP, {"t": time.time(), "reason": reason, "by": by.value}, even_in_place=True)
    except OSError:
        with contextlib.suppress(OSError):
            (run.path / STOP).touch()


def allow_resume(run: RunFolder) -> None:
    """Remove the marker `RUN/stop`, and let `reason_to_stop` ignore the attempts so far. Raises OSError."""
    write_json(run.path / RESUMED, {"after": int(run.attempts[-1].name) if run.attempts else 0})
    (run.path / STOP).unlink(missing_ok=True)


def save_seconds(run: RunFolder, minimum_s: float) -> float:
    """Return the seconds before the time limit at which ranks save: twice the longest save, at least `minimum_s`."""
    saves = [heartbeat_pages.longest_save_s(attempt.path / "heartbeat") for attempt in run.attempts]
    return max(minimum_s, 2 * max(saves, default=0.0))


def failure_message(run: RunFolder, attempt: Attempt, code: int) -> str:
    """Return the reason why the ranks failed, from their logs, or else from the last line or exit `code` of srun."""
    diagnosis = diagnose.summarize(run, attempt)
    if diagnosis.known:
        return diagnosis.cause
    with contextlib.suppress(OSError):
        lines = (attempt.path / "logs" / "srun.log").read_text(errors="replace").strip().splitlines()
        if lines:
            return f"{lines[-1][-400:]} (attempts/{attempt.name}/logs/srun.log)"
    return f"{diagnosis.cause} (srun exited with {code})"


def cancel_chain(run: RunFolder, job: str) -> None:
    """Cancel the pending jobs of a finished run, except `job`. If that fails, they start, find it done and exit."""
    jobs = [other for other in chained_jobs(run) if other != job]
    if jobs:
        output_of(["scancel", "--state=PENDING", *jobs], timeout_s=30)


def chained_jobs(run: RunFolder) -> list[str]:
    """Return the ids of all jobs that were submitted for a run, from CHAIN; [] if the file cannot be read."""
    jobs = (read_json(run.path / CHAIN) or {}).get("jobs")
    return [str(job) for job in jobs] if isinstance(jobs, list) else []
