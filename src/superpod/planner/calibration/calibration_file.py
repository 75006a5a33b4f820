"""Write a calibration as a hardware file, and summarize it in sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence

from superpod.planner.calibration.calibrate import Calibration
from superpod.planner.calibration.corrections import CORRECTIONS_BY_NAME

MIN_CHANGE = 0.005
"""Minimum difference from the default; smaller differences have no measurable effect and are omitted."""


def format_toml(calibrations: Sequence[Calibration], source: str) -> str:
    """Format calibrations as a TOML file for `--hardware`, with a table per GPU; `source` describes the runs."""
    lines = [
        "# Written by `recipes calibrate`: corrections of the planner's default constants for these machines.",
        "# Factors (1 = default), and fractions of the default overlap. Use with --hardware, or in a collection.",
    ]
    for one in calibrations:
        lines += ["", f"[calibration.{one.gpu}]", f"source = {json.dumps(source)}"]
        for name, value in changed_values(one).items():
            group = next((group for group in one.groups if name in group), ())
            others = ", ".join(other for other in group if other != name)
            doubt = f"; not told apart from {others}" if others else ""
            lines.append(f"{name} = {value:.4g}  # {CORRECTIONS_BY_NAME[name].about}{_explain(name, value)}{doubt}")
    return "\n".join(lines) + "\n"


def changed_values(one: Calibration) -> dict[str, float]:
    """Return correction -> value for the corrections that differ from their defaults."""
    values = {name: one.values.get(name, correction.default) for name, correction in CORRECTIONS_BY_NAME.items()}
    return {
        name: value
        for name, value in values.items()
        if abs(value - CORRECTIONS_BY_NAME[name].default) > _min_change(name)
    }


def _min_change(name: str) -> float:
    """Return the minimum difference of a correction from its default; for amounts, it is a tenth of MIN_CHANGE."""
    return MIN_CHANGE / 10 if CORRECTIONS_BY_NAME[name].kind == "amount" else MIN_CHANGE


def summarize(one: Calibration) -> list[str]:
    """Return lines about a calibration: its errors, its corrections, and those that the runs do not determine."""
    count = len(one.names)
    errors = f"{one.error(one.default_times):.1%} with the defaults, {one.error(one.calibrated_times):.1%} calibrated"
    if count > 1:
        errors += f", {one.error(one.held_out_times):.1%} on held-out runs"
    lines = [f"{one.gpu}, {count} run{'s' * (count != 1)}: median error {errors}"]
    changes = changed_values(one)
    grouped = {name for group in one.groups for name in group}
    lines += [_describe(one, name, value) for name, value in changes.items() if name not in grouped]
    for group in one.groups:
        written = ", ".join(f"{name} {changes[name]:.3g}" for name in group if name in changes)
        choice = f"; one choice that explains them: {written}" if written else ""
        lines.append(f"these runs cannot tell apart: {', '.join(group)}{choice}")
    if not changes:
        lines.append("no correction: the default constants explain these runs best")
    if count > 1 and one.error(one.held_out_times) >= one.error(one.default_times):
        lines.append("warning: the calibration does not predict held-out runs better than the defaults; add more runs")
    if one.undetermined:
        lines.append(f"not determined by these runs, left at the default: {', '.join(one.undetermined)}")
    return lines


def _describe(one: Calibration, name: str, value: float) -> str:
    """Format a correction with its 80 % interval and meaning."""
    interval = one.ranges.get(name)
    interval_text = f" (80 %: {interval[0]:.3g} to {interval[1]:.3g})" if interval else ""
    return f"{name} {value:.3g}{interval_text}: {CORRECTIONS_BY_NAME[name].about}{_explain(name, value)}"


def _explain(name: str, value: float) -> str:
    """Return a suffix that explains the value of a correction, such as `: 80% of the default`."""
    kind = CORRECTIONS_BY_NAME[name].kind
    if kind == "share" and value < 0.1:
        return ": no overlap"
    if kind == "level":
        return f": {value:.0%}"
    if kind == "speed":
        return f": {value:.0%} of the default"
    return ""
