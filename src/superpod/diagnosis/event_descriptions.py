"""Describe log events in a sentence with their sizes, signals, exit codes and ranks. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from superpod.diagnosis import oom
from superpod.diagnosis.log_events import Event
from superpod.diagnosis.log_patterns import TaskEnd, step_end

_HUNG = re.compile(r"RankMonServer\d+@(\S+):(\d+)\] Did not get (?:initial|subsequent) heartbeat\. ?Waited ([\d.]+)")
"""A message of a rank's monitor: node, rank, seconds."""


def describe(event: Event) -> str | None:
    """Return a sentence with the sizes, signal or exit code in the event's line; None if the line contains none."""
    text = event.line.text
    if event.detail:
        return event.detail
    memory = oom.parse(text)
    if memory:
        return memory.summary
    exit_code = re.match(r"\s*exitcode\s*:\s*-(\d+) \(pid: (\d+)\)", text)
    if exit_code:
        rank = "a rank" if event.rank is None else f"rank {event.rank}"
        signal, pid = exit_code[1], exit_code[2]
        if signal == "9":
            return f"{rank} was killed (pid {pid}, signal 9; cause unknown)"
        return f"{rank} crashed (pid {pid}, signal {signal})"
    end = TaskEnd.parse(text)
    return step_end(text) or (end.describe() if end else None)


def describe_hung_ranks(events: Sequence[Event]) -> str:
    """Return a sentence with the ranks that nvidia-resiliency-ext killed because they hung; '' if there are none."""
    hung_ranks = [match for match in (_HUNG.search(event.line.text) for event in events) if match]
    if not hung_ranks:
        return ""
    ranks = ", ".join(dict.fromkeys(f"rank {match[2]} on {match[1]}" for match in hung_ranks))
    waited_s = float(hung_ranks[0][3])
    # `causes/network.py` recognizes this message in the output of a later attempt.
    return f"no heartbeat of {ranks} for {waited_s:.0f} s, longer than the timeout: killed by fault_tolerance"
