"""Planned beside measured: the planner's terms of a step, and what a profile has for each. Both columns add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superpod.profiles.profile_breakdown import TimeBreakdown
from superpod.profiles.profile_classes import COMPUTE

COMMUNICATION = ("tp", "cp", "ep", "dp")


@dataclass(frozen=True)
class Row:
    """One line of the comparison, in seconds of one step."""

    name: str
    planned_s: float
    measured_s: float


def rows(terms: Mapping[str, float], sums: TimeBreakdown) -> list[Row]:
    """The comparison, term by term; what a profile cannot tell apart stands in one line.

    Kernels do not say whether they recompute, so that computation is one line with recomputation. Where no process
    group is named beside collectives, communication is one line. A rank that waits for its pipeline does so in a
    receive: the bubble and the sends are one line, with the time in which nothing ran.
    """
    steps = max(1, sums.steps)
    measured = {name: seconds / steps for name, seconds in sums.classes.items()}
    exposed = {group: seconds / steps for group, seconds in sums.exposed.items()}
    planned = dict(terms)
    compute = sum(measured[name] for name in COMPUTE if name != "optimizer") + measured["copies"]
    pipeline = bool(planned.get("pp_bubble") or planned.get("pp_p2p"))
    listed = [
        Row("computation and recomputation, copies", _take(planned, "compute", "recompute"), compute),
        Row("optimizer", _take(planned, "optimizer"), measured["optimizer"]),
    ]
    waiting = measured["gaps"] + (0.0 if pipeline else measured["idle"])
    listed.append(Row("launches and fixed costs, idle" if not pipeline else "launches and fixed costs",
                      _take(planned, "overhead"), waiting))  # fmt: skip
    if exposed.get(""):  # some group has no name
        total = sum(exposed.values())
        terms_of = (*COMMUNICATION, "pp_p2p", "pp_bubble") if pipeline else COMMUNICATION
        name = "communication, exposed" + (", bubble and idle" if pipeline else "")
        listed.append(Row(name, _take(planned, *terms_of), total + (measured["idle"] if pipeline else 0.0)))
    else:
        words = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data"}
        for group, word in words.items():
            name = f"{word}-parallel communication, exposed"
            listed.append(Row(name, _take(planned, group), exposed.get(group, 0.0)))
        sent = exposed.get("pp", 0.0) + (measured["idle"] if pipeline else 0.0)
        listed.append(Row("pipeline: bubble, sends, idle", _take(planned, "pp_p2p", "pp_bubble"), sent))
    listed.append(Row("other", sum(planned.values()), 0.0))
    return [row for row in listed if row.planned_s > 0 or row.measured_s > 0]


def _take(planned: dict[str, float], *names: str) -> float:
    return sum(planned.pop(name, 0.0) for name in names)
