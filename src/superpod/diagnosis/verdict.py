"""Find the root cause of a failure among the causes in the logs of a run. Standard library only.

A cause explains causes of lesser depth (`causes/table.py`), and causes of the same depth that list it in `follows`, but
none that clearly occurred before it. Of several unexplained causes, the most certain is the root, then the earliest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable

from superpod.common.redaction import redact_text, redact_with_context
from superpod.diagnosis import oom
from superpod.diagnosis.causes import (
    CAUSES_BY_NAME,
    CERTAIN,
    CONFIDENCE,
    ECHO,
    ENDING,
    GROUND,
    HINT,
    LIKELY,
    PROGRAM,
    Cause,
)
from superpod.diagnosis.event_descriptions import describe, describe_hung_ranks
from superpod.diagnosis.log_events import LAST_LINES, MENTION, PROGRAM_ERROR, Event, LogEvents
from superpod.diagnosis.log_lines import LogLine
from superpod.diagnosis.log_patterns import ERROR, GENERIC_ERROR, TaskEnd
from superpod.diagnosis.losses import Anomaly

HEALTHY = "healthy"
"""Training has ended normally: the logs report its end, and no error since the last step."""
NO_FAILURE = "no_failure_found"
"""The logs report neither a failure nor a normal end: the run may still be running, or a log is truncated."""
FAILED = "failed"
"""The run failed, and its cause is known."""
SUSPECT = "suspect"
"""The run has not failed, but its losses or step times are abnormal, or a log ends with a line that names a cause."""
UNKNOWN = "unknown"
"""The run failed, and its cause is unknown."""

SLACK_S = 20.0
"""A line that precedes another by more than these seconds is not its consequence: clocks and buffers differ."""
_PYTHON_WARNING = re.compile(r"\.py:\d+: \w*Warning: ")
"""A Python warning, which is not evidence of a cause."""
_ANNOUNCED = ("node_failed", "time_limit", "preempted", "cancelled", "terminal_closed")
"""Causes that end a run from outside, and are logged before the errors that they lead to."""
NEAR_ERROR = 12
"""Maximum number of lines between a program error and a mention of its cause: processes write concurrently."""
MAX_SHOWN, MAX_CHARS = 3, 400
"""Maximum number of evidence lines to show per cause, and of characters per line."""


@dataclass(frozen=True)
class Evidence:
    """A log line that supports a finding, without secrets."""

    path: str
    number: int
    text: str
    rank: int | None = None
    frame: str = ""
    """the innermost frame of the traceback that ends with this line"""

    @property
    def location(self) -> str:
        """File and line number, such as `logs/0.log:812`."""
        return f"{self.path}:{self.number}" if self.number else self.path


@dataclass(frozen=True)
class Finding:
    """A cause found in the logs, with its evidence."""

    name: str
    means: str
    confidence: str
    fix: str
    ranks: tuple[int, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    detail: str = ""
    """a sentence with the numbers in the evidence"""


@dataclass(frozen=True)
class Verdict:
    """The result of a diagnosis: the root cause, its consequences, and unrelated problems."""

    state: str
    root: Finding | None = None
    follows: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = ()
    """causes that are unrelated to the root cause"""
    first_error: Evidence | None = None
    """if no cause is known: the first error of the rank that failed first, or a line that may report an error"""
    ended_with: Evidence | None = None
    """the exception that ended the program, raised while the root cause's exception was being handled"""
    words: str = ""
    """if there is no root cause: a message about how the run ended"""
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class _Group:
    """The events of one cause."""

    name: str
    events: tuple[Event, ...]
    cause: Cause | None
    """None for PROGRAM_ERROR"""
    was_first: bool = False
    """whether the cause ended the rank that failed first, according to srun or torchrun"""

    @property
    def depth(self) -> float:
        """The depth of the cause; an unexplained error lies between ENDING and PROGRAM."""
        if self.cause is None:
            return PROGRAM - 0.5
        if self.was_first:
            return PROGRAM - 0.25
        return self.cause.depth

    @property
    def sure(self) -> int:
        return max(event.sure for event in self.events)

    @property
    def order(self) -> int:
        return min(event.order for event in self.events)

    @property
    def at(self) -> float:
        return min((event.line.at for event in self.events if event.line.at), default=0.0)

    @property
    def lines(self) -> set[tuple[Path, int]]:
        return {(event.line.path, event.line.number) for event in self.events}

    @property
    def ended_by(self) -> LogLine | None:
        """The exception that ended the program while the most certain events were being handled; None = none did."""
        surest_events = [event for event in self.events if event.sure == self.sure]
        ends = [event.ended_by for event in surest_events if event.ended_by]
        ends = [line for line in ends if (line.path, line.number) not in self.lines]
        return ends[0] if len(ends) == len(surest_events) else None


