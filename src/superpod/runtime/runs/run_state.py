"""The state of a run, decided in one place: from what its folder holds, and what Slurm says about its jobs.

`RunFolder.state_files` reads, `status_of` decides. Nothing here touches a file, so that every case can be tested.
Standard library only.
"""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from superpod.common.files import JsonObject, is_number
from superpod.diagnosis import job_end
from superpod.runtime.heartbeat import stall

DONE = "done"
"""`RUN/done`, written inside the job: max_steps are reached and the last checkpoint is saved."""

STOP = "stop"
"""`RUN/stop`, the marker of a run that must not continue by itself: `{"t": Unix time, "reason": text, "by": ...}`."""

RESUMED = "again.json"
"""Written when the user resumes a stopped run: `{"after": number of its newest attempt}`."""

CHAIN = "chain.json"
"""The jobs that were queued for a run: `{"jobs": [ids]}`."""

SCRIPT = "job.sbatch"
"""The batch script of a run that `recipes submit` has queued."""

UNRECORDED = "ended without a result (killed?)"
"""The message of a local attempt that was killed."""

LAUNCHER_KILLED = "killed"
"""Key of result.json: a clause on when the launcher of a local run was killed, written by its watchdog."""

STALLED_S = 600.0
"""Seconds without progress after which a rank counts as stalled, unless run.json sets its own."""

SUBMITTING_S = 120.0
"""Seconds after the creation of its folder in which a run without jobs may still be about to be queued."""


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
    """only of a folder that cannot be read; no attempt records it"""

    def __str__(self) -> str:
        return self.value

    @property
    def continues(self) -> bool:
        """Whether a run in this state continues by itself as long as jobs are queued."""
        return self in (State.QUEUED, State.RUNNING, State.SAVING, State.REQUEUED, State.STALLED)


STATES = tuple(state for state in State if state is not State.UNREADABLE)
"""What an attempt can record in result.json."""


class StoppedBy(str, enum.Enum):
    """Who stopped a run."""

    USER = "user"
    GUARD = "guard"
    """attempts/guard.py: no progress, or too many failures"""


@dataclass(frozen=True)
class Stop:
    """The content of `RUN/stop`."""

    reason: str
    by: StoppedBy

    @classmethod
    def from_marker(cls, marker: JsonObject | None) -> Stop:
        """From the file's content, None if it cannot be read: a stop marker counts all the same."""
        if marker is None:
            return cls(f"{STOP} is there, but does not say why", StoppedBy.GUARD)
        reason, by = str(marker.get("reason", "?")), marker.get("by")
        if by in [member.value for member in StoppedBy]:
            return cls(reason, StoppedBy(by))
        # Markers of version 0.1 have no `by`; this is how every cancellation by a user begins there.
        is_users = re.match(r"(job \d+ was )?cancelled by the user", reason)
        return cls(reason, StoppedBy.USER if is_users else StoppedBy.GUARD)


@dataclass(frozen=True)
class QueuedJob:
    """A job in Slurm's queue, in squeue's words."""

    id: str
    state: str
    reason: str
    start: str


@dataclass(frozen=True)
class SlurmJobs:
    """What Slurm says about the jobs of a run."""

    queued: Sequence[QueuedJob]
    """those that wait or run, in the order of their ids"""
    newest_cancelled: bool = False
    """whether the job of the newest attempt was ended by scancel"""


@dataclass(frozen=True)
class AttemptFiles:
    """What was read of the newest attempt."""

    name: str
    result: JsonObject
    """result.json; {} if it is missing or torn"""
    heartbeats: Mapping[int, JsonObject] = field(default_factory=dict)
    """the newest of every rank; read only for an attempt that may be alive"""

    @property
    def is_local(self) -> bool:
        """Whether no Slurm job ran it, so that a lock and not Slurm knows whether it lives."""
        return self.result.get("job") == ""

    @property
    def state(self) -> State:
        """As it recorded it."""
        return State(self.result.get("state", State.FAILED))

    @property
    def message(self) -> str:
        """As it recorded it."""
        return str(self.result.get("message", ""))

    @property
    def may_be_alive(self) -> bool:
        """Whether it has not recorded its end."""
        return not self.result or self.state in (State.RUNNING, State.SAVING, State.STALLED)


