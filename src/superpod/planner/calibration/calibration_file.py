"""A calibration as a hardware file, and as sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence

from superpod.planner.calibration.calibrate import Calibration
from superpod.planner.calibration.corrections import BY_NAME

SHOWN = 0.005
"""A number that is nearer to what is shipped is left out of the file: it changes nothing that can be measured."""


def text(calibrations: Sequence[Calibration], source: str) -> str:
    """A TOML file for `--hardware`, a table for every GPU; `source` says of which runs it is."""
    lines = [
        "# Written by `recipes calibrate`: what these machines and their software reach of what the planner ships.",
        "# Factors, 1 = as shipped, and shares of what is shipped as hidden. For `--hardware`, or a collection.",
    ]
    for one in calibrations:
        lines += ["", f"[calibration.{one.gpu}]", f"source = {json.dumps(source)}"]
        lines += [
            f"{name} = {value:.4g}  # {BY_NAME[name].about}{_in_words(name, value)}"
            for name, value in changed(one).items()
        ]
    return "\n".join(lines) + "\n"


def changed(one: Calibration) -> dict[str, float]:
    """The numbers that differ from what is shipped."""
    values = {name: one.values.get(name, correction.shipped) for name, correction in BY_NAME.items()}
    return {name: value for name, value in values.items() if abs(value - BY_NAME[name].shipped) > _shown(name)}


def _shown(name: str) -> float:
    """Seconds of a micro-batch count from less on than factors do."""
    return SHOWN / 10 if BY_NAME[name].kind == "amount" else SHOWN


def sentences(one: Calibration) -> list[str]:
    """How well it explains its runs, what it found, and what the runs leave open."""
    count = len(one.names)
    errors = f"{one.error(one.shipped):.1%} as shipped, {one.error(one.fitted):.1%} calibrated"
    if count > 1:
        errors += f", {one.error(one.left_out):.1%} on runs left out"
    lines = [f"{one.gpu}, {count} run{'s' * (count != 1)}: median error {errors}"]
    lines += [
        f"{name} {value:.3g}: {BY_NAME[name].about}{_in_words(name, value)}" for name, value in changed(one).items()
    ]
    if not changed(one):
        lines.append("as shipped: these runs are explained best by changing nothing")
    if count > 1 and one.error(one.left_out) >= one.error(one.shipped):
        lines.append("warning: runs that were left out are predicted no better than as shipped; measure more runs")
    own = changed(one)
    lines += [
        f"warning: these runs cannot tell {a} from {b}: both slow the same runs alike, and which it is, is a guess"
        for a, b in one.alike
        if a in own or b in own
    ]
    if moved := [name for name in one.silent if name in own]:
        lines.append(f"warning: these runs hardly feel {', '.join(moved)}: moved, but close to a guess")
    if kept := [name for name in one.silent if name not in own]:
        lines.append(f"of {', '.join(kept)} these runs say nothing: as shipped")
    return lines


def _in_words(name: str, value: float) -> str:
    kind = BY_NAME[name].kind
    if kind == "share":
        return ": off" if value < 0.1 else ""
    if kind == "level":
        return f": {value:.0%}"
    return f": {value:.0%} of what is shipped" if kind == "speed" else ""