def judge(logs: Sequence[LogEvents], base: Path | None = None, has_failed: bool | None = None) -> Verdict:
    """Return the diagnosis of a run or an attempt from its logs.

    Args:
        logs: the events of each log.
        base: the folder that displayed paths are relative to; None = show them unchanged.
        has_failed: whether the run failed; None = determine it from the logs.
    """
    groups = _group_events(logs)
    anomalies = [anomaly for log in logs if not log.damage for anomaly in log.series.anomalies()]
    is_done = has_failed is False
    if has_failed is None:
        has_failed = any((log.failed and not log.finished) or log.error_at_end for log in logs)
        has_failed |= any(event.alone for group in groups for event in group.events)

    findings = (_anomaly_finding(anomaly, base) for anomaly in anomalies)
    suspects = list({finding.name: finding for finding in findings}.values())
    if has_failed:
        notes = tuple(f"{shown_path(log.path, base)}: {log.damage}" for log in logs if log.damage)
        return replace(_judge_failure(groups, suspects, logs, base), notes=notes)
    if suspects:
        lasting_causes = {anomaly.cause for anomaly in anomalies if anomaly.lasts}
        suspects.sort(key=lambda finding: finding.name not in lasting_causes)
        return Verdict(SUSPECT, suspects[0], others=tuple(suspects[1:]))
    groups_at_end = [group for group in groups if group.cause and _is_named_at_end(group, logs)]
    return _judge_normal_logs(groups_at_end, logs, base, is_done=is_done)


def _judge_normal_logs(
    groups_at_end: Sequence[_Group], logs: Sequence[LogEvents], base: Path | None, *, is_done: bool
) -> Verdict:
    """Return the verdict on logs without a failure or an abnormal loss.

    Args:
        groups_at_end: causes that the last lines of a log name.
        logs: the events of each log.
        base: the folder that displayed paths are relative to; None = show them unchanged.
        is_done: whether the run is known not to have failed.
    """
    end_line = next((log.finished for log in logs if log.finished), None)
    damage = next((log.damage for log in logs if log.damage), "")
    if end_line and not damage and not any(log.finished and log.doubt for log in logs):
        return Verdict(HEALTHY, words=redact_text(end_line.text.strip()[:120]))
    if groups_at_end and not is_done:
        deepest_group = max(groups_at_end, key=lambda group: group.depth)
        return Verdict(SUSPECT, replace(_make_finding(deepest_group, None), confidence=CONFIDENCE[HINT]))

    last_step = max((log.series.highest for log in logs), default=-1)
    message = f"its last step is {last_step}" if last_step >= 0 else "it reports no error and no step"
    if damage:
        message = f"{damage}; before that, {message}"
    if is_done:
        return Verdict(HEALTHY, words=message)
    message += f"; the log {'reports' if end_line else 'does not report'} the end of training"
    doubt = next((_make_evidence(log.doubt, base) for log in logs if log.doubt), None)
    return Verdict(NO_FAILURE, first_error=doubt, words=message)