@dataclass(frozen=True)
class RunFiles:
    """What was read of a run folder at one moment: all that decides its state."""

    path: Path
    facts: JsonObject = field(default_factory=dict)
    """run.json"""
    is_done: bool = False
    """DONE is there"""
    stop: Stop | None = None
    resumed_after: int = 0
    """number of the newest attempt when the user resumed a stopped run; 0 = never"""
    pending_export: str | None = None
    """the folder that a trained run must still write"""
    is_locked: bool = False
    """a launcher or a rank holds the run; read only where it decides"""
    attempt: AttemptFiles | None = None
    """the newest; None before the first"""
    has_script: bool = False
    has_chain: bool = False
    job_output: str | None = None
    """of a run without an attempt: the name and last line of its newest job's output"""

    @property
    def is_local(self) -> bool:
        """Whether the run is one of this machine, about which Slurm knows nothing."""
        return is_local(self.attempt, has_script=self.has_script)

    @property
    def was_resumed(self) -> bool:
        """Whether the user has resumed the run after its newest attempt."""
        return self.attempt is not None and int(self.attempt.name) <= self.resumed_after


def is_local(attempt: AttemptFiles | None, *, has_script: bool) -> bool:
    """Whether a run was started by `recipes run` or `finetune`, by its newest attempt and whether it has SCRIPT."""
    return not has_script and attempt is not None and attempt.is_local


class Cause(enum.Enum):
    """Causes of a state that callers act on."""

    UNRECORDED = enum.auto()
    """a local attempt ended without recording how: it was killed"""


@dataclass(frozen=True)
class Status:
    """The status of a run: `message` says why, `attempt` is the newest attempt's name or ''."""

    state: State
    message: str = ""
    attempt: str = ""
    exit_code: int | None = None
    cause: Cause | None = None


def status_of(files: RunFiles, slurm: SlurmJobs | None, now: float) -> Status:
    """The status of a run.

    Args:
        files: what its folder holds.
        slurm: its jobs; None = unknown, and the files decide alone. Not used for a run on this machine.
        now: Unix time, which tells how long ranks have been silent.
    """
    if files.is_done:
        return _done_status(files)
    if files.is_local:
        return _local_status(files, now)
    if files.stop:
        state = State.CANCELLED if files.stop.by is StoppedBy.USER else State.FAILED
        return _status(files, state, files.stop.reason)
    if files.attempt is None:
        return _status(files, *_state_before_the_first_attempt(files, slurm, now))
    return _slurm_status(files, files.attempt, slurm, now)


def _status(files: RunFiles, state: State, message: str = "", cause: Cause | None = None) -> Status:
    if files.attempt is None:
        return Status(state, message)
    return Status(state, message, files.attempt.name, files.attempt.result.get("exit_code"), cause)


def _done_status(files: RunFiles) -> Status:
    """Of a run with a done marker: done, unless an export is pending or its newest attempt was to add steps."""
    if files.pending_export:
        return _pending_export_status(files, files.pending_export)
    if files.attempt is None:
        return _status(files, State.DONE)
    steps_before = files.attempt.result.get("was_done")
    if steps_before is None or files.attempt.state is State.DONE:
        return _status(files, State.DONE)
    unchanged = f"no new step was made, and the run was done at step {steps_before} before"
    return _status(files, files.attempt.state, _joined(files.attempt.message, unchanged))


def _pending_export_status(files: RunFiles, folder: str) -> Status:
    if files.is_locked:
        return _status(files, State.RUNNING, "trained; exporting the best checkpoint")
    pending = (
        f"trained to its last step, but {folder} is not written; {resume_hint(files.path, files.facts)} with the export"
    )
    result = files.attempt.result if files.attempt else {}
    why = result.get(LAUNCHER_KILLED)
    if not why and result.get("state") == State.FAILED:
        why = result.get("message")
    return _status(files, State.FAILED, _joined(why, pending))


def _local_status(files: RunFiles, now: float) -> Status:
    """Of a run on this machine: its processes hold its locks as long as they live."""
    attempt = files.attempt
    assert attempt is not None
    if attempt.state not in (State.RUNNING, State.SAVING):
        return _status(files, attempt.state, attempt.message)
    if not files.is_locked:
        return _status(files, State.FAILED, UNRECORDED, Cause.UNRECORDED)
    return _live_status(files, attempt, now)


