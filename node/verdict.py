"""Finds the root cause among the causes in a run's logs, and what follows from it. Standard library only.

Deeper causes explain shallower ones (`superpod/node/causes/table.py`), `follows` explains within a depth, and no cause
explains what clearly came before it. Of several roots, the most certain comes first, then the earliest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable

from superpod.node import oom
from superpod.node.causes import BY_NAME, CERTAIN, CONFIDENCE, ECHO, ENDING, GROUND, HINT, LIKELY, PROGRAM, Cause
from superpod.node.log_events import ERROR_OF_PROGRAM, LAST_LINES, PASSING, Event, LogEvents
from superpod.node.log_lines import LogLine
from superpod.node.log_words import ERROR, GENERIC_ERROR, step_end, task_end, task_words
from superpod.node.losses import Remark
from superpod.node.redaction import redact_after, redact_text

HEALTHY = "healthy"
"""The training reached its end."""
NO_FAILURE = "no_failure_found"
"""No line shows a failure, and none shows the end of the training: it may still run, or the log is cut off."""
FAILED = "failed"
"""It failed, and the cause is named."""
SUSPECT = "suspect"
"""It continues or is done, but its losses or step times are wrong."""
UNKNOWN = "unknown"
"""It failed, and no cause is known."""

SLACK_S = 20.0
"""Seconds by which one line must be older than another before it cannot follow from it: ranks' clocks and buffers."""
_HUNG = re.compile(r"RankMonServer\d+@(\S+):(\d+)\] Did not get (?:initial|subsequent) heartbeat\. ?Waited ([\d.]+)")
_OF_PYTHON = re.compile(r"\.py:\d+: \w*Warning: ")
"""A warning of Python's, which names no cause."""
_ANNOUNCED = ("node_failed", "time_limit", "preempted", "cancelled", "terminal_closed")
"""What ends a run from outside, and is announced before what follows from it."""
NEAR_ERROR = 12
"""How many lines from a program error a cause may be mentioned that explains it: processes write out of turn."""
SHOWN = 3
"""Most evidence lines per cause."""
LONGEST = 400
"""Most characters of an evidence line."""


@dataclass(frozen=True)
class Evidence:
    """A log line: its file and number, and its text without secrets."""

    path: str
    number: int
    text: str
    rank: int | None = None

    @property
    def place(self) -> str:
        """`logs/0.log:812`."""
        return f"{self.path}:{self.number}" if self.number else self.path


