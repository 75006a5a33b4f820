"""`recipes report`: the results of a run, of this project or of others."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superpod.cli.options.page_options import Html
from superpod.cli.options.request_options import AsJson, newest_runs

if TYPE_CHECKING:
    from rich.console import Console

    from superpod.reports.report_figures import Figures
    from superpod.reports.report_text import Screen
    from superpod.reports.runs.run_record import Record
    from superpod.reports.sweep import Member
    from superpod.runtime.runs.run_folder import RunFolder

RUNS = (
    "Run folders (of a recipe's folder its newest run; or `last`), logs of Megatron-LM, Megatron-Bridge or NeMo, "
    "folders of logs or of TensorBoard."
)
Reported = tuple["Record", "Figures"]


def report(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help=RUNS, callback=newest_runs)],
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw the curves of several runs into one picture, with a row a run.")
    ] = False,
    html: Html = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the losses of these runs into one picture, a .png or .svg.")
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="GPU of logs that do not name it: their MFU needs its peak.")] = "",
    as_json: AsJson = False,
) -> None:
    """Summarize a run: losses, speed, utilization, lost time, plan against measured, curves. Several: a row a run."""
    from superpod.cli.options import page_options
    from superpod.reports import sweep
    from superpod.runtime.runs.run_folder import RunFolder

    page_options.check(html)
    _check_plot(plot)
    _refuse_missing(run)
    is_sweep = len(run) == 1 and sweep.is_sweep(Path(run[0]))
    own = [Path(one) for one in run if not is_sweep and _is_own(Path(one))]
    if is_sweep:
        members = sweep.members(Path(run[0]))
        own = [member.path for member in members if member.summary]
    elif len(own) == len(run) > 1:
        members = [sweep.Member.of(RunFolder.open(one)) for one in own]
    else:
        members = []
    folders = [RunFolder.open(one) for one in own]
    plain = bool(members) and not (compare or html or as_json)  # a table of many runs reads no more than it shows
    reported = [] if plain else _reported(own if is_sweep else [Path(one) for one in run], gpu)
    if html is not None:  # before anything is printed: who reads that may have gone
        from superpod.pages import report_page

        page_options.write_page(html, report_page.of(reported, command=page_options.command()))
    if as_json:
        _print_json(members, reported, is_single=len(run) == 1 and not is_sweep)
    elif members:
        _print_members(members, f"sweep {Path(run[0]).name}" if is_sweep else f"{len(run)} runs")
    elif len(reported) > 1:
        _print_rows(reported)
    else:
        _print_one(*reported[0])
    if not as_json and compare and len(reported) > 1:
        _print_curves([record for record, _ in reported])
    for folder in folders:
        _warn_of_no_file(folder.path / "metrics.jsonl")
    if plot is not None:
        _draw(folders, plot)


def _refuse_missing(runs: list[str]) -> None:
    """Raises UserError where one is not there; it may be meant as a run folder or as a log."""
    from superpod.errors import UserError
    from superpod.planner.formats.files import unreadable

    wanted = "a run folder RUNS/RECIPE/TIME-ID, as `recipes run` prints it, or a log or folder of logs that is there"
    for path in map(Path, runs):
        if not path.exists():
            hint = unreadable(path, FileNotFoundError(), wanted).hint
            raise UserError(f"{path} is no run folder and no log: it does not exist", hint)


def _is_own(path: Path) -> bool:
    """A run folder of ours."""
    from superpod.reports.why import is_run

    return is_run(path)


def _reported(paths: list[Path], gpu: str) -> list[Reported]:
    from superpod.reports import report_figures
    from superpod.reports.external import foreign_runs
    from superpod.reports.runs import run_record
    from superpod.runtime.runs.run_folder import RunFolder

    records = [
        run_record.record(RunFolder.open(path)) if _is_own(path) else foreign_runs.record(path, gpu) for path in paths
    ]
    return [(record, report_figures.of(record)) for record in records]


def _warn_of_no_file(metrics: Path) -> None:
    """Such as a pipe in its place, which is not read: its run would seem to have no steps."""
    if metrics.exists() and not metrics.is_file():
        print(f"warning: {metrics} is no regular file, and was not read: no step is known", file=sys.stderr)


def _check_plot(path: Path | None) -> None:
    """Refuse what is no picture, and to write over what is not of ours. Raises UserError."""
    from superpod.common import output_file
    from superpod.errors import UserError
    from superpod.reports.report import MAKER

    if path is None:
        return
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{path} is no picture", "name it like losses.png, .svg or .pdf")
    output_file.check(path, "--plot", lambda *ends: any(MAKER.encode() in end for end in ends), by="recipes report")


def _draw(runs: list[RunFolder], path: Path) -> None:
    from superpod.errors import UserError
    from superpod.reports import report as reports

    if not runs:
        raise UserError("--plot draws run folders", "for logs of others: --html FILE")
    try:
        drawn = reports.loss_curve(runs[0], path) if len(runs) == 1 else reports.loss_curves(runs, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "name a file elsewhere") from error
    except ModuleNotFoundError as missing:
        raise UserError(f"a picture needs {missing.name}", "pip install -c constraints.txt -e '.[nemo]'") from missing
    print(f"losses {drawn}", file=sys.stderr)


def _print_json(members: list[Member], reported: list[Reported], *, is_single: bool) -> None:
    figures = {record.path.absolute(): dataclasses.asdict(figures) for record, figures in reported}
    entries: list[dict[str, Any]] = [
        {**dataclasses.asdict(member), "figures": figures.get(member.path.absolute())} for member in members
    ]
    if not members:
        entries = [_entry(record) | {"figures": figures[record.path.absolute()]} for record, _ in reported]
    print(json.dumps(entries[0] if is_single else entries, indent=1, default=str))


def _entry(record: Record) -> dict[str, Any]:
    from superpod.reports.report import summary
    from superpod.runtime.runs.run_folder import RunFolder

    if record.is_own:
        return {"source": record.source, **dataclasses.asdict(summary(RunFolder.open(record.path)))}
    return {"source": record.source, "path": record.path, "name": record.name}


def _print_members(rows: list[Member], title: str) -> None:
    from superpod.cli import tables
    from superpod.reports import sweep

    tables.show(sweep.render(title, rows))
    for row in rows:
        if row.problem:
            print(f"{row.path}: {row.problem}")


def _print_rows(reported: list[Reported]) -> None:
    from superpod.cli import tables
    from superpod.reports import report_rows

    tables.show_folded(report_rows.TITLES, report_rows.rows(reported), fold=0)


def _print_one(record: Record, figures: Figures) -> None:
    """The whole report of one run; draws the loss curve into our own run's folder."""
    from superpod.cli import tables
    from superpod.reports import report_text
    from superpod.reports.report import rows, summary
    from superpod.runtime.runs.run_folder import RunFolder

    console = tables.console()
    pairs = report_text.heading(record, figures)
    if record.is_own:
        pairs = rows(summary(RunFolder.open(record.path)))
    where, pairs = [pair for pair in pairs if pair[0] == "folder"], [pair for pair in pairs if pair[0] != "folder"]
    title = record.path.parent.name if record.is_own else record.name
    console.print(report_text.table(title, [*pairs, *report_text.rows(record, figures), *where]))
    for line in report_text.drawn([record], _screen(console)):
        console.print(line, overflow="crop", no_wrap=True)
    if record.is_own:
        _draw_loss(RunFolder.open(record.path), console)


