"""Determine the state of a run from the files in its folder and its Slurm jobs.

`RunFolder.state_files` reads the files, and `status_of` determines the state. This module does not access files, so
that every case can be tested. Standard library only.
"""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from superpod.common.json_files import JsonObject, is_number, number_or_none
from superpod.diagnosis import job_end
from superpod.runtime.heartbeat import stall

DONE = "done"
"""`RUN/done`, written by the job once max_steps are trained and the last checkpoint is saved."""

STOP = "stop"
"""`RUN/stop`, the marker that prevents further attempts: `{"t": Unix time, "reason": text, "by": StoppedBy}`."""

RESUMED = "again.json"
"""`RUN/again.json`, written when the user resumes a stopped run: `{"after": number of its newest attempt}`."""

CHAIN = "chain.json"
"""`RUN/chain.json`, the jobs that were queued for a run: `{"jobs": [ids]}`."""

SCRIPT = "job.sbatch"
"""The batch script of a run, written by `recipes submit`."""

UNRECORDED = "ended without a result (killed?)"
"""Message of a local attempt that was killed before it recorded its end."""

LAUNCHER_KILLED = "killed"
"""Key of result.json: a sentence about the killed launcher of a local run, written by its watchdog."""

STALLED_S = 600.0
"""Default stall timeout: seconds without progress after which a rank counts as stalled."""

SUBMITTING_S = 120.0
"""Seconds after the creation of its folder in which a run without jobs counts as being submitted."""


class State(str, enum.Enum):
    """The state of a run or of an attempt. (`enum.StrEnum` needs Python 3.11.)"""

    QUEUED = "queued"
    RUNNING = "running"
    SAVING = "saving"
    REQUEUED = "requeued"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    UNREADABLE = "unreadable"
    """the run folder cannot be read; never recorded by an attempt"""

    def __str__(self) -> str:
        return self.value

    @property
    def continues(self) -> bool:
        """Whether a run in this state continues automatically if jobs are queued."""
        return self in (State.QUEUED, State.RUNNING, State.SAVING, State.REQUEUED, State.STALLED)


STATES = tuple(state for state in State if state is not State.UNREADABLE)
"""States that an attempt can record in result.json."""


class StoppedBy(str, enum.Enum):
    """Who stopped a run."""

    USER = "user"
    AUTOMATIC = "guard"
    """stopped automatically by attempts/guard.py: no progress, or too many failures"""


@dataclass(frozen=True)
class Stop:
    """The content of `RUN/stop`."""

    reason: str
    by: StoppedBy

    @classmethod
    def from_marker(cls, marker: JsonObject | None) -> Stop:
        """Parse the content of `RUN/stop`; None = unreadable, which stops the run too."""
        if marker is None:
            return cls(f"the file {STOP} exists, but does not contain a reason", StoppedBy.AUTOMATIC)
        reason, by = str(marker.get("reason", "?")), marker.get("by")
        if by in [member.value for member in StoppedBy]:
            return cls(reason, StoppedBy(by))
        # Markers of version 0.1 have no `by`; the reason for a cancellation by the user begins with these words.
        is_by_user = re.match(r"(job \d+ was )?cancelled by the user", reason)
        return cls(reason, StoppedBy.USER if is_by_user else StoppedBy.AUTOMATIC)


@dataclass(frozen=True)
class QueuedJob:
    """A job in Slurm's queue; the fields are those of squeue."""

    id: str
    state: str
    reason: str
    start: str


@dataclass(frozen=True)
class SlurmJobs:
    """The Slurm jobs of a run."""

    queued: Sequence[QueuedJob]
    """pending and running jobs, in the order of their ids"""
    newest_cancelled: bool = False
    """whether the job of the newest attempt was cancelled by scancel"""


@dataclass(frozen=True)
class AttemptFiles:
    """The content of the newest attempt's files."""

    name: str
    result: JsonObject
    """result.json; {} if it is missing or incomplete"""
    heartbeats: Mapping[int, JsonObject] = field(default_factory=dict)
    """rank -> newest heartbeat; empty for an attempt that cannot be running"""

    @property
    def is_local(self) -> bool:
        """Whether the attempt runs without Slurm, so that a lock shows whether it is running."""
        return self.result.get("job") == ""

    @property
    def state(self) -> State:
        """The state in result.json; failed if it is missing."""
        return State(self.result.get("state", State.FAILED))

    @property
    def message(self) -> str:
        """The message in result.json; '' if it is missing."""
        return str(self.result.get("message", ""))

    @property
    def may_be_alive(self) -> bool:
        """Whether the attempt has not recorded its end and may be running."""
        return not self.result or self.state in (State.RUNNING, State.SAVING, State.STALLED)