def _slurm_status(files: RunFiles, attempt: AttemptFiles, slurm: SlurmJobs | None, now: float) -> Status:
    """Of a run on Slurm that is neither done nor stopped, by its newest attempt and its jobs."""
    if slurm and not slurm.queued and slurm.newest_cancelled and not files.was_resumed:
        return _status(files, State.CANCELLED, "cancelled by the user (scancel)")
    if attempt.may_be_alive and _has_nodes(attempt, slurm):
        return _live_status(files, attempt, now)
    state, message = _state_between_attempts(attempt, slurm)
    if state is State.REQUEUED and slurm and not slurm.queued and files.has_chain:
        message += f": recipes top-up {shlex.quote(str(files.path))}"
    return _status(files, state, message)


def _has_nodes(attempt: AttemptFiles, slurm: SlurmJobs | None) -> bool:
    """Whether the newest attempt's job is running; if Slurm does not answer, what the attempt recorded decides."""
    if not attempt.result:  # torn: the job is not known, but no run has two
        return slurm is not None and len(slurm.queued) > 0 and slurm.queued[0].state in job_end.LIVE
    if slurm is None:
        return attempt.state is not State.STALLED
    job = str(attempt.result.get("job", ""))
    return any(queued.id == job and queued.state in job_end.LIVE for queued in slurm.queued)


def _state_between_attempts(attempt: AttemptFiles, slurm: SlurmJobs | None) -> tuple[State, str]:
    """State and message when no attempt is running; another job may be queued."""
    state, message = attempt.state, attempt.message
    if not attempt.result:
        message = f"attempts/{attempt.name}/result.json cannot be read"
    was_killed = bool(attempt.result) and attempt.may_be_alive
    if slurm is None:
        return state, message
    if slurm.queued:
        job = slurm.queued[0]
        why = f"attempt {attempt.name} was killed with its job or its node" if was_killed else message
        return State.REQUEUED, _joined(why, f"job {job.id} is {job.state.lower()} ({job.reason})")
    if was_killed:
        return State.FAILED, f"attempt {attempt.name} was killed with its job, and nothing is queued"
    return state, f"{message}; nothing is queued" if state is State.REQUEUED else message


def _state_before_the_first_attempt(files: RunFiles, slurm: SlurmJobs | None, now: float) -> tuple[State, str]:
    if slurm is None:
        return State.QUEUED, "no attempt has begun"
    if slurm.queued:
        job = slurm.queued[0]
        if job.reason == "DependencyNeverSatisfied":
            never = "never starts: the job that it waits for has failed (DependencyNeverSatisfied); cancel it"
            return State.QUEUED, never
        is_known = job.start not in ("N/A", "")
        return State.QUEUED, f"{job.reason}, expected to start {job.start}" if is_known else job.reason
    created = files.facts.get("t")
    is_submitted = files.has_script and not files.has_chain
    if is_submitted and is_number(created) and now - created < SUBMITTING_S:
        return State.QUEUED, "being submitted"
    why = files.job_output or "its jobs left the queue before they began"
    return State.FAILED, f"no attempt has begun, and nothing is queued; {why}"


def _live_status(files: RunFiles, attempt: AttemptFiles, now: float) -> Status:
    """Of a run whose processes live: stalled, saving or running, by their heartbeats."""
    own_limit = files.facts.get("stalled_s")
    limit = float(own_limit) if is_number(own_limit) and own_limit else STALLED_S
    started = attempt.result.get("started")
    ran_s = now - started if is_number(started) and started else 0.0
    nodes = attempt.result.get("nodes")
    silent = stall.silent_rank(attempt.heartbeats, nodes if isinstance(nodes, list) else [], limit, ran_s, now)
    if silent:
        return _status(files, State.STALLED, silent)
    is_saving = attempt.heartbeats.get(0, {}).get("phase") == "save"
    # The message of an attempt that was stalled is out of date once its ranks go on.
    message = "" if attempt.state is State.STALLED else attempt.message
    return _status(files, State.SAVING if is_saving else State.RUNNING, message)


def resume_hint(path: Path, facts: JsonObject) -> str:
    """A clause with the command that resumes a run where it ran; `facts` are its run.json."""
    recipe, cluster = facts.get("recipe", path.parent.name), facts.get("cluster")
    command = f"{recipe} --resume {shlex.quote(str(path))}"
    if cluster:
        return f"`recipes submit {command} --cluster {shlex.quote(str(cluster))}` goes on"
    verb = "finetune" if "finetune" in facts else "run"
    return f"`recipes {verb} {command}` goes on"


def _joined(*parts: object) -> str:
    return "; ".join(str(part) for part in parts if part)
