"""`recipes plan`: estimate the memory and step time of every legal layout, and rank those that fit."""

from __future__ import annotations

import json
from collections import defaultdict
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
"""Search results by precision, the fastest first."""


@with_plan_options("layout")
def plan(
    options: PlanOptions,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Training precision: bf16, fp8cs, mxfp8, ..., or auto to try all.")
    ] = None,
    memory_cap: Annotated[
        float | None, typer.Option("--memory-cap", help="Maximum reserved memory per GPU, in GiB.")
    ] = None,
    fix: Annotated[
        str | None, typer.Option("--fix", help="Consider only layouts with these values, such as tp=8,mbs=1.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="Number of layouts to show.")] = 10,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Configuration to start from: DeepSpeed JSON, Accelerate YAML or Megatron-LM arguments."
        ),
    ] = None,
    variants: Annotated[
        bool,
        typer.Option(
            "--variants", help="Show all layouts, not only the best for each combination of TP, PP, CP and EP."
        ),
    ] = False,
    compare_rules: Annotated[
        bool, typer.Option("--compare-rules", help="Also show the layout that common rules of thumb would select.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write the best layout to recipes/layouts/MODEL.toml.")
    ] = False,
    as_json: AsJson = False,
    html: page_options.Html = None,
    trace: page_options.Trace = None,
) -> None:
    """Rank the legal layouts that fit in memory by step time, and explain why the first is fastest. Requires no GPU."""
    from superpod.planner import plans
    from superpod.planner.formats import config_import

    page_options.check(html, trace)
    imported = config_import.read(start) if start else None
    if imported is not None:  # the command line takes precedence over the imported configuration
        gpus = options.gpus or (None if options.nodes else imported.gpus)
        options = replace(options, gpus=gpus, gbs=options.gbs or imported.gbs, seq=options.seq or imported.seq)
        options, precision = replace(options, task=options.task or imported.task), precision or imported.precision
    is_auto = precision == "auto"
    job = options.job_to_search(precision=None if is_auto else precision)
    searches = plans.search(job, auto=is_auto, fixed=option_syntax.parse_fixed(fix), memory_cap_gib=memory_cap)
    if write:
        _write_layout(options.name, searches)
    # Files are written before anything is printed: a closed pipe ends the command at the next print.
    _write_files(options, searches, html, trace, variants=variants)
    if as_json:
        print(json.dumps(plans.as_json(searches, top=top, memory_cap_gib=memory_cap, variants=variants), indent=1))
    else:
        _print(searches, plans.rank_layouts(searches, variants=variants)[:top])
        best = next(iter(searches.values()))
        lines = []
        if len(best.ranked):
            if imported is not None:
                lines += _comparison(imported.job(job), best, imported.left_out)
            lines += folder_notes.training_notes(options.name)
            if compare_rules:
                lines.append(plans.compare_with_textbook(best))
        for line in lines:
            tables.print_wrapped(f"- {line}")
    if not any(len(search.ranked) for search in searches.values()):
        raise typer.Exit(2)


def _write_files(
    options: PlanOptions, searches: Searches, html: Path | None, trace: Path | None, *, variants: bool
) -> None:
    """Write the files for --html and --trace."""
    precision, best = next(iter(searches.items()))
    if trace is not None and len(best.ranked):
        page_options.write_trace(trace, best.job_at(int(best.ranked[0])).replace(precision=precision))
    if html is not None:
        page_options.write_page(html, page_text(options, searches, command=page_options.command(), variants=variants))


def page_text(options: PlanOptions, searches: Searches, *, command: str, variants: bool = False) -> str:
    """Return the HTML page of a plan; it names `command` as its source. `recipes ui` also serves it."""
    from superpod.pages import plan_page

    explain_command = options.command("explain", without=("layout", "precision"))
    explain_command += f" --precision {plan_page.PRECISION} --layout {plan_page.LAYOUT} --html layout.html"
    return plan_page.render_plan(searches, command=command, explain_command=explain_command, variants=variants)


