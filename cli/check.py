"""`recipes check`: whether a run is legal and fits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from superpod.cli.plan_options import PlanOptions, title, with_plan_options
from superpod.cli.request_options import AsJson

if TYPE_CHECKING:
    from superpod.planner.legality import Broken
    from superpod.planner.planned_job import PlannedJob
    from superpod.planner.predict import Prediction


@with_plan_options("fabric")
def check(options: PlanOptions, as_json: AsJson = False) -> None:
    """Say whether a run is legal and fits, before the queue does; exit 2 with every reason if not."""
    from superpod.planner import explain, legality, predict

    job = options.job()
    violations, warnings = legality.violations(job), legality.warnings(job)
    prediction = predict.one(job)
    shortfall = explain.short_of(job, prediction) if prediction.verdict == "oom" or prediction.tight else ""
    passed = prediction.verdict == "ok" and not violations
    if as_json:
        print(json.dumps(_facts(prediction, violations, warnings, shortfall), indent=1))
    else:
        _print(job, prediction, violations, warnings, shortfall)
        # A recipe has its layout; a model without one, or with one that fails, is what `recipes plan` is for.
        if not options.is_recipe and (options.layout is None or prediction.verdict != "ok"):
            print(f"next: {options.command('plan', without=('layout',))} ranks every layout that is legal and fits")
    if not passed:
        raise typer.Exit(2)


def _facts(
    prediction: Prediction, violations: list[Broken], warnings: list[Broken], shortfall: str
) -> dict[str, object]:
    return {
        "verdict": prediction.verdict,
        "broken": [violation._asdict() for violation in violations],
        "warnings": [warning._asdict() for warning in warnings],
        "short": shortfall,
        "reserved_gib": prediction.reserved_gib_max,
        "usable_gib": prediction.limit_gib,
        "step_time_s": prediction.step_time_s,
    }


def _print(
    job: PlannedJob, prediction: Prediction, violations: list[Broken], warnings: list[Broken], shortfall: str
) -> None:
    print(title(job))
    for violation in violations:
        print(f"refused: {violation.message}" + _next(violation))
    if shortfall:
        print(f"{'tight' if prediction.tight else 'does not fit'}: {shortfall}")
    for warning in warnings:
        print(f"warning: {warning.message}" + _next(warning))
    if prediction.verdict == "ok" and not violations:
        print(
            f"ok: legal; {prediction.allocated_gib_max:.1f} GiB allocated and {prediction.reserved_gib_max:.1f} "
            f"reserved of {prediction.limit_gib:.1f} on the fullest rank; {prediction.step_time_s:.3g} s a step"
        )


def _next(violation: Broken) -> str:
    return f"\n  next: {violation.fix}" if violation.fix else ""