@dataclass(frozen=True)
class RunFiles:
    """The content of the files that determine the state of a run, read at one point in time."""

    path: Path
    facts: JsonObject = field(default_factory=dict)
    """run.json"""
    is_done: bool = False
    """whether DONE exists"""
    stop: Stop | None = None
    resumed_after: int = 0
    """number of the newest attempt when the user resumed a stopped run; 0 = never"""
    pending_export: str | None = None
    """the folder that a trained run must still export"""
    is_locked: bool = False
    """whether a launcher or a rank holds the lock; False if the state does not depend on it"""
    attempt: AttemptFiles | None = None
    """the newest attempt; None before the first"""
    has_script: bool = False
    has_chain: bool = False
    job_output: str | None = None
    """for a run without attempts: file name and last line of its newest job's output"""

    @property
    def is_local(self) -> bool:
        """Whether the run was started without Slurm."""
        return is_local(self.attempt, has_script=self.has_script)

    @property
    def was_resumed(self) -> bool:
        """Whether the user has resumed the stopped run since its newest attempt."""
        return self.attempt is not None and int(self.attempt.name) <= self.resumed_after


def is_local(attempt: AttemptFiles | None, *, has_script: bool) -> bool:
    """Return whether a run was started without Slurm, from its newest attempt and the existence of SCRIPT."""
    return not has_script and attempt is not None and attempt.is_local


class Cause(enum.Enum):
    """Causes of a state that need special handling."""

    UNRECORDED = enum.auto()
    """a local attempt was killed before it recorded its end"""


@dataclass(frozen=True)
class Status:
    """The state of a run, with its reason and facts about the newest attempt."""

    state: State
    message: str = ""
    attempt: str = ""
    """name of the newest attempt; '' before the first"""
    exit_code: int | None = None
    cause: Cause | None = None


def status_of(files: RunFiles, slurm: SlurmJobs | None, now: float) -> Status:
    """Return the status of a run from its files and its Slurm jobs.

    `slurm` is ignored for a local run; None = the jobs are unknown, so that only the files are used. `now` is the Unix
    time for stall detection.
    """
    if files.is_done:
        return _done_status(files)
    if files.is_local:
        return _local_status(files, now)
    if files.stop:
        state = State.CANCELLED if files.stop.by is StoppedBy.USER else State.FAILED
        return _status(files, state, files.stop.reason)
    if files.attempt is None:
        return _status(files, *_state_before_first_attempt(files, slurm, now))
    return _slurm_status(files, files.attempt, slurm, now)


def _status(files: RunFiles, state: State, message: str = "", cause: Cause | None = None) -> Status:
    """Return a status with the name and exit code of the newest attempt."""
    if files.attempt is None:
        return Status(state, message)
    return Status(state, message, files.attempt.name, files.attempt.result.get("exit_code"), cause)


def _done_status(files: RunFiles) -> Status:
    """Return the status of a run with a done marker: done, unless its export or more steps are pending."""
    if files.pending_export:
        return _pending_export_status(files, files.pending_export)
    if files.attempt is None:
        return _status(files, State.DONE)
    steps_before = files.attempt.result.get("was_done")
    if steps_before is None or files.attempt.state is State.DONE:
        return _status(files, State.DONE)
    no_step_message = f"no new step was trained; the run was already done at step {steps_before}"
    return _status(files, files.attempt.state, _join(files.attempt.message, no_step_message))


def _pending_export_status(files: RunFiles, folder: str) -> Status:
    """Return the status of a trained run that must still export to `folder`."""
    if files.is_locked:
        return _status(files, State.RUNNING, "trained; exporting the best checkpoint")
    hint = resume_hint(files.path, files.facts)
    pending_message = f"trained to its last step, but {folder} was not written; {hint} with the export"
    result = files.attempt.result if files.attempt else {}
    why = result.get(LAUNCHER_KILLED)
    if not why and result.get("state") == State.FAILED:
        why = result.get("message")
    return _status(files, State.FAILED, _join(why, pending_message))


def _local_status(files: RunFiles, now: float) -> Status:
    """Return the status of a local run that is not done. Its processes hold its locks while they run."""
    attempt = files.attempt
    assert attempt is not None
    if attempt.state not in (State.RUNNING, State.SAVING):
        return _status(files, attempt.state, attempt.message)
    if not files.is_locked:
        return _status(files, State.FAILED, UNRECORDED, Cause.UNRECORDED)
    return _live_status(files, attempt, now)


