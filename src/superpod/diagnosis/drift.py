"""An alarm for a run that has become slower: its newest steps against its first ones. Standard library only."""

from __future__ import annotations

import statistics

from superpod.common.files import JsonObject, is_number

SHARE = 0.3
"""Slower by this share raises the alarm."""

WINDOW = 8
"""Steps whose medians are compared: so many of the first, and so many of the newest."""


def alarm(lines: list[JsonObject], share: float = SHARE) -> str:
    """How much longer the newest steps take than the first ones did, in words; '' when they don't, or are too few.

    `lines` are those of metrics.jsonl. The first step of each attempt is left out: it compiles and allocates. Medians
    are compared, so that a save or a hiccup raises no alarm.
    """
    steady: list[JsonObject] = []
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
