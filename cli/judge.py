"""`recipes check`, `memory`, `explain` and `predict`: one layout judged, or a table of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import subject
from superpod.cli.subject import Said

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob

BAR = 48
"""Characters of a full bar."""
SHADES = ("bright_blue", "cyan", "green", "yellow", "magenta", "red", "bright_black", "white")


@subject.about("fabric")
def check(said: Said, as_json: subject.AsJson = False) -> None:
    """Say whether a run is legal and fits, before the queue does; exit 2 with every reason if not."""
    from superpod.planner import explain, legality, predict

    job = said.job()
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
        print(_title(job))
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
        if not said.is_recipe and (said.layout is None or prediction.verdict != "ok"):
            print(f"next: {said.command('plan', without=('layout',))} ranks every layout that is legal and fits")
    if prediction.verdict != "ok" or broken:
        raise typer.Exit(2)


@subject.about("fabric")
def memory(said: Said, as_json: subject.AsJson = False) -> None:
    """Show what each pipeline rank's memory holds at its peak, by owner."""
    from superpod.planner import columns, legality, plans
    from superpod.planner import memory as model

    job = said.job()
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

    from superpod.planner.predict import GIB

    console = Console(highlight=False)
    console.print(_title(job), soft_wrap=True, markup=False)
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


@subject.about("fabric")
def explain(said: Said) -> None:
    """Say what bounds a run, where its step's time goes, and the next move."""
    from superpod.planner import explain as words
    from superpod.planner import legality, predict

    job = said.job()
    legality.require(job)
    prediction = predict.one(job)
    seconds = prediction.step_time_s or 0.0
    print(_title(job))
    print(f"step {seconds:.3f} s, {prediction.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {prediction.mfu:.1%}")
    for key, value in sorted(prediction.terms_s.items(), key=lambda item: -item[1]):
        if value > 0.001 * seconds:
            print(f"  {value / seconds:6.1%}  {value:9.4f} s  {words.BOUNDS.get(key, key)}")
    print(words.bound(prediction))
    if job.layout.pp > 1:
        print(words.pipeline(job))
    if prediction.verdict == "oom" or prediction.tight:
        print(f"{'tight' if prediction.tight else 'does not fit'}: {words.short_of(job, prediction)}")
    for line in words.better(job, prediction):
        print(f"next: {line}")


def predict(
    rows: Annotated[Path, typer.Option("--from", help="CSV with the columns of docs/planner.md.")],
    out: Annotated[Path, typer.Option("--out", help="CSV to write: a row for each, in the same order.")],
) -> None:
    """Predict memory and step time of every row of a table, with a verdict: ok, oom, illegal or unsupported."""
    from superpod.planner.tables import csv_rows

    counts = csv_rows.predict(rows, out)
    print(f"{out}: " + ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items()))


def _title(job: PlannedJob) -> str:
    from superpod.planner.explain import title

    return (
        f"{job.model.name} {job.task}, {job.gpus} x {job.node.gpu.name} {job.precision}, seq {job.seq}, "
        f"gbs {job.layout.gbs}: {title(job.layout)}"
    )
