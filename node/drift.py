"""A run that has become slower: its newest steps against its first ones. Standard library only."""

from __future__ import annotations

import statistics
from typing import Any

from .files import is_number

SHARE = 0.3
"""Slower by this share: an alarm."""

WINDOW = 8
"""Steps on either side."""


def alarm(lines: list[dict[str, Any]], share: float = SHARE) -> str:
    """In words, that the newest steps take longer than the first ones did; '' when they don't, or there are too few.

    The first step of each attempt is left out: it compiles and allocates. Medians, so that a save or a hiccup is no
    alarm.
    """
    steady: list[dict[str, Any]] = []
    before = None
    for line in lines:
        if line.get("attempt") == before and is_number(line.get("step_time_s")):
            steady.append(line)
        before = line.get("attempt")
    if len(steady) < 2 * WINDOW:
        return ""
    first = statistics.median(line["step_time_s"] for line in steady[:WINDOW])
    last = statistics.median(line["step_time_s"] for line in steady[-WINDOW:])
    if first <= 0 or last < first * (1 + share):
        return ""
    since = next(line for line in steady[WINDOW:] if line["step_time_s"] > first * (1 + share))
    return (
        f"steps take {last:.3g} s, {last / first - 1:.0%} more than the {first:.3g} s of the first ones, "
        f"since about step {since['step']} (attempt {since.get('attempt', '?')})"
    )
