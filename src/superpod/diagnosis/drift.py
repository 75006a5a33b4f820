"""Detect a run whose steps have become slower, from the step times in metrics.jsonl. Standard library only."""

from __future__ import annotations

import statistics

from superpod.common.json_files import JsonObject, is_number

SLOWDOWN = 0.3
"""Minimum relative increase of the step time that is reported."""

WINDOW = 8
"""Number of steps at the start and at the end of the run whose median step times are compared."""


def alarm(lines: list[JsonObject]) -> str:
    """Return a message if the newest steps are slower than the first steps; '' if not, or if there are too few steps.

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
    first_s = statistics.median(line["step_time_s"] for line in steady[:WINDOW])
    newest_s = statistics.median(line["step_time_s"] for line in steady[-WINDOW:])
    limit_s = first_s * (1 + SLOWDOWN)
    if first_s <= 0 or newest_s < limit_s:
        return ""
    since = next(line for line in steady[WINDOW:] if line["step_time_s"] > limit_s)
    return (
        f"a step takes {newest_s:.3g} s, {newest_s / first_s - 1:.0%} more than at the start ({first_s:.3g} s), "
        f"since about step {since['step']} (attempt {since.get('attempt', '?')})"
    )
