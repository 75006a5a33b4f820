"""Sentences with the numbers in lines of a log: sizes, signals, exit codes, ranks. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from superpod.diagnosis import oom
from superpod.diagnosis.log_events import Event
from superpod.diagnosis.log_patterns import TaskEnd, step_end

_HUNG = re.compile(r"RankMonServer\d+@(\S+):(\d+)\] Did not get (?:initial|subsequent) heartbeat\. ?Waited ([\d.]+)")


def describe(event: Event) -> str | None:
    """Return a sentence with the numbers in a line; None if it has none."""
    text = event.line.text
    if event.detail:
        return event.detail
    memory = oom.parse(text)
    if memory:
        return memory.summary
    exit_code = re.match(r"\s*exitcode\s*:\s*-(\d+) \(pid: (\d+)\)", text)
    if exit_code:
        rank = "a rank" if event.rank is None else f"rank {event.rank}"
        return _describe_signal(rank, exit_code[1], exit_code[2])
    end = TaskEnd.parse(text)
    return step_end(text) or (end.describe() if end else None)


def _describe_signal(rank: str, number: str, pid: str) -> str:
    if number == "9":
        return f"{rank} was killed (pid {pid}, signal 9; cause unknown)"
    return f"{rank} crashed (pid {pid}, signal {number})"


def describe_hung_ranks(events: Sequence[Event]) -> str:
    """Return a sentence about the ranks that fault tolerance has killed; '' if none. Monitors log node, rank,
    seconds.
    """
    hung_ranks = [match for match in (_HUNG.search(event.line.text) for event in events) if match]
    if not hung_ranks:
        return ""
    ranks = ", ".join(dict.fromkeys(f"rank {match[2]} on {match[1]}" for match in hung_ranks))
    waited_s = float(hung_ranks[0][3])
    return f"no heartbeat of {ranks} for {waited_s:.0f} s, longer than the timeout: killed by fault_tolerance"