def _judge_failure(
    groups: list[_Group], suspects: list[Finding], logs: Sequence[LogEvents], base: Path | None
) -> Verdict:
    """Return the verdict on a failed run; `suspects` are the findings of abnormal losses."""
    mentioned_groups = [group for group in groups if group.cause and group.sure <= MENTION]
    groups = [group for group in groups if group.sure > MENTION] or groups
    roots = [group for group in groups if not any(_explains(other, group) for other in groups)]
    roots.sort(key=lambda group: _root_sort_key(group, logs))
    named_groups = [group for group in mentioned_groups if group.depth > ECHO]
    if roots and named_groups and _is_consequence(roots[0]):
        finding = replace(_make_finding(named_groups[0], base), confidence=CONFIDENCE[HINT])
        return Verdict(FAILED, finding, others=tuple(suspects), first_error=_first_error(roots, logs, base))
    if not roots or roots[0].name == PROGRAM_ERROR:
        follows = tuple(_make_finding(group, base) for group in groups if group.cause)
        divergence = next((finding for finding in suspects if finding.name in ("loss_is_nan", "fp16_overflow")), None)
        if divergence:
            others = tuple(finding for finding in suspects if finding is not divergence)
            return Verdict(FAILED, divergence, follows, others)
        return Verdict(UNKNOWN, None, follows, tuple(suspects), _first_error(roots or groups, logs, base))
    return _judge_known_root(roots, groups, suspects, base)


def _is_consequence(group: _Group) -> bool:
    """Return whether a group can only be a consequence: it is generic, or repeats that of another rank (`ECHO`)."""
    if group.name == PROGRAM_ERROR:
        error = group.events[-1].error
        return not ERROR.match(error) or GENERIC_ERROR.search(error) is not None
    return group.depth <= ECHO


def _judge_known_root(
    roots: Sequence[_Group], groups: Sequence[_Group], suspects: Sequence[Finding], base: Path | None
) -> Verdict:
    """Return the verdict on a failure with the first of `roots` as its root cause."""
    root = roots[0]
    finding = _make_finding(root, base)
    other_groups = [group for group in roots[1:] if group.cause and group.depth >= ENDING]
    has_rival = any(group.depth > ECHO and group.sure >= LIKELY for group in roots[1:])
    if has_rival and finding.confidence == CONFIDENCE[CERTAIN]:
        finding = replace(finding, confidence=CONFIDENCE[LIKELY])
    follows = [
        _make_finding(group, base)
        for group in groups
        if group.cause and group is not root and group not in other_groups and not group.lines <= root.lines
    ]
    known_causes = {finding.name, *(f.name for f in follows)}
    other_suspects = [f for f in suspects if f.name not in known_causes]
    others_found = (*(_make_finding(group, base) for group in other_groups), *other_suspects)
    ended_with = _make_evidence(root.ended_by, base) if root.ended_by else None
    return Verdict(FAILED, finding, tuple(follows), others_found, ended_with=ended_with)


def _group_events(logs: Sequence[LogEvents]) -> list[_Group]:
    """Group the events by cause, without those from which training recovered."""
    by_cause: dict[str, list[Event]] = {}
    has_finished = any(log.finished for log in logs)
    for log in logs:
        for event in log.events:
            is_late_consequence = has_finished and event.is_secondary and event.cause != "nccl_timeout"
            if not (log.is_recovered(event) or is_late_consequence or _is_far_mention(event, log)):
                by_cause.setdefault(_specific_cause(event), []).append(event)

    is_first = _first_end_test(logs)
    groups = []
    for name, events in by_cause.items():
        was_first = name in ("rank_killed", "rank_crashed") and any(map(is_first, events))
        groups.append(_Group(name, tuple(events), CAUSES_BY_NAME.get(name), was_first))
    return groups


def _first_end_test(logs: Sequence[LogEvents]) -> Callable[[Event], bool]:
    """Return a function that returns whether an event is the end of the rank that failed first."""
    tasks = _unterminated_tasks(logs)
    first = tasks[0] if tasks else None
    ranks = {log.first_failed for log in logs} - {None}
    # A rank that exits with code 1 without an error is a consequence of a rank that was killed.
    has_errors = any(event.is_error and not event.is_secondary for log in logs for event in log.events)
    follows = first is not None and first.exited_with_1 and not has_errors and any(task.was_killed for task in tasks)

    def is_first(event: Event) -> bool:
        if event.rank is not None and event.rank in ranks:
            return True
        end = TaskEnd.parse(event.line.text)
        return end is not None and first is not None and (end.how == first.how or follows)

    return is_first


