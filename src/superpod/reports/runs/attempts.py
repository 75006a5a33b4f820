"""Reads the attempts of a run for `recipes history`, also with an incomplete or invalid result.json."""

from __future__ import annotations

from dataclasses import dataclass

from superpod.common.json_files import is_number
from superpod.runtime.attempts import attempt_end
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import State


@dataclass(frozen=True)
class AttemptView:
    """An attempt for `recipes history`, with Unix times and seconds; None for unknown values."""

    attempt: str
    state: State
    """UNREADABLE if its result.json is missing or truncated"""
    message: str = ""
    notes: tuple[str, ...] = ()
    """decisions made before the ranks started: checkpoints set aside, steps lost"""
    job: str = ""
    restarts: int = 0
    began: float | None = None
    took_s: float | None = None
    nodes: tuple[str, ...] = ()
    resumed_step: int | None = None
    """step of the checkpoint from which it resumed; 0 = from the start"""
    last_step: int | None = None
    checkpoint: int | None = None
    """step of the latest checkpoint when it ended"""
    exit_code: int | None = None


def read_attempts(run: RunFolder) -> list[AttemptView]:
    """Return all attempts of a run, oldest first. Slurm is queried about attempts that did not record their end."""
    attempts = run.attempts
    return [read_attempt(attempt, _find_unrecorded_end(run, attempt, attempt == attempts[-1])) for attempt in attempts]


def _find_unrecorded_end(run: RunFolder, attempt: Attempt, is_newest: bool) -> attempt_end.End | None:
    """Return the end of an attempt that did not record it; None if it did, or if it is still running."""
    if not attempt.result or "ended" in attempt.result:
        return None
    end = attempt_end.find_end(run, attempt)
    if end:
        return end
    if is_newest:
        return None
    return attempt_end.End(State.FAILED, "ended without a recorded result; a later attempt has started")


def read_attempt(attempt: Attempt, end: attempt_end.End | None = None) -> AttemptView:
    """Return the record of an attempt; invalid values become None. `end` is its end if it did not record it."""
    result = attempt.result
    if not result:
        return AttemptView(attempt.name, State.UNREADABLE, f"{attempt.path / 'result.json'} is missing or truncated")
    began = _time_or_none(result.get("started"))
    end_time = _time_or_none(result.get("ended")) or _time_or_none(attempt.heartbeat().get("t"))
    nodes, message = result.get("nodes"), result.get("message", "")
    return AttemptView(
        attempt=attempt.name,
        state=end.state if end else State(result["state"]),
        message=end.message if end else _text_or_empty(message),
        notes=tuple(list_resume_notes(attempt)),
        job=str(result.get("job") or ""),
        restarts=_int_or_none(result.get("restarts")) or 0,
        began=began,
        took_s=max(0.0, end_time - began) if began and end_time else None,
        nodes=tuple(map(str, nodes)) if isinstance(nodes, list) else (),
        resumed_step=_int_or_none(attempt.resume.get("step", result.get("before"))),
        last_step=_int_or_none(result.get("last_step")),
        checkpoint=_int_or_none(result.get("checkpoint")),
        exit_code=_int_or_none(result.get("exit_code")),
    )


def list_resume_notes(attempt: Attempt) -> list[str]:
    """Return the decision at resume if checkpoints were corrupt or unverified, or steps lost; [] otherwise.

    Earlier versions did not record whether a checkpoint was verified.
    """
    resume = attempt.resume
    text = resume.get("words")
    is_noteworthy = resume.get("lost_steps") or resume.get("set_aside") or resume.get("verified") is False
    return [text] if isinstance(text, str) and is_noteworthy else []


def _time_or_none(value: object) -> float | None:
    return float(value) if is_number(value) and value > 0 else None


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""
