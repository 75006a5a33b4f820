"""`recipes check`: whether a run is legal and fits."""

from __future__ import annotations

import json

import typer

from superpod.cli.plan_options import PlanOptions, title, with_plan_options
from superpod.cli.request_options import AsJson


@with_plan_options("fabric")
def check(options: PlanOptions, as_json: AsJson = False) -> None:
    """Say whether a run is legal and fits, before the queue does; exit 2 with every reason if not."""
    from superpod.planner import explain, legality, predict

    job = options.job()
    broken, warned = legality.violations(job), legality.warnings(job)
    prediction = predict.one(job)
    short = explain.short_of(job, prediction) if prediction.verdict == "oom" or prediction.tight else ""
    if as_json:
        report = {
            "verdict": prediction.verdict,
            "broken": [each._asdict() for each in broken],
            "warnings": [each._asdict() for each in warned],
            "short": short,
            "reserved_gib": prediction.reserved_gib_max,
            "usable_gib": prediction.limit_gib,
            "step_time_s": prediction.step_time_s,
        }
        print(json.dumps(report, indent=1))
    else:
        print(title(job))
        for each in broken:
            print(f"refused: {each.message}" + (f"\n  next: {each.fix}" if each.fix else ""))
        if short:
            print(f"{'tight' if prediction.tight else 'does not fit'}: {short}")
        for each in warned:
            print(f"warning: {each.message}" + (f"\n  next: {each.fix}" if each.fix else ""))
        if prediction.verdict == "ok" and not broken:
            print(
                f"ok: legal; {prediction.allocated_gib_max:.1f} GiB allocated and {prediction.reserved_gib_max:.1f} "
                f"reserved of {prediction.limit_gib:.1f} on the fullest rank; {prediction.step_time_s:.3g} s a step"
            )
        if not options.is_recipe and (options.layout is None or prediction.verdict != "ok"):
            print(f"next: {options.command('plan', without=('layout',))} ranks every layout that is legal and fits")
    if prediction.verdict != "ok" or broken:
        raise typer.Exit(2)