def _unterminated_tasks(logs: Sequence[LogEvents]) -> list[TaskEnd]:
    """Return the tasks that srun reported to have ended without being terminated by it, in the order of the logs."""
    return [task for log in logs for task in log.tasks if not task.was_terminated]


def _is_named_at_end(group: _Group, logs: Sequence[LogEvents]) -> bool:
    """Return whether the last LAST_LINES lines of a log match the cause, or its last line mentions it."""
    last = {log.path: log.last.number for log in logs if log.last}
    for event in group.events:
        first_counted_line = last.get(event.line.path, 0) - (LAST_LINES if event.sure > MENTION else 0)
        if event.line.number >= first_counted_line:
            return True
    return False


def _is_far_mention(event: Event, log: LogEvents) -> bool:
    """Return whether an event only mentions its cause, neither near the end of its log nor near a program error."""
    if event.sure > MENTION:
        return False
    if log.last is None or _PYTHON_WARNING.search(event.line.text):
        return True
    if event.line.number >= log.last.number - LAST_LINES:
        return False
    distances = [other.line.number - event.line.number for other in log.events if other.cause == PROGRAM_ERROR]
    return not any(0 < abs(distance) <= NEAR_ERROR for distance in distances)


def _specific_cause(event: Event) -> str:
    """Return the name of an event's cause; for an out-of-memory error, the cause that its sizes indicate."""
    if event.cause == "gpu_out_of_memory":
        memory = oom.parse(event.line.text)
        if memory:
            return memory.cause
    return event.cause


def _explains(deep: _Group, shallow: _Group) -> bool:
    """Return whether the cause `shallow` is a consequence of the cause `deep`."""
    if deep is shallow:
        return False

    # If a run is ended from outside after an error of its own, the error explains the end.
    is_own_error = deep.depth > ENDING and deep.name not in _ANNOUNCED
    if shallow.name in _ANNOUNCED and is_own_error and _came_first(deep, shallow):
        return True
    if deep.name in _ANNOUNCED and _came_first(shallow, deep):
        return False

    follows = shallow.cause is not None and deep.name in shallow.cause.follows
    leads_to = deep.cause is not None and shallow.name in deep.cause.follows
    if follows and leads_to:  # each may follow from the other
        return (deep.sure, deep.depth, -deep.order) > (shallow.sure, shallow.depth, -shallow.order)
    if not follows and (leads_to or deep.depth <= shallow.depth):
        return False
    if deep.sure <= HINT < shallow.sure or deep.sure <= MENTION:
        return False
    if deep.depth >= PROGRAM and shallow.depth >= PROGRAM and not follows and deep.cause and shallow.cause:
        return _may_follow(deep, shallow) and deep.sure >= shallow.sure
    return _may_follow(deep, shallow)


def _came_first(group: _Group, other: _Group) -> bool:
    """Return whether `group` contains an error, and precedes `other` by time or in the same file."""
    if not any(event.is_error for event in group.events):
        return False
    if group.at and other.at:
        return group.at < other.at
    files = {event.line.path for event in (*group.events, *other.events)}
    return len(files) == 1 and min(e.order for e in group.events) < min(e.order for e in other.events)


def _may_follow(deep: _Group, shallow: _Group) -> bool:
    """Return whether `shallow` may be a consequence of `deep` according to their times; True if a time is unknown."""
    return not (deep.at and shallow.at) or deep.at <= shallow.at + SLACK_S


def _root_sort_key(group: _Group, logs: Sequence[LogEvents]) -> tuple[object, ...]:
    """Return the sort key of a root cause: causes in error lines first, then by certainty, first rank and time."""
    failed_first = {log.first_failed for log in logs} - {None}
    of_first = any(event.rank in failed_first for event in group.events if event.rank is not None)
    is_strong = any(event.is_error for event in group.events) or group.depth in (GROUND, ENDING)
    return (
        group.depth <= ECHO,
        not is_strong,
        group.cause is None,
        -group.sure,
        not of_first,
        group.at or float("inf"),
        -group.depth,
        min(event.order for event in group.events),
    )


