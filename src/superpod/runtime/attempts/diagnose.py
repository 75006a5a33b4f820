"""Why an attempt failed: from its ranks' logs, the disk, and what was recorded of its end. Standard library only.

`verdict` reads all; `why` is its short form in one line, for result.json, `recipes status` and `recipes history`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from superpod.common.files import TAIL_BYTES
from superpod.diagnosis import flight_recorder
from superpod.diagnosis.causes import CERTAIN
from superpod.diagnosis.log_events import Event, LogEvents, read
from superpod.diagnosis.log_lines import LogLine
from superpod.diagnosis.log_patterns import step_end
from superpod.diagnosis.rank_logs import is_by_node
from superpod.diagnosis.verdict import UNKNOWN, Finding, Verdict, judge
from superpod.runtime.attempts import attempt_end
from superpod.runtime.rank import stacks
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import LAUNCHER_KILLED, State

_LONGEST = 400
_FULL_BYTES = 1 << 20
_NODE_TAIL = 8
"""A node's log is read so many times further back than a rank's, where only ends are read."""
_TOLD = (State.STALLED, State.CANCELLED, State.REQUEUED)
"""States whose message says what the process saw that watched the attempt."""


@dataclass(frozen=True)
class Diagnosis:
    """Why an attempt failed: `cause` in one line; `known` is False when the logs name none."""

    cause: str
    known: bool = True


def summarize(folder: RunFolder, attempt: Attempt) -> Diagnosis:
    """The root in one line, from the ends of the logs: those of 2,048 nodes are a gigabyte."""
    judged = judge_attempt(folder, attempt, ends=True)
    if words := short(judged):
        return Diagnosis(words)
    return Diagnosis(f"the job ended without saying why; its logs are in {attempt.path / 'logs'}", known=False)


def short(judged: Verdict) -> str:
    """A verdict in one line, '' where it names neither a cause nor an error."""
    if judged.root:
        root = judged.root
        first = root.evidence[0] if root.evidence else None
        words = root.detail or (first.text if first else root.means)
        place = f" ({first.path}{_whose(root)})" if first and not root.detail else ""
        return f"{words[:_LONGEST]}{place} [{root.name}]"
    if judged.first_error:
        rank = f", rank {judged.first_error.rank}" if judged.first_error.rank is not None else ""
        by_node = rank if is_by_node(Path(judged.first_error.path)) else ""
        return f"{judged.first_error.text[:_LONGEST]} ({judged.first_error.path}{by_node})"
    return ""


def _whose(root: Finding) -> str:
    first = root.evidence[0]
    return f", rank {first.rank}" if first.rank is not None and is_by_node(Path(first.path)) else ""


def judge_attempt(folder: RunFolder, attempt: Attempt, *, ends: bool = False) -> Verdict:
    """Why an attempt failed, or that it did not; of its logs only the `ends`, where there is no time for more."""
    logs = [
        _read(log, (TAIL_BYTES * (_NODE_TAIL if is_by_node(log) else 1)) if ends else 0) for log in logs_of(attempt)
    ]
    logs.append(_recorded(folder, attempt))
    state = attempt.result.get("state")
    failed = {State.DONE: False, State.FAILED: True, State.STALLED: True}.get(state) if state else None
    judged = judge(logs, folder.path, failed)
    dumps = flight_recorder.files([attempt.path])
    return stacks.add_stacks(flight_recorder.add_dumps(judged, dumps, folder.path), attempt.path, folder.path)


def judge_files(paths: Sequence[Path], base: Path | None = None) -> Verdict:
    """Why the run failed whose logs these are. Raises OSError when one cannot be read."""
    dumps = [path for path in paths if flight_recorder.is_dump(path)]
    logs = [_read_named(path) for path in paths if path not in dumps]
    if logs and not dumps and not any(log.lines for log in logs):
        which = "the log is empty" if len(logs) == 1 else f"all {len(logs)} logs are empty"
        damage = next((log.damage for log in logs if log.damage), which)
        return Verdict(UNKNOWN, words=f"{damage}: of this run nothing can be told")
    return flight_recorder.add_dumps(judge(logs, base), dumps, base)


def _read_named(path: Path) -> LogEvents:
    """What a log tells, nothing where it was removed since it was found. Raises OSError."""
    try:
        return read(path)
    except FileNotFoundError:
        return LogEvents(path)


def logs_of(attempt: Attempt) -> list[Path]:
    """The logs of an attempt's ranks, srun's, torchrun's, and what ranks wrote before they had logs of their own."""
    return [*attempt.logs, *sorted((attempt.path / "nemo_run").glob("**/std*.log"))]


def ended_step(attempt: Attempt) -> str | None:
    """Why Slurm itself ended the ranks: `Slurm ended the ranks on node1 at ...: node failure`; None = it did not."""
    for log in attempt.logs:
        for event in _read(log, TAIL_BYTES).events:
            if reason := step_end(event.line.text):
                return reason
    return None


def _read(log: Path, tail: int) -> LogEvents:
    try:
        return read(log, tail)
    except OSError:  # removed or made unreadable meanwhile
        return LogEvents(log)


def _recorded(folder: RunFolder, attempt: Attempt) -> LogEvents:
    """What the attempt's own watcher recorded, and the disk, as if they were a log."""
    file, result = attempt.path / "result.json", attempt.result
    recorded = LogEvents(file)
    if result.get("state") in _TOLD or LAUNCHER_KILLED in result:
        recorded.look(LogLine(file, 0, str(result.get("message", ""))))
    if killed := result.get(attempt_end.KILLED):
        recorded.events.append(_certain("launcher_killed", file, str(killed)))
    if kills := result.get(attempt_end.OOM_KILLS):
        text = f"the kernel killed {kills} processes of the job on its first node: its memory ran out (oom_kill)"
        recorded.events.append(_certain("host_out_of_memory", file, text))
    free = shutil.disk_usage(folder.path).free
    if free < _FULL_BYTES and result.get("state") != State.DONE:
        text = f"the disk under {folder.path} is full ({free / 2**20:.0f} MiB free)"
        recorded.events.append(_certain("disk_full", folder.path, text, detail=f"{text}: make room, then resume"))
    return recorded


def _certain(cause: str, path: Path, text: str, detail: str | None = None) -> Event:
    """An event that is no line of a log."""
    return Event(cause, CERTAIN, True, LogLine(path, 0, text), is_error=True, order=0, detail=detail)
