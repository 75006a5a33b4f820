"""`recipes plan`: every legal layout of a run, costed and ranked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superpod.launchers.cli import subject, tables
from superpod.planner.errors import UserError

if TYPE_CHECKING:
    from superpod.planner.job import Job
    from superpod.planner.search import Found

Shown = dict[str, "Found"]
"""The search in each precision tried, the fastest first."""


def plan(
    name: subject.Name,
    gpu: subject.Gpu = None,
    gpus: subject.Gpus = None,
    nodes: subject.Nodes = None,
    seq: subject.Seq = None,
    gbs: subject.Gbs = None,
    precision: Annotated[str | None, typer.Option("--precision", help="bf16, fp8cs, ..., or auto: try them.")] = None,
    task: subject.Task = None,
    memory_cap: Annotated[float | None, typer.Option("--memory-cap", help="GiB a GPU may reserve.")] = None,
    fix: Annotated[str | None, typer.Option("--fix", help="Only layouts with these, such as tp=8,mbs=1.")] = None,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="How many layouts to show.")] = 10,
    options: subject.OptionTexts = None,
    hardware: subject.HardwareFile = None,
    fabric: subject.Fabric = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="DeepSpeed JSON, Accelerate YAML, Megatron args.")
    ] = None,
    compare_rules: Annotated[
        bool, typer.Option("--compare-rules", help="Show the textbook rules' choice too.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the best into recipes/layouts/MODEL.toml.")] = False,
    as_json: subject.AsJson = False,
) -> None:
    """Rank every legal layout by step time, of those that fit; say why the first one wins. Needs no GPU."""
    from superpod.planner import foreign, plans

    theirs = foreign.read(start) if start else None
    if theirs is not None:
        gpus, gbs, seq = gpus or (None if nodes else theirs.gpus), gbs or theirs.gbs, seq or theirs.seq
        precision, task = precision or theirs.precision, task or theirs.task
    auto = precision == "auto"
    job = subject.job(
        name,
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        seq=seq,
        gbs=gbs,
        precision=None if auto else precision,
        task=task,
        options=options,
        hardware_file=hardware,
        fabric=fabric,
    )
    found = plans.search(
        job, auto=auto, fixed=subject.layout_values(fix, "--fix") if fix else {}, memory_cap_gib=memory_cap
    )
    yours = theirs.job(job) if theirs is not None else None
    if write:
        _write(name, found)
    if as_json:
        print(json.dumps(plans.as_json(found, top=top, memory_cap_gib=memory_cap), indent=1))
    else:
        _print(found, top, yours, theirs.left_out if theirs else (), compare_rules)
    if not any(len(f.ranked) for f in found.values()):
        raise typer.Exit(2)


def _print(found: Shown, top: int, yours: Job | None, left_out: tuple[str, ...], rules: bool) -> None:
    from rich.console import Console

    from superpod.planner import explain, plans

    console = Console(highlight=False)
    best = next(iter(found.values()))
    job = best.job
    legal = sum(map(len, found.values()))
    fit = sum(len(f.ranked) for f in found.values())
    console.print(
        f"{job.model.name}, {job.gpus} x {job.node.gpu.name}, seq {job.seq}, gbs {job.layout.gbs}, "
        f"{' or '.join(found)}: {legal:,} legal layouts, {fit:,} fit",
        soft_wrap=True,
        markup=False,
    )
    if not fit:
        console.print(plans.closest(best), soft_wrap=True, markup=False)
        return
    tables.show(_table(found, top))
    for line in explain.why(best, int(best.ranked[0])):
        console.print(f"- {line}", soft_wrap=True, markup=False)
    for line in explain.misses(best):
        console.print(f"- {line}", soft_wrap=True, markup=False)
    if yours is not None:
        _yours(console, yours, best, left_out)
    if rules:
        console.print(f"- {plans.against_rules(best)}", soft_wrap=True, markup=False)


def _table(found: Shown, top: int) -> Any:
    from rich.table import Table

    from superpod.planner import explain, plans
    from superpod.planner.search import GIB

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layout", no_wrap=True)
    if len(found) > 1:
        table.add_column("precision")
    for title in ("step s", "tokens/s/GPU", "MFU %", "GiB", "bubble %"):
        table.add_column(title, justify="right")
    for precision, f, i in plans.ranked(found)[:top]:
        job = f.job_of(i)
        seconds = float(f.seconds[i])
        words = [explain.title(job.layout)] + [precision] * (len(found) > 1)
        bubble = float(f.terms["pp_bubble"][i]) / seconds
        figures = (job.tokens / seconds / job.gpus, 100 * plans.mfu(job, seconds), f.reserved[i] / GIB, 100 * bubble)
        table.add_row(*words, f"{seconds:.3f}", *(f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" for x in figures))
    return table


def _yours(console: Any, yours: Job, best: Found, left_out: tuple[str, ...]) -> None:
    from superpod.planner import explain, predict

    prediction = predict.one(yours)
    line = f"yours, {explain.title(yours.layout)}: {prediction.verdict}"
    if prediction.step_time_s:
        slower = prediction.step_time_s / float(best.seconds[best.ranked[0]]) - 1
        line += f", {prediction.step_time_s:.3f} s a step, {slower:+.1%} against the best"
    console.print(f"- {line}" + (f": {prediction.reason}" if prediction.reason else ""), soft_wrap=True, markup=False)
    if left_out:
        console.print(f"- no counterpart here, left out: {', '.join(left_out)}", soft_wrap=True, markup=False)


def _write(name: str, found: Shown) -> None:
    """The best layout into the model's table of recipes; another process never sees half a file."""
    from superpod.recipes import layout_file

    precision, best = next(iter(found.items()))
    if not len(best.ranked):
        raise UserError("nothing fits, so nothing is written", "raise --gpus, or see what is said above")
    path = layout_file.write(name, best.job.replace(precision=precision, layout=best.layout(int(best.ranked[0]))))
    typer.echo(f"wrote {path}", err=True)