def _print_curves(records: list[Record]) -> None:
    from superpod.cli import tables
    from superpod.reports import report_text

    console = tables.console()
    screen = _screen(console)
    for line in (*report_text.drawn(records, screen), *report_text.legend(records, screen)):
        console.print(line, overflow="crop", no_wrap=True)


def _screen(console: Console) -> Screen:
    from superpod.cli import tables
    from superpod.reports.report_text import Screen

    colors = console.is_terminal and not console.no_color and console.color_system is not None
    return Screen(tables.chart_width(), "utf" in console.encoding.lower(), colors)


def print_report(folder: RunFolder) -> None:
    """Print the short report with which a run ends; draw its loss curve into its folder, as `recipes report` does."""
    from superpod.cli import tables
    from superpod.reports.report import render, summary

    console = tables.console()
    console.print(render(summary(folder)))
    _draw_loss(folder, console)


def _draw_loss(folder: RunFolder, console: Console) -> None:
    """Draw loss.png into a run's folder if it is this user's own and has metrics."""
    from superpod.reports.report import loss_curve
    from superpod.runtime.runs import owner

    if folder.metrics() and owner.is_mine(folder.path):
        try:
            curve = loss_curve(folder, folder.path / "loss.png")
            console.print(f"loss curve {curve}", markup=False, highlight=False, soft_wrap=True)
        except (OSError, ModuleNotFoundError) as error:
            console.print(f"no loss curve: {error}", markup=False, highlight=False)
