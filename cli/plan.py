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

Searches = dict[str, "SearchResult"]
"""A search for every precision tried, the fastest first."""


@with_plan_options("layout")
def plan(
    options: PlanOptions,
    precision: Annotated[str | None, typer.Option("--precision", help="bf16, fp8cs, ..., or auto for all.")] = None,
    memory_cap: Annotated[float | None, typer.Option("--memory-cap", help="GiB a GPU may reserve.")] = None,
    fix: Annotated[str | None, typer.Option("--fix", help="Only layouts that have these, such as tp=8,mbs=1.")] = None,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="How many layouts to show.")] = 10,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="A config to import: DeepSpeed JSON, Accelerate YAML, Megatron args."),
    ] = None,
    compare_rules: Annotated[
        bool, typer.Option("--compare-rules", help="Also show what the textbook rules choose.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the best to recipes/layouts/MODEL.toml.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rank the legal layouts that fit by step time, and say why the first one wins. Needs no GPU."""
    from superpod.planner import config_import, plans

    imported = config_import.read(start) if start else None
    if imported is not None:  # options of the command line win over those of the imported config
        gpus = options.gpus or (None if options.nodes else imported.gpus)
        options = replace(options, gpus=gpus, gbs=options.gbs or imported.gbs, seq=options.seq or imported.seq)
        options, precision = replace(options, task=options.task or imported.task), precision or imported.precision
    auto = precision == "auto"
    job = options.job(precision=None if auto else precision)
    searches = plans.search(
        job, auto=auto, fixed=option_syntax.layout_values(fix, "--fix") if fix else {}, memory_cap_gib=memory_cap
    )
    if write:
        _write(options.name, searches)
    if as_json:
        print(json.dumps(plans.as_json(searches, top=top, memory_cap_gib=memory_cap), indent=1))
    else:
        imported_job = imported.job(job) if imported is not None else None
        _print(searches, top, imported_job, imported.left_out if imported else (), compare_rules)
    if not any(len(search.ranked) for search in searches.values()):
        raise typer.Exit(2)


def _print(
    searches: Searches, top: int, imported_job: PlannedJob | None, left_out: tuple[str, ...], rules: bool
) -> None:
    from superpod.planner import explain, plans

    best = next(iter(searches.values()))
    job = best.job
    legal = sum(map(len, searches.values()))
    fit = sum(len(search.ranked) for search in searches.values())
    tables.say(
        f"{job.model.name}, {job.gpus} x {job.node.gpu.name}, seq {job.seq}, gbs {job.layout.gbs}, "
        f"{' or '.join(searches)}: {legal:,} legal layouts, {fit:,} fit"
    )
    if not fit:
        tables.say(plans.closest(best))
        return
    _table(searches, top)
    lines = [*explain.why(best, int(best.ranked[0])), *explain.misses(best)]
    lines += _comparison(imported_job, best, left_out) if imported_job is not None else []
    lines += [plans.against_rules(best)] if rules else []
    for line in lines:
        tables.say(f"- {line}")


def _table(searches: Searches, top: int) -> None:
    from superpod.planner import explain, plans
    from superpod.planner.hardware import GIB

    several = ["precision"] * (len(searches) > 1)
    titles = ["layout", *several, "step s", "tokens/s/GPU", "MFU %", "GiB", "bubble %"]
    rows = []
    for precision, search, i in plans.ranked(searches)[:top]:
        job = search.job_of(i)
        seconds = float(search.seconds[i])
        bubble = float(search.terms["pp_bubble"][i]) / seconds
        figures = (
            job.tokens / seconds / job.gpus,
            100 * plans.mfu(job, seconds),
            search.reserved[i] / GIB,
            100 * bubble,
        )
        texts = (f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" for x in figures)
        rows.append([explain.title(job.layout), *([precision] * len(several)), f"{seconds:.3f}", *texts])
    tables.show_folded(titles, rows)


def _comparison(imported_job: PlannedJob, best: SearchResult, left_out: tuple[str, ...]) -> list[str]:
    """How an imported config does against the best layout, and which of its settings have no counterpart here."""
    from superpod.planner import explain, predict

    prediction = predict.one(imported_job)
    line = f"yours, {explain.title(imported_job.layout)}: {prediction.verdict}"
    if prediction.step_time_s:
        slower = prediction.step_time_s / float(best.seconds[best.ranked[0]]) - 1
        line += f", {prediction.step_time_s:.3f} s a step, {slower:+.1%} against the best"
    lines = [line + (f": {prediction.reason}" if prediction.reason else "")]
    return lines + [f"no counterpart here, left out: {', '.join(left_out)}"] * bool(left_out)


def _write(name: str, searches: Searches) -> None:
    """Write the best layout into the model's layout file, at once: no other process sees half a file."""
    from superpod.recipes import layout_file

    precision, best = next(iter(searches.items()))
    if not len(best.ranked):
        raise UserError("nothing fits, so nothing is written", "raise --gpus, or see above")
    path = layout_file.write(name, best.job.replace(precision=precision, layout=best.layout(int(best.ranked[0]))))
    typer.echo(f"wrote {path}", err=True)