def _print(searches: Searches, shown: list[tuple[str, SearchResult, int]]) -> None:
    from superpod.planner import explain, intervals, plans

    best = next(iter(searches.values()))
    job = best.job
    legal = sum(map(len, searches.values()))
    fit = sum(int(search.fits.sum()) for search in searches.values())
    tight_count = sum(int(search.tight.sum()) for search in searches.values())
    counts = f"{legal:,} legal layouts, {fit:,} fit"
    if tight_count:
        counts += f", {tight_count:,} tight"
    tables.print_wrapped(
        f"{job.model.name}, {job.gpus} x {job.node.gpu.name}, seq {job.seq}, gbs {job.layout.gbs}, "
        f"{' or '.join(searches)}: {counts}"
    )
    if not shown:
        tables.print_wrapped(plans.explain_no_fit(best))
        return
    _print_table(shown, with_precision=len(searches) > 1)
    notes = (plans.equivalent_layouts(best), intervals.extrapolation(best.job))
    lines = (*explain.explain_layout(best, int(best.ranked[0])), *explain.faster_layouts(best), *filter(None, notes))
    for line in lines:
        tables.print_wrapped(f"- {line}")


def _print_table(shown: list[tuple[str, SearchResult, int]], *, with_precision: bool) -> None:
    """Print one row per layout, with a column for the precision if several were searched."""
    from superpod.planner import intervals, plans
    from superpod.planner.hardware import GIB

    titles = ["layout", "precision", "step s", "tokens/s/GPU", "MFU %", "GiB", "bubble %"]
    rows = []
    labels = _layout_labels([search.layout(i) for _, search, i in shown])
    for label, (precision, search, i) in zip(labels, shown, strict=True):
        job = search.job_at(i)
        seconds = float(search.seconds[i])
        bubble = float(search.bubble[i]) / seconds
        figures = (
            job.tokens / seconds / job.gpus,
            100 * plans.mfu(job, seconds),
            search.reserved[i] / GIB,
            100 * bubble,
        )
        texts = (f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" for x in figures)
        if search.tight[i]:
            label += ", tight"
        low, high = (float(factor) * seconds for factor in intervals.from_job(job).time_factors(job.gpus))
        rows.append([label, precision, intervals.text(seconds, low, high, unit=""), *texts])
    if not with_precision:
        for row in (titles, *rows):
            del row[1]
    tables.print_folded_table(titles, rows)


def _layout_labels(layouts: list[Layout]) -> list[str]:
    """Describe each layout in one line.

    The line omits the expert tensor parallel size unless it is the only difference between two layouts.
    """
    from superpod.planner import explain

    lines = [explain.title(layout) for layout in layouts]
    etp_sizes = [layout.tp if layout.etp is None else layout.etp for layout in layouts]
    sizes_by_line: dict[str, set[int]] = defaultdict(set)
    for line, etp in zip(lines, etp_sizes, strict=True):
        sizes_by_line[line].add(etp)
    return [
        f"{line}, etp {etp}" if len(sizes_by_line[line]) > 1 else line
        for line, etp in zip(lines, etp_sizes, strict=True)
    ]


def _comparison(imported_job: PlannedJob, search: SearchResult, left_out: tuple[str, ...]) -> list[str]:
    """Compare an imported configuration with the best layout, and list the settings that the planner ignores."""
    from superpod.planner import explain, predict

    prediction = predict.one(imported_job)
    line = f"your configuration, {explain.title(imported_job.layout)}: {prediction.verdict}"
    if prediction.step_time_s:
        difference = prediction.step_time_s / float(search.seconds[search.ranked[0]]) - 1
        line += f", {prediction.step_time_s:.3f} s per step, {difference:+.1%} relative to the best"
    if prediction.reason:
        line += f": {prediction.reason}"
    if not left_out:
        return [line]
    return [line, f"ignored, because the planner does not have these settings: {', '.join(left_out)}"]


def _write_layout(name: str, searches: Searches) -> None:
    """Write the best layout to the model's layout file, atomically."""
    from superpod.collection import layout_file

    precision, best = next(iter(searches.items()))
    if not len(best.ranked):
        raise UserError("no layout fits, so nothing was written", "use more GPUs (--gpus)")
    path = layout_file.write(name, best.job.replace(precision=precision, layout=best.layout(int(best.ranked[0]))))
    typer.echo(f"wrote {path}", err=True)
