"""Write a calibration as a hardware file, and summarize it in sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence

from superpod.planner.calibration.calibrate import Calibration
from superpod.planner.calibration.corrections import CORRECTIONS_BY_NAME

MIN_CHANGE = 0.005
"""Minimum difference from the default; closer values are omitted: their effect is not measurable."""


def format_toml(calibrations: Sequence[Calibration], source: str) -> str:
    """Return a TOML file for `--hardware` with one table per GPU; `source` describes the calibration runs."""
    lines = [
        "# Written by `recipes calibrate`: corrections of the planner's default constants for these machines.",
        "# Factors (1 = default), and fractions of the default overlap. Use with --hardware, or in a collection.",
    ]
    for one in calibrations:
        lines += ["", f"[calibration.{one.gpu}]", f"source = {json.dumps(source)}"]
        lines += [
            f"{name} = {value:.4g}  # {CORRECTIONS_BY_NAME[name].about}{_explain(name, value)}"
            for name, value in changed_values(one).items()
        ]
    return "\n".join(lines) + "\n"


def changed_values(one: Calibration) -> dict[str, float]:
    """Return the corrections that differ from the defaults."""
    values = {name: one.values.get(name, correction.default) for name, correction in CORRECTIONS_BY_NAME.items()}
    return {
        name: value
        for name, value in values.items()
        if abs(value - CORRECTIONS_BY_NAME[name].default) > _min_change(name)
    }


def _min_change(name: str) -> float:
    """Return the minimum change of a correction; it is smaller for amounts in seconds than for factors."""
    return MIN_CHANGE / 10 if CORRECTIONS_BY_NAME[name].kind == "amount" else MIN_CHANGE


def summarize(one: Calibration) -> list[str]:
    """Return sentences on the calibration's errors, its corrections, and what the runs do not determine."""
    count = len(one.names)
    errors = f"{one.error(one.default_times):.1%} with the defaults, {one.error(one.calibrated_times):.1%} calibrated"
    if count > 1:
        errors += f", {one.error(one.held_out_times):.1%} on held-out runs"
    lines = [f"{one.gpu}, {count} run{'s' * (count != 1)}: median error {errors}"]
    changes = changed_values(one)
    lines += [
        f"{name} {value:.3g}: {CORRECTIONS_BY_NAME[name].about}{_explain(name, value)}"
        for name, value in changes.items()
    ]
    if not changes:
        lines.append("no correction: the default constants explain these runs best")
    if count > 1 and one.error(one.held_out_times) >= one.error(one.default_times):
        lines.append("warning: the calibration does not predict held-out runs better than the defaults; add more runs")

    lines += [
        f"warning: these runs do not distinguish {a} from {b}: the two values are not reliable"
        for a, b in one.indistinguishable
        if a in changes or b in changes
    ]
    weak_names = [name for name in one.undetermined if name in changes]
    if weak_names:
        lines.append(
            f"warning: these runs are barely sensitive to {', '.join(weak_names)}: the values are not reliable"
        )
    undetermined_names = [name for name in one.undetermined if name not in changes]
    if undetermined_names:
        lines.append(f"not determined by these runs, left at the default: {', '.join(undetermined_names)}")
    return lines


def _explain(name: str, value: float) -> str:
    """Return a suffix that explains the value, depending on the kind of correction."""
    kind = CORRECTIONS_BY_NAME[name].kind
    if kind == "share" and value < 0.1:
        return ": no overlap"
    if kind == "level":
        return f": {value:.0%}"
    if kind == "speed":
        return f": {value:.0%} of the default"
    return ""