@dataclass(frozen=True)
class Finding:
    """A cause, with its evidence."""

    name: str
    means: str
    confidence: str
    fix: str
    ranks: tuple[int, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    detail: str = ""
    """its figures, as a sentence"""


@dataclass(frozen=True)
class Verdict:
    """Why a run failed: the root cause, what follows from it, and what else is wrong."""

    state: str
    root: Finding | None = None
    follows: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = ()
    """causes that neither explain the root nor follow from it"""
    first_error: Evidence | None = None
    """of the rank that failed first, if no cause is known"""
    ended_with: Evidence | None = None
    """the exception with which the program ended, raised while the root's was handled"""
    words: str = ""
    """how it ended, if nothing failed"""
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class _Group:
    """All events of one cause."""

    name: str
    events: tuple[Event, ...]
    cause: Cause | None
    was_first: bool = False
    """whether it ended the rank that ended first, according to srun or torchrun"""

    @property
    def depth(self) -> float:
        """An error that no cause explains lies between those that end a run from outside, and the program's."""
        if self.cause is None:
            return PROGRAM - 0.5
        return PROGRAM - 0.25 if self.was_first else self.cause.depth

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
        """Path and number of each line that shows it."""
        return {(event.line.path, event.line.number) for event in self.events}

    @property
    def ended_by(self) -> LogLine | None:
        """Another exception, with which the program ended while this one's surest were handled."""
        surest = [event for event in self.events if event.sure == self.sure]
        ends = [e.ended_by for e in surest if e.ended_by and (e.ended_by.path, e.ended_by.number) not in self.lines]
        return ends[0] if len(ends) == len(surest) else None


def judge(logs: Sequence[LogEvents], base: Path | None = None, failed: bool | None = None) -> Verdict:
    """The verdict on the logs of one run or attempt.

    Args:
        logs: the events of each log.
        base: paths are shown relative to this folder.
        failed: whether the run failed, if that is known from elsewhere.
    """
    groups = _groups(logs)
    remarks = [(remark, log) for log in logs if not log.damage for remark in log.series.remarks()]
    broke = any((log.failed and not log.finished) or log.error_at_end for log in logs) or any(
        event.alone for group in groups for event in group.events
    )
    weak: list[_Group] = []
    if failed is False:
        groups, broke = [], False
    elif not (broke or failed):
        weak = [group for group in groups if group.cause and _is_named_at_end(group, logs)]
        groups = []
    suspects = _unique(_remark_finding(remark, base) for remark, _ in remarks)
    lasting = {remark.cause for remark, _ in remarks if remark.lasts}
    if not broke and not failed:
        return _without_failure(suspects, lasting, weak, logs, done=failed is False)
    notes = tuple(f"{shown_path(log.path, base)}: {log.damage}" for log in logs if log.damage)
    return replace(_with_failure(groups, suspects, logs, base), notes=notes)


def _without_failure(
    suspects: list[Finding], lasting: set[str], weak: Sequence[_Group], logs: Sequence[LogEvents], done: bool
) -> Verdict:
    """The verdict where nothing shows a failure.

    Args:
        suspects: what the losses and step times show.
        lasting: the causes among these that hold to the end.
        weak: causes named by the last lines of a log, none of which says that the run failed.
        logs: all logs of the run.
        done: the run is known to have reached its end.
    """
    if suspects:
        suspects.sort(key=lambda finding: finding.name not in lasting)
        return Verdict(SUSPECT, suspects[0], others=tuple(suspects[1:]))
    finished = next((log.finished for log in logs if log.finished), None)
    damage = next((log.damage for log in logs if log.damage), "")
    if finished and not damage:
        return Verdict(HEALTHY, words=redact_text(finished.text.strip()[:120]))
    if weak and not done:
        deepest = max(weak, key=lambda group: group.depth)
        return Verdict(SUSPECT, replace(_finding(deepest, None), confidence=CONFIDENCE[HINT]))
    last_step = max((log.series.highest for log in logs), default=-1)
    reached = f"its last step is {last_step}" if last_step >= 0 else "it reports no error and no step"
    return Verdict(HEALTHY if done else NO_FAILURE, words=f"{damage}; up to there {reached}" if damage else reached)


def _with_failure(
    groups: list[_Group], suspects: list[Finding], logs: Sequence[LogEvents], base: Path | None
) -> Verdict:
    """The verdict where the logs show a failure, or it is known from elsewhere."""
    mentioned = [group for group in groups if group.cause and group.sure <= PASSING]
    groups = [group for group in groups if group.sure > PASSING] or groups
    roots = [group for group in groups if not any(_explains(other, group) for other in groups)]
    roots.sort(key=lambda group: _rank_of_root(group, logs))
    named = [group for group in mentioned if group.depth > ECHO]
    if roots and named and _tells_nothing(roots[0]):
        finding = replace(_finding(named[0], base), confidence=CONFIDENCE[HINT])
        return Verdict(FAILED, finding, others=tuple(suspects), first_error=_first_error(roots, logs, base))
    if not roots or roots[0].name == ERROR_OF_PROGRAM:
        follows = tuple(_finding(group, base) for group in groups if group.cause)
        diverged = next((finding for finding in suspects if finding.name in ("loss_is_nan", "fp16_overflow")), None)
        if diverged:
            return Verdict(FAILED, diverged, follows, tuple(finding for finding in suspects if finding is not diverged))
        return Verdict(UNKNOWN, None, follows, tuple(suspects), _first_error(roots or groups, logs, base))
    return _with_known_root(roots, groups, suspects, base)


def _tells_nothing(group: _Group) -> bool:
    """Whether the best root follows from something that it does not name."""
    if group.name == ERROR_OF_PROGRAM:
        words = group.events[-1].words
        return not ERROR.match(words) or GENERIC_ERROR.search(words) is not None
    return group.depth <= ECHO


def _with_known_root(
    roots: Sequence[_Group], groups: Sequence[_Group], suspects: Sequence[Finding], base: Path | None
) -> Verdict:
    """The verdict on a failure whose first root has a cause."""
    root = roots[0]
    finding = _finding(root, base)
    others = [group for group in roots[1:] if group.cause and group.depth >= ENDING]
    has_rival = any(group.depth > ECHO and group.sure >= LIKELY for group in roots[1:])
    if has_rival and finding.confidence == CONFIDENCE[CERTAIN]:
        finding = replace(finding, confidence=CONFIDENCE[LIKELY])
    follows = [
        _finding(group, base)
        for group in groups
        if group.cause and group is not root and group not in others and not group.lines <= root.lines
    ]
    known = {finding.name, *(f.name for f in follows)}
    more = [f for f in suspects if f.name not in known]
    others_found = (*(_finding(group, base) for group in others), *more)
    ended_with = evidence(root.ended_by, base) if root.ended_by else None
    return Verdict(FAILED, finding, tuple(follows), others_found, ended_with=ended_with)


def _groups(logs: Sequence[LogEvents]) -> list[_Group]:
    """The causes that the logs show, without what the training came through."""
    by_cause: dict[str, list[Event]] = {}
    finished = any(log.finished for log in logs)
    for log in logs:
        for event in log.events:
            if not (
                log.is_recovered(event)
                or (finished and _is_echo(event) and event.cause != "nccl_timeout")
                or _is_far(event, log)
            ):
                by_cause.setdefault(_exact(event), []).append(event)
    first = _first_ends(logs)
    return [
        _Group(
            name, tuple(events), BY_NAME.get(name), name in ("rank_killed", "rank_crashed") and any(map(first, events))
        )
        for name, events in by_cause.items()
    ]


def _first_ends(logs: Sequence[LogEvents]) -> Callable[[Event], bool]:
    """A function that returns whether an event is the first end of a rank that srun or torchrun saw."""
    tasks = [task for log in logs for task in log.tasks if task[2] != "Terminated"]
    how, ranks = (tasks[0][2] if tasks else ""), {log.first_failed for log in logs} - {None}
    killed = [task for task in tasks if task[2] in ("Killed", "Out Of Memory")]
    echo = how == "Exited with exit code 1" and bool(killed) and not _has_errors(logs)

    def is_first(event: Event) -> bool:
        match = task_end(event.line.text)
        return (match is not None and (match == how or echo)) or (event.rank is not None and event.rank in ranks)

    return is_first


def _has_errors(logs: Sequence[LogEvents]) -> bool:
    return any(event.is_error and not _is_echo(event) for log in logs for event in log.events)


def _is_echo(event: Event) -> bool:
    return event.cause in BY_NAME and BY_NAME[event.cause].depth <= ECHO


def _is_named_at_end(group: _Group, logs: Sequence[LogEvents]) -> bool:
    """Whether one of the last lines of a log names the cause, or the very last line mentions it."""
    last = {log.path: log.last.number for log in logs if log.last}
    for event in group.events:
        first_counted = last.get(event.line.path, 0) - (LAST_LINES if event.sure > PASSING else 0)
        if event.line.number >= first_counted:
            return True
    return False


def _is_far(event: Event, log: LogEvents) -> bool:
    """Whether a cause is only mentioned, and neither near the end of its log nor just above a program error."""
    if event.sure > PASSING or log.last is None:
        return event.sure <= PASSING
    if _OF_PYTHON.search(event.line.text):
        return True
    return event.line.number < log.last.number - LAST_LINES and not _is_near_error(event, log)


def _is_near_error(event: Event, log: LogEvents) -> bool:
    """Whether a program error stands within NEAR_ERROR lines."""
    distances = [other.line.number - event.line.number for other in log.events if other.cause == ERROR_OF_PROGRAM]
    return any(0 < abs(distance) <= NEAR_ERROR for distance in distances)


def _exact(event: Event) -> str:
    """The cause's name; of an out-of-memory error, the specific cause that its figures show."""
    if event.cause == "gpu_out_of_memory" and (figures := oom.parse(event.line.text)):
        return figures.cause
    return event.cause


def _explains(deep: _Group, shallow: _Group) -> bool:
    """Whether one cause explains another."""
    if deep is shallow:
        return False
    if (
        shallow.name in _ANNOUNCED
        and deep.depth > ENDING
        and deep.name not in _ANNOUNCED
        and _came_first(deep, shallow)
    ):
        return True
    if deep.name in _ANNOUNCED and _came_first(shallow, deep):
        return False
    named = shallow.cause is not None and deep.name in shallow.cause.follows
    back = deep.cause is not None and shallow.name in deep.cause.follows
    if named and back:
        return (deep.sure, deep.depth, -deep.order) > (shallow.sure, shallow.depth, -shallow.order)
    if not named and (back or deep.depth <= shallow.depth):
        return False
    if deep.sure <= HINT < shallow.sure or deep.sure <= PASSING:
        return False
    if deep.depth >= PROGRAM and shallow.depth >= PROGRAM and not named and deep.cause and shallow.cause:
        return _may_follow(deep, shallow) and deep.sure >= shallow.sure
    return _may_follow(deep, shallow)


def _came_first(one: _Group, other: _Group) -> bool:
    """Whether an error of the program precedes another cause, by time or in the same file."""
    if not any(event.is_error for event in one.events):
        return False
    if one.at and other.at:
        return one.at < other.at
    files = {event.line.path for event in (*one.events, *other.events)}
    return len(files) == 1 and min(e.order for e in one.events) < min(e.order for e in other.events)


def _may_follow(deep: _Group, shallow: _Group) -> bool:
    """False where the shallow cause clearly came first."""
    if deep.at and shallow.at:
        return deep.at <= shallow.at + SLACK_S
    return True


def _rank_of_root(group: _Group, logs: Sequence[LogEvents]) -> tuple[object, ...]:
    """A sort key: causes in error lines first, then the most certain, of the rank that failed first, the earliest."""
    failed_first = {log.first_failed for log in logs} - {None}
    of_first = any(event.rank in failed_first for event in group.events if event.rank is not None)
    strong = any(event.is_error for event in group.events) or group.depth in (GROUND, ENDING)
    return (
        group.depth <= ECHO,
        not strong,
        group.cause is None,
        -group.sure,
        not of_first,
        group.at or float("inf"),
        -group.depth,
        min(event.order for event in group.events),
    )


def _finding(group: _Group, base: Path | None) -> Finding:
    cause = group.cause or BY_NAME["rank_crashed"]
    events = sorted(group.events, key=lambda e: (-e.sure, e.line.at or 0.0, e.order))
    detail = next((words for e in events if (words := _figures(e))), "") or _hung(events)
    ranks = tuple(sorted({e.rank for e in events if e.rank is not None}))
    sure = group.sure
    if group.name == "gpu_memory_fragmented" or (
        group.name == "gpu_memory_taken" and not _shows_other_processes(group)
    ):
        sure = min(sure, LIKELY)
    if group.ended_by:
        sure = min(sure, LIKELY)
    if len({e.line.text for e in events}) > 1 and sure == HINT:
        sure = LIKELY
    shown = _distinct(events)[:SHOWN]
    return Finding(
        cause.name,
        cause.means,
        CONFIDENCE[max(HINT, sure)],
        cause.fix,
        ranks,
        tuple(evidence(e.line, base, e.rank) for e in shown),
        detail,
    )


def _shows_other_processes(group: _Group) -> bool:
    """Whether an out-of-memory message lists the processes that hold the memory."""
    figures = [oom.parse(event.line.text) for event in group.events]
    return any(figure and figure.others_are_named for figure in figures)


def _figures(event: Event) -> str:
    """What the figures of a line say, as a sentence; '' if it has none to explain."""
    text = event.line.text
    if event.cause == "disk_full" and text.startswith("the disk under"):
        return f"{text}: make room, then resume"
    if figures := oom.parse(text):
        return figures.words
    if event.rank is not None and (match := re.match(r"\s*exitcode\s*:\s*-(\d+) \(pid: (\d+)\)", text)):
        return _ended(f"rank {event.rank}", match)
    if match := re.match(r"\s*exitcode\s*:\s*-(\d+) \(pid: (\d+)\)", text):
        return _ended("a rank", match)
    return step_end(text) or task_words(text)


def _ended(who: str, match: re.Match[str]) -> str:
    why = "; cause unknown" if match[1] == "9" else ""
    verb = "was killed" if match[1] == "9" else "crashed"
    return f"{who} {verb} (pid {match[2]}, signal {match[1]}{why})"


def _hung(events: Sequence[Event]) -> str:
    """Which ranks fault tolerance has ended, as a sentence: their monitors log node, rank and seconds."""
    hung = [match for e in events if (match := _HUNG.search(e.line.text))]
    if not hung:
        return ""
    ranks = ", ".join(dict.fromkeys(f"rank {match[2]} on {match[1]}" for match in hung))
    return f"no heartbeat of {ranks} for {float(hung[0][3]):.0f} s, longer than it may take: ended (fault_tolerance)"


def _distinct(events: Sequence[Event]) -> list[Event]:
    """The events without those whose text differs only in numbers."""
    seen, kept = set(), []
    for event in events:
        form = "".join(c for c in event.line.text if not c.isdigit())[:120]
        if form not in seen:
            seen.add(form)
            kept.append(event)
    return kept


def evidence(line: LogLine, base: Path | None, rank: int | None = None) -> Evidence:
    """A line as evidence: without secrets, at most LONGEST characters."""
    clean = (redact_after(line.before, part) for part in line.text.split("KeyError: "))
    text = " ".join("KeyError: ".join(clean).split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    return Evidence(shown_path(line.path, base), line.number, text, line.rank if rank is None else rank)


def shown_path(path: Path, base: Path | None) -> str:
    """The path, relative to `base` if it is below that."""
    return str(path.relative_to(base) if base is not None and path.is_relative_to(base) else path)


def _first_error(groups: Sequence[_Group], logs: Sequence[LogEvents], base: Path | None) -> Evidence | None:
    """The first error of the rank that failed first: the one that torchrun or srun names, else the earliest."""
    errors = [e for group in groups if group.name == ERROR_OF_PROGRAM for e in group.events]
    tasks = [log.first_task for log in logs if log.first_task]
    if not errors and tasks:
        text = tasks[0].text
        return evidence(replace(tasks[0], text=task_words(text) or text), base)
    if not errors:
        errors = [e for group in groups for e in group.events if group.depth <= ECHO]
    if not errors:
        lasts = [log.fatal for log in logs if log.fatal] or [log.last for log in logs if log.last]
        return evidence(lasts[0], base) if lasts else None
    first = {log.first_failed for log in logs} | _first_tasks(logs)
    chosen = [e for e in errors if e.rank is not None and e.rank in first] or errors
    by_rank: dict[object, Event] = {}
    for event in chosen:
        by_rank[(str(event.line.path), event.rank)] = event  # the last error of a rank ended its program
    best = min(by_rank.values(), key=lambda e: (e.line.at or float("inf"), str(e.line.path), e.order))
    line = replace(best.line, text=best.words or best.line.text)
    return evidence(line, base, best.rank)


def _first_tasks(logs: Sequence[LogEvents]) -> set[int | None]:
    """The rank that ended first without being terminated by srun."""
    ends = [task for log in logs for task in log.tasks if task[2] != "Terminated"]
    return {int(ends[0][1])} if ends and ends[0][1].isdecimal() else set()


def _remark_finding(remark: Remark, base: Path | None) -> Finding:
    cause = BY_NAME[remark.cause]
    confidence = CONFIDENCE[CERTAIN if remark.cause == "loss_is_nan" else LIKELY]
    return Finding(cause.name, cause.means, confidence, cause.fix, (), (evidence(remark.line, base),), remark.words)


def _unique(findings: Iterable[Finding]) -> list[Finding]:
    return list({finding.name: finding for finding in findings}.values())
