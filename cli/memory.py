"""`recipes memory`: what fills the memory of each pipeline rank."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from superpod.cli.plan_options import PlanOptions, title, with_plan_options
from superpod.cli.request_options import AsJson

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob

BAR = 48
"""Characters of a full bar."""
SHADES = ("bright_blue", "cyan", "green", "yellow", "magenta", "red", "bright_black", "white")


@with_plan_options("fabric")
def memory(options: PlanOptions, as_json: AsJson = False) -> None:
    """Show what fills each pipeline rank's memory at its peak, by owner."""
    from superpod.planner import columns, legality, plans
    from superpod.planner import memory as model

    job = options.job()
    legality.require(job)
    stages = plans.stages(job)
    limit, reserved = model.limit(job), model.reserved(job, columns.of(job))
    if as_json:
        usable = {"usable_bytes": round(limit), "stages": stages}
        print(json.dumps(usable | {"reserved_bytes": [round(float(r)) for r in reserved]}, indent=1))
        return
    _bars(job, stages, limit, [float(r) for r in reserved])


def _bars(job: PlannedJob, stages: list[dict], limit: float, reserved: list[float]) -> None:
    from rich.console import Console
    from rich.text import Text

    from superpod.planner.hardware import GIB

    console = Console(highlight=False)
    console.print(title(job), soft_wrap=True, markup=False)
    owners = sorted(stages[0]["bytes"], key=lambda key: -max(stage["bytes"][key] for stage in stages))
    color = {key: SHADES[min(i, len(SHADES) - 1)] for i, key in enumerate(owners)}
    widest = max(limit, *reserved)
    for stage in stages:
        bar, used = Text(f"rank {stage['rank']:>3} "), 0.0
        for key in owners:
            start = round(used / widest * BAR)
            used += stage["bytes"][key]
            bar.append("█" * (round(used / widest * BAR) - start), color[key])
        end = round(used / widest * BAR)
        bar.append("░" * (round(reserved[stage["rank"]] / widest * BAR) - end), "bright_black")
        mark = round(limit / widest * BAR)
        bar.append(" " * max(0, mark - len(bar) + 9) + "|")
        over = "  over" if reserved[stage["rank"]] > limit else ""
        bar.append(f" {used / GIB:6.1f} GiB allocated, {reserved[stage['rank']] / GIB:6.1f} reserved{over}")
        console.print(bar, soft_wrap=True)
    console.print(f"| = {limit / GIB:.1f} GiB usable; ░ = reserved and not allocated; of the first rank:")
    for key in owners:
        size = stages[0]["bytes"][key] / GIB
        if max(stage["bytes"][key] for stage in stages) > 0:
            console.print(Text("  █ ", color[key]) + Text(f"{key.replace('_', ' '):<14} {size:8.2f} GiB"))
