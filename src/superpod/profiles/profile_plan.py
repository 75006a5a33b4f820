"""Compare a profile with the plan: the planned and the measured time of each term of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superpod.profiles.profile_breakdown import TimeBreakdown
from superpod.profiles.profile_classes import COMPUTE

COMMUNICATION = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data"}


@dataclass(frozen=True)
class Row:
    """One term of a step, or several that a profile cannot distinguish, in seconds per step."""

    name: str
    planned_s: float
    measured_s: float


def rows(terms: Mapping[str, float], breakdown: TimeBreakdown) -> list[Row]:
    """Compare the planned terms of a step with the measured times; terms that a profile cannot distinguish share a row.

    Kernels do not reveal whether they recompute, so computation and recomputation share a row. If no process group is
    recorded for some collectives, all communication shares a row. A rank waits for its pipeline in a receive, so the
    bubble, sends and idle time share a row.

    Args:
        terms: planned seconds per step of each term.
        breakdown: the measured times.
    """
    steps = max(1, breakdown.steps)
    measured_s = {name: seconds / steps for name, seconds in breakdown.classes.items()}
    exposed_s = {group: seconds / steps for group, seconds in breakdown.exposed.items()}
    planned = dict(terms)

    def take(*names: str) -> float:
        return sum(planned.pop(name, 0.0) for name in names)

    compute = sum(measured_s[name] for name in COMPUTE if name != "optimizer") + measured_s["copies"]
    rows = [
        Row("computation and recomputation, copies", take("compute", "recompute"), compute),
        Row("optimizer", take("optimizer"), measured_s["optimizer"]),
    ]

    # In a pipeline, idle time belongs to the bubble, otherwise to launches and fixed costs.
    is_pipeline = bool(planned.get("pp_bubble") or planned.get("pp_p2p"))
    idle_s = measured_s["idle"] if is_pipeline else 0.0
    name = "launches and fixed costs" if is_pipeline else "launches and fixed costs, idle"
    rows.append(Row(name, take("overhead"), measured_s["gaps"] + measured_s["idle"] - idle_s))

    if exposed_s.get(""):
        total = sum(exposed_s.values())
        if is_pipeline:
            name = "communication, exposed, bubble and idle"
            rows.append(Row(name, take(*COMMUNICATION, "pp_p2p", "pp_bubble"), total + idle_s))
        else:
            rows.append(Row("communication, exposed", take(*COMMUNICATION), total))
    else:
        for group, word in COMMUNICATION.items():
            rows.append(Row(f"{word}-parallel communication, exposed", take(group), exposed_s.get(group, 0.0)))
        pipeline_s = exposed_s.get("pp", 0.0) + idle_s
        rows.append(Row("pipeline: bubble, sends, idle", take("pp_p2p", "pp_bubble"), pipeline_s))
    rows.append(Row("other", sum(planned.values()), 0.0))
    return [row for row in rows if row.planned_s > 0 or row.measured_s > 0]
