"""Detect a run that has become slower by comparing its newest steps with its first ones. Standard library only."""

from __future__ import annotations

import statistics

from superpod.common.json_files import JsonObject, is_number

SHARE = 0.3
"""Relative slowdown that is reported."""

WINDOW = 8
"""Number of steps at the beginning and at the end whose medians are compared."""


def alarm(lines: list[JsonObject], share: float = SHARE) -> str:
    """Return a message if the newest steps take longer than the first ones; '' if not, or if there are too few steps.

    `lines` are the lines of metrics.jsonl. The first step of each attempt is excluded, since it compiles and allocates.
    Medians are compared, so a save or a single slow step is not reported.
    """
    steady: list[JsonObject] = []
    last_attempt = None
    for line in lines:
        if line.get("attempt") == last_attempt and is_number(line.get("step_time_s")):
            steady.append(line)
        last_attempt = line.get("attempt")
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