def _make_finding(group: _Group, base: Path | None) -> Finding:
    """Return the finding for a group; a program error counts as a crashed rank."""
    cause = group.cause or CAUSES_BY_NAME["rank_crashed"]
    events = sorted(group.events, key=lambda e: (-e.sure, e.line.at or 0.0, e.order))
    details = (describe(event) for event in events)
    detail = next(filter(None, details), "") or describe_hung_ranks(events)
    ranks = tuple(sorted({e.rank for e in events if e.rank is not None}))

    certainty = group.sure
    messages = [oom.parse(event.line.text) for event in events]
    lists_processes = any(memory and memory.others_are_named for memory in messages)
    is_estimate = group.name == "gpu_memory_taken" and not lists_processes
    if group.name == "gpu_memory_fragmented" or is_estimate or group.ended_by:
        certainty = min(certainty, LIKELY)
    if len({e.line.text for e in events}) > 1 and certainty == HINT:
        certainty = LIKELY

    shown_events = _drop_similar(events)[:MAX_SHOWN]
    return Finding(
        cause.name,
        cause.means,
        CONFIDENCE[max(HINT, certainty)],
        cause.fix,
        ranks,
        tuple(_make_evidence(e.line, base, e.rank) for e in shown_events),
        detail,
    )


def _drop_similar(events: Sequence[Event]) -> list[Event]:
    """Return the events without those whose lines differ from an earlier event's only in digits."""
    seen, kept = set(), []
    for event in events:
        template = "".join(c for c in event.line.text if not c.isdigit())[:120]
        if template not in seen:
            seen.add(template)
            kept.append(event)
    return kept


def _make_evidence(line: LogLine, base: Path | None, rank: int | None = None) -> Evidence:
    """Return a line as evidence, without secrets and truncated to MAX_CHARS characters.

    `rank` overrides the rank of the line; displayed paths are relative to `base` (None = unchanged).
    """
    redacted_parts = (redact_with_context(line.before, part) for part in line.text.split("KeyError: "))
    text = " ".join("KeyError: ".join(redacted_parts).split())
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]} ..."
    shown_rank = line.rank if rank is None else rank
    return Evidence(shown_path(line.path, base), line.number, text, shown_rank, redact_text(line.frame)[:MAX_CHARS])


def shown_path(path: Path, base: Path | None) -> str:
    """Return the path to display: relative to `base` if it is inside that folder, otherwise unchanged."""
    return str(path.relative_to(base) if base is not None and path.is_relative_to(base) else path)


def _first_error(groups: Sequence[_Group], logs: Sequence[LogEvents], base: Path | None) -> Evidence | None:
    """Return the first error of the rank that failed first, according to torchrun or srun, or else the earliest error.

    Return None if the logs contain neither an error nor a line.
    """
    errors = [e for group in groups if group.name == PROGRAM_ERROR for e in group.events]
    tasks = [log.first_task for log in logs if log.first_task]
    if not errors and tasks:
        end = TaskEnd.parse(tasks[0].text)
        line = replace(tasks[0], text=end.describe()) if end else tasks[0]
        return _make_evidence(line, base)
    if not errors:
        errors = [e for group in groups for e in group.events if group.depth <= ECHO]
    if not errors:
        lasts = [log.fatal for log in logs if log.fatal] or [log.last for log in logs if log.last]
        return _make_evidence(lasts[0], base) if lasts else None

    first = {log.first_failed for log in logs} | {task.rank for task in _unterminated_tasks(logs)[:1]}
    first_errors = [e for e in errors if e.rank is not None and e.rank in first] or errors
    by_rank: dict[object, Event] = {}
    for event in first_errors:
        by_rank[(str(event.line.path), event.rank)] = event  # the last error of a rank ended its program
    best = min(by_rank.values(), key=lambda e: (e.line.at or float("inf"), str(e.line.path), e.order))
    line = replace(best.line, text=best.error or best.line.text)
    return _make_evidence(line, base, best.rank)


def _anomaly_finding(anomaly: Anomaly, base: Path | None) -> Finding:
    cause = CAUSES_BY_NAME[anomaly.cause]
    confidence = CONFIDENCE[CERTAIN if anomaly.cause == "loss_is_nan" else LIKELY]
    evidence = (_make_evidence(anomaly.line, base),)
    return Finding(cause.name, cause.means, confidence, cause.fix, (), evidence, anomaly.message)
