"""`recipes plan`: every legal layout of a run, costed and ranked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import option_syntax, tables
from superpod.cli.plan_options import PlanOptions, with_plan_options
from superpod.cli.request_options import AsJson
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob
    from superpod.planner.search import SearchResult

Shown = dict[str, "SearchResult"]
"""The search in each precision tried, the fastest first."""


@with_plan_options("layout")
def plan(
    options: PlanOptions,
    precision: Annotated[str | None, typer.Option("--precision", help="bf16, fp8cs, ..., or auto: try them.")] = None,
    memory_cap: Annotated[float | None, typer.Option("--memory-cap", help="GiB a GPU may reserve.")] = None,
    fix: Annotated[str | None, typer.Option("--fix", help="Only layouts with these, such as tp=8,mbs=1.")] = None,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="How many layouts to show.")] = 10,
    start: Annotated[
        Path | None, typer.Option("--from", help="DeepSpeed JSON, Accelerate YAML, Megatron args.")
    ] = None,
    compare_rules: Annotated[
        bool, typer.Option("--compare-rules", help="Show the textbook rules' choice too.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the best into recipes/layouts/MODEL.toml.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rank every legal layout by step time, of those that fit; say why the first one wins. Needs no GPU."""
    from superpod.planner import config_import, plans

    theirs = config_import.read(start) if start else None
    if theirs is not None:
        gpus = options.gpus or (None if options.nodes else theirs.gpus)
        options = replace(options, gpus=gpus, gbs=options.gbs or theirs.gbs, seq=options.seq or theirs.seq)
        options, precision = replace(options, task=options.task or theirs.task), precision or theirs.precision
    auto = precision == "auto"
    job = options.job(precision=None if auto else precision)
    found = plans.search(
        job, auto=auto, fixed=option_syntax.layout_values(fix, "--fix") if fix else {}, memory_cap_gib=memory_cap
    )
    yours = theirs.job(job) if theirs is not None else None
    if write:
        _write(options.name, found)
    if as_json:
        print(json.dumps(plans.as_json(found, top=top, memory_cap_gib=memory_cap), indent=1))
    else:
        _print(found, top, yours, theirs.left_out if theirs else (), compare_rules)
    if not any(len(f.ranked) for f in found.values()):
        raise typer.Exit(2)


def _print(found: Shown, top: int, yours: PlannedJob | None, left_out: tuple[str, ...], rules: bool) -> None:
    from superpod.planner import explain, plans

    best = next(iter(found.values()))
    job = best.job
    legal = sum(map(len, found.values()))
    fit = sum(len(f.ranked) for f in found.values())
    tables.say(
        f"{job.model.name}, {job.gpus} x {job.node.gpu.name}, seq {job.seq}, gbs {job.layout.gbs}, "
        f"{' or '.join(found)}: {legal:,} legal layouts, {fit:,} fit"
    )
    if not fit:
        tables.say(plans.closest(best))
        return
    _table(found, top)
    lines = [*explain.why(best, int(best.ranked[0])), *explain.misses(best)]
    lines += _yours(yours, best, left_out) if yours is not None else []
    lines += [plans.against_rules(best)] if rules else []
    for line in lines:
        tables.say(f"- {line}")


def _table(found: Shown, top: int) -> None:
    from superpod.planner import explain, plans
    from superpod.planner.hardware import GIB

    several = ["precision"] * (len(found) > 1)
    titles = ["layout", *several, "step s", "tokens/s/GPU", "MFU %", "GiB", "bubble %"]
    rows = []
    for precision, f, i in plans.ranked(found)[:top]:
        job = f.job_of(i)
        seconds = float(f.seconds[i])
        bubble = float(f.terms["pp_bubble"][i]) / seconds
        figures = (job.tokens / seconds / job.gpus, 100 * plans.mfu(job, seconds), f.reserved[i] / GIB, 100 * bubble)
        texts_of = (f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" for x in figures)
        rows.append([explain.title(job.layout), *([precision] * len(several)), f"{seconds:.3f}", *texts_of])
    tables.show_folded(titles, rows)


def _yours(yours: PlannedJob, best: SearchResult, left_out: tuple[str, ...]) -> list[str]:
    from superpod.planner import explain, predict

    prediction = predict.one(yours)
    line = f"yours, {explain.title(yours.layout)}: {prediction.verdict}"
    if prediction.step_time_s:
        slower = prediction.step_time_s / float(best.seconds[best.ranked[0]]) - 1
        line += f", {prediction.step_time_s:.3f} s a step, {slower:+.1%} against the best"
    lines = [line + (f": {prediction.reason}" if prediction.reason else "")]
    return lines + [f"no counterpart here, left out: {', '.join(left_out)}"] * bool(left_out)


def _write(name: str, found: Shown) -> None:
    """The best layout into the model's table of recipes; another process never sees half a file."""
    from superpod.recipes import layout_file

    precision, best = next(iter(found.items()))
    if not len(best.ranked):
        raise UserError("nothing fits, so nothing is written", "raise --gpus, or see above")
    path = layout_file.write(name, best.job.replace(precision=precision, layout=best.layout(int(best.ranked[0]))))
    typer.echo(f"wrote {path}", err=True)