def _slurm_status(files: RunFiles, attempt: AttemptFiles, slurm: SlurmJobs | None, now: float) -> Status:
    """Return the status of an unfinished Slurm run, based on its newest attempt and its jobs."""
    if slurm and not slurm.queued and slurm.newest_cancelled and not files.was_resumed:
        return _status(files, State.CANCELLED, "cancelled by the user (scancel)")
    if attempt.may_be_alive and _has_nodes(attempt, slurm):
        return _live_status(files, attempt, now)
    state, message = _state_between_attempts(attempt, slurm)
    if state is State.REQUEUED and slurm and not slurm.queued and files.has_chain:
        message += f": run `recipes top-up {shlex.quote(str(files.path))}`"
    return _status(files, state, message)


def _has_nodes(attempt: AttemptFiles, slurm: SlurmJobs | None) -> bool:
    """Return whether the job of an attempt is running; without `slurm`, from its recorded state."""
    if not attempt.result:  # the id of its job is unknown, but a run has only one running job
        return slurm is not None and len(slurm.queued) > 0 and slurm.queued[0].state in job_end.LIVE_STATES
    if slurm is None:
        return attempt.state is not State.STALLED
    job = str(attempt.result.get("job", ""))
    return any(queued.id == job and queued.state in job_end.LIVE_STATES for queued in slurm.queued)


def _state_between_attempts(attempt: AttemptFiles, slurm: SlurmJobs | None) -> tuple[State, str]:
    """Return the state and message of a Slurm run whose newest attempt is not running. A job may be queued."""
    state, message = attempt.state, attempt.message
    if not attempt.result:
        message = f"attempts/{attempt.name}/result.json cannot be read"
    was_killed = bool(attempt.result) and attempt.may_be_alive
    if slurm is None:
        return state, message
    if slurm.queued:
        job = slurm.queued[0]
        why = f"attempt {attempt.name} was killed with its job or its node" if was_killed else message
        return State.REQUEUED, _join(why, f"job {job.id} is {job.state.lower()} ({job.reason})")
    if was_killed:
        return State.FAILED, f"attempt {attempt.name} was killed with its job, and no job is queued"
    if state is State.REQUEUED:
        message = f"{message}; no job is queued"
    return state, message


def _state_before_first_attempt(files: RunFiles, slurm: SlurmJobs | None, now: float) -> tuple[State, str]:
    """Return the state and message of a Slurm run without attempts: queued, or failed if no job is left."""
    if slurm is None:
        return State.QUEUED, "no attempt has started"
    if slurm.queued:
        job = slurm.queued[0]
        if job.reason == "DependencyNeverSatisfied":
            message = "will never start: the job on which it depends has failed (DependencyNeverSatisfied); cancel it"
            return State.QUEUED, message
        if job.start in ("N/A", ""):
            return State.QUEUED, job.reason
        return State.QUEUED, f"{job.reason}, expected to start {job.start}"
    created = files.facts.get("t")
    is_submitting = files.has_script and not files.has_chain
    if is_submitting and is_number(created) and now - created < SUBMITTING_S:
        return State.QUEUED, "being submitted"
    why = files.job_output or "its jobs left the queue before they started"
    return State.FAILED, f"no attempt has started, and no job is queued; {why}"


def _live_status(files: RunFiles, attempt: AttemptFiles, now: float) -> Status:
    """Return the status of a run whose processes are running, from its heartbeats: stalled, saving or running."""
    timeout_s = number_or_none(files.facts.get("stalled_s")) or STALLED_S
    start_time = number_or_none(attempt.result.get("started"))
    ran_s = now - start_time if start_time else 0.0
    nodes = attempt.result.get("nodes")
    stall_message = stall.silent_rank(
        attempt.heartbeats, nodes if isinstance(nodes, list) else [], timeout_s, ran_s, now
    )
    if stall_message:
        return _status(files, State.STALLED, stall_message)
    is_saving = attempt.heartbeats.get(0, {}).get("phase") == "save"
    # The message of a stalled attempt is obsolete once its ranks make progress.
    message = "" if attempt.state is State.STALLED else attempt.message
    return _status(files, State.SAVING if is_saving else State.RUNNING, message)


def resume_hint(path: Path, facts: JsonObject) -> str:
    """Return the clause "`recipes run ...` resumes it" for the run at `path`; `facts` is its run.json."""
    recipe, cluster = facts.get("recipe", path.parent.name), facts.get("cluster")
    command = f"{recipe} --resume {shlex.quote(str(path))}"
    if cluster:
        return f"`recipes submit {command} --cluster {shlex.quote(str(cluster))}` resumes it"
    verb = "finetune" if "finetune" in facts else "run"
    return f"`recipes {verb} {command}` resumes it"


def _join(*parts: object) -> str:
    """Join the parts that are not empty by semicolons."""
    return "; ".join(str(part) for part in parts if part)
