"""Diagnose why an attempt failed, from the logs of its ranks, the disk and result.json. Standard library only.

`judge_attempt` reads the logs and returns a verdict; `summarize` returns one line for result.json, `recipes status` and
`recipes history`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from superpod.common.json_files import TAIL_BYTES
from superpod.diagnosis import flight_recorder
from superpod.diagnosis.causes import CERTAIN
from superpod.diagnosis.log_events import Event, LogEvents, read
from superpod.diagnosis.log_lines import LogLine
from superpod.diagnosis.log_patterns import step_end
from superpod.diagnosis.rank_logs import is_by_node
from superpod.diagnosis.verdict import UNKNOWN, Evidence, Verdict, judge
from superpod.runtime.attempts import attempt_end
from superpod.runtime.rank import stacks
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import LAUNCHER_KILLED, State

_MAX_CHARS = 400
_MIN_FREE_BYTES = 1 << 20
_NODE_TAIL = 8
"""Factor of the bytes that are read from the end of a node's log, relative to a rank's log."""
_DESCRIBED = (State.STALLED, State.CANCELLED, State.REQUEUED)
"""States whose message is an observation of the launcher, and therefore evidence."""


@dataclass(frozen=True)
class Diagnosis:
    """Why an attempt failed."""

    cause: str
    """one line"""
    known: bool = True
    """False if the logs contain neither a cause nor an error"""


def summarize(folder: RunFolder, attempt: Attempt) -> Diagnosis:
    """Diagnose an attempt in one line, from the ends of its logs, since the logs of 2,048 nodes have a gigabyte."""
    message = describe_briefly(judge_attempt(folder, attempt, ends=True))
    if message:
        return Diagnosis(message)
    return Diagnosis(f"the job ended without an error message; its logs are in {attempt.path / 'logs'}", known=False)


def describe_briefly(verdict: Verdict) -> str:
    """Return the cause of a verdict, or else its first error, in one line; '' if it has neither."""
    root, error = verdict.root, verdict.first_error
    if root:
        first = root.evidence[0] if root.evidence else None
        if root.detail:
            text = root.detail[:_MAX_CHARS]
        elif first:
            text = _quote(first)
        else:
            text = root.means[:_MAX_CHARS]
        return f"{text} [{root.name}]"
    return _quote(error) if error else ""


def _quote(line: Evidence) -> str:
    """Format a log line as `TEXT (FILE)`, or as `TEXT (FILE, rank N)` if the file has the output of several ranks."""
    rank = ""
    if line.rank is not None and is_by_node(Path(line.path)):
        rank = f", rank {line.rank}"
    return f"{line.text[:_MAX_CHARS]} ({line.path}{rank})"


def judge_attempt(folder: RunFolder, attempt: Attempt, *, ends: bool = False) -> Verdict:
    """Diagnose an attempt from its logs, result.json, flight-recorder dumps and Python stacks.

    With `ends`, only the ends of its logs are read, to save time.
    """
    logs = []
    for log in logs_of(attempt):
        tail = TAIL_BYTES * _NODE_TAIL if is_by_node(log) else TAIL_BYTES
        logs.append(_read(log, tail if ends else 0))
    logs.append(_recorded_events(folder, attempt))

    state = attempt.result.get("state")
    has_failed = {State.DONE: False, State.FAILED: True, State.STALLED: True}.get(state) if state else None
    verdict = judge(logs, folder.path, has_failed)
    dumps = flight_recorder.files([attempt.path])
    verdict = flight_recorder.add_dumps(verdict, dumps, folder.path)
    return stacks.add_stacks(verdict, attempt.path, folder.path)


def judge_files(paths: Sequence[Path], base: Path | None = None) -> Verdict:
    """Diagnose a run from log files and flight-recorder dumps. Raises OSError if a file cannot be read.

    If `base` is given, the verdict names files relative to it.
    """
    dumps = [path for path in paths if flight_recorder.is_dump(path)]
    logs = [_read_named(path) for path in paths if path not in dumps]
    if logs and not dumps and not any(log.lines for log in logs):
        empty_note = "the log is empty" if len(logs) == 1 else f"all {len(logs)} logs are empty"
        reason = next((log.damage for log in logs if log.damage), empty_note)
        return Verdict(UNKNOWN, words=f"{reason}, so this run cannot be diagnosed")
    return flight_recorder.add_dumps(judge(logs, base), dumps, base)


def _read_named(path: Path) -> LogEvents:
    """Read the events of a log that the user named; no events if the file does not exist. Raises other OSErrors."""
    try:
        return read(path)
    except FileNotFoundError:
        return LogEvents(path)


def logs_of(attempt: Attempt) -> list[Path]:
    """Return the log files of an attempt: those of its ranks and srun, and those that NeMo-Run and torchrun write."""
    return [*attempt.logs, *sorted((attempt.path / "nemo_run").glob("**/std*.log"))]


def step_end_reason(attempt: Attempt) -> str | None:
    """Return the reason, from the logs, for which Slurm ended the ranks of an attempt; None if there is none.

    Example: `Slurm ended the ranks on node1 at ...: node failure`.
    """
    for log in attempt.logs:
        for event in _read(log, TAIL_BYTES).events:
            reason = step_end(event.line.text)
            if reason:
                return reason
    return None


def _read(log: Path, tail: int) -> LogEvents:
    try:
        return read(log, tail)
    except OSError:  # removed or unreadable by now
        return LogEvents(log)


def _recorded_events(folder: RunFolder, attempt: Attempt) -> LogEvents:
    """Return the events that the launcher recorded in result.json, and an event if the disk is full now."""
    file, result = attempt.path / "result.json", attempt.result
    events = LogEvents(file)
    if result.get("state") in _DESCRIBED or LAUNCHER_KILLED in result:
        events.process(LogLine(file, 0, str(result.get("message", ""))))
    killed = result.get(attempt_end.KILLED)
    if killed:
        events.events.append(_certain_event("launcher_killed", file, str(killed)))
    kills = result.get(attempt_end.OOM_KILLS)
    if kills:
        killed_text = "1 process" if kills == 1 else f"{kills} processes"
        text = f"the node ran out of memory: the kernel killed {killed_text} of the job on its first node (oom_kill)"
        events.events.append(_certain_event("host_out_of_memory", file, text))
    free_bytes = shutil.disk_usage(folder.path).free
    if free_bytes < _MIN_FREE_BYTES and result.get("state") != State.DONE:
        text = f"the disk under {folder.path} is full ({free_bytes / 2**20:.0f} MiB free)"
        events.events.append(
            _certain_event("disk_full", folder.path, text, detail=f"{text}: free up space, then resume")
        )
    return events


def _certain_event(cause: str, path: Path, text: str, detail: str | None = None) -> Event:
    """Return an event of the cause `cause` with the certainty CERTAIN; `path` is the file or folder that shows it."""
    return Event(cause, CERTAIN, True, LogLine(path, 0, text), is_error=True, order=0, detail=detail)
