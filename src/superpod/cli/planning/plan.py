"""`recipes plan`: every legal layout of a run, costed and ranked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.options import page_options
from superpod.cli.options.plan_options import PlanOptions, with_plan_options
from superpod.cli.options.request_options import AsJson
from superpod.cli.planning import folder_notes
from superpod.errors import UserError
from superpod.planner.formats import option_syntax

if TYPE_CHECKING:
    from superpod.planner.layout import Layout
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
    variants: Annotated[
        bool, typer.Option("--variants", help="Every layout, not the best of each TP, PP, CP and EP.")
    ] = False,
    compare_rules: Annotated[
        bool, typer.Option("--compare-rules", help="Also show what the textbook rules choose.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the best to recipes/layouts/MODEL.toml.")] = False,
    as_json: AsJson = False,
    html: page_options.Html = None,
    trace: page_options.Trace = None,
) -> None:
    """Rank the legal layouts that fit by step time, and say why the first one wins. Needs no GPU."""
    from superpod.planner import plans
    from superpod.planner.formats import config_import

    page_options.check(html, trace)
    imported = config_import.read(start) if start else None
    if imported is not None:  # options of the command line win over those of the imported config
        gpus = options.gpus or (None if options.nodes else imported.gpus)
        options = replace(options, gpus=gpus, gbs=options.gbs or imported.gbs, seq=options.seq or imported.seq)
        options, precision = replace(options, task=options.task or imported.task), precision or imported.precision
    auto = precision == "auto"
    job = options.job_to_search(precision=None if auto else precision)
    searches = plans.search(job, auto=auto, fixed=option_syntax.fixed(fix), memory_cap_gib=memory_cap)
    if write:
        _write(options.name, searches)
    _files(options, searches, html, trace, variants=variants)
    if as_json:
        print(json.dumps(plans.as_json(searches, top=top, memory_cap_gib=memory_cap, variants=variants), indent=1))
    else:
        _print(searches, plans.ranked(searches, variants=variants)[:top])
        best = next(iter(searches.values()))
        lines = _comparison(imported.job(job), best, imported.left_out) if imported is not None else []
        lines += folder_notes.training(options.name)
        for line in [*lines, *([plans.against_rules(best)] * compare_rules)] if len(best.ranked) else ():
            tables.say(f"- {line}")
    if not any(len(search.ranked) for search in searches.values()):
        raise typer.Exit(2)


def _files(options: PlanOptions, searches: Searches, html: Path | None, trace: Path | None, *, variants: bool) -> None:
    """Write what --html and --trace ask for; before anything is printed, so that a closed pipe takes nothing away."""
    precision, best = next(iter(searches.items()))
    if trace is not None and len(best.ranked):
        page_options.write_trace(trace, best.job_of(int(best.ranked[0])).replace(precision=precision))
    if html is not None:
        page_options.write_page(html, page_text(options, searches, command=page_options.command(), variants=variants))


def page_text(options: PlanOptions, searches: Searches, *, command: str, variants: bool = False) -> str:
    """The page of a plan, which `command` made; `recipes ui` shows it too."""
    from superpod.pages import plan_page

    one = options.command("explain", without=("layout", "precision"))
    one += f" --precision {plan_page.PRECISION} --layout {plan_page.LAYOUT} --html layout.html"
    return plan_page.of_plan(searches, command=command, explain_command=one, variants=variants)


def _print(searches: Searches, shown: list[tuple[str, SearchResult, int]]) -> None:
    from superpod.planner import explain, plans

    best = next(iter(searches.values()))
    job = best.job
    legal = sum(map(len, searches.values()))
    fit = sum(int(search.fits.sum()) for search in searches.values())
    tight = sum(int(search.tight.sum()) for search in searches.values())
    tables.say(
        f"{job.model.name}, {job.gpus} x {job.node.gpu.name}, seq {job.seq}, gbs {job.layout.gbs}, "
        f"{' or '.join(searches)}: {legal:,} legal layouts, {fit:,} fit" + (f", {tight:,} tight" if tight else "")
    )
    if not shown:
        tables.say(plans.closest(best))
        return
    _table(shown, several=len(searches) > 1)
    for line in (*explain.why(best, int(best.ranked[0])), *explain.misses(best)):
        tables.say(f"- {line}")


def _table(shown: list[tuple[str, SearchResult, int]], *, several: bool) -> None:
    """A row a layout; `several` precisions have a column of their own."""
    from superpod.planner import plans
    from superpod.planner.hardware import GIB

    titles = ["layout", *["precision"] * several, "step s", "tokens/s/GPU", "MFU %", "GiB reserved", "bubble %"]
    rows = []
    labels = _labels([search.layout(i) for _, search, i in shown])
    for label, (precision, search, i) in zip(labels, shown, strict=True):
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
        label += ", tight" * bool(search.tight[i])
        rows.append([label, *([precision] * several), f"{seconds:.3f}", *texts])
    tables.show_folded(titles, rows)


def _labels(layouts: list[Layout]) -> list[str]:
    """Each layout in a line; of those that read alike, also the expert tensor parallelism, which a line leaves out."""
    from superpod.planner import explain

    lines = [explain.title(layout) for layout in layouts]
    experts = [layout.tp if layout.etp is None else layout.etp for layout in layouts]
    several = {line for line in lines if len({n for n, other in zip(experts, lines, strict=True) if other == line}) > 1}
    return [f"{line}, etp {n}" if line in several else line for line, n in zip(lines, experts, strict=True)]


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
    from superpod.collection import layout_file

    precision, best = next(iter(searches.items()))
    if not len(best.ranked):
        raise UserError("nothing fits, so nothing is written", "raise --gpus, or see above")
    path = layout_file.write(name, best.job.replace(precision=precision, layout=best.layout(int(best.ranked[0]))))
    typer.echo(f"wrote {path}", err=True)
