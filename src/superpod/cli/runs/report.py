"""`recipes report`: summarize runs of this project and logs of other programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superpod.cli import tables
from superpod.cli.options import page_options
from superpod.cli.options.page_options import Html
from superpod.cli.options.request_options import AsJson, resolve_runs
from superpod.common import output_file
from superpod.errors import UserError
from superpod.planner.formats.config_files import unreadable_error

if TYPE_CHECKING:
    from rich.console import Console

    from superpod.reports.report_figures import Figures
    from superpod.reports.report_text import Screen
    from superpod.reports.runs.run_record import Record
    from superpod.reports.sweep import Member
    from superpod.runtime.runs.run_folder import RunFolder

RUNS = (
    "Run folders, folders of recipes (for their newest run), `last`, logs of Megatron-LM, Megatron-Bridge or NeMo, "
    "or folders of logs or TensorBoard files."
)
Reported = tuple["Record", "Figures"]


def report(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help=RUNS, callback=resolve_runs)],
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Plot the curves of several runs in one chart below the table."),
    ] = False,
    html: Html = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Plot losses to a .png, .svg or .pdf file.")] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="GPU type of logs that do not contain it, for the MFU.")] = "",
    as_json: AsJson = False,
) -> None:
    """Summarize a run: loss, throughput, MFU, lost time, planned and measured values, and curves.

    For several runs, print a table with one row per run.
    """
    from superpod.reports import report_text, sweep
    from superpod.reports.why import is_run_folder
    from superpod.runtime.runs.run_folder import RunFolder

    page_options.check(html)
    _check_plot(plot)
    paths = [Path(one) for one in run]
    _refuse_missing(paths)
    is_sweep = len(paths) == 1 and sweep.is_sweep(paths[0])
    members: list[Member] = []
    if is_sweep:
        members = sweep.rank_members(paths[0])
        run_folders = paths = [member.path for member in members if member.summary]
    else:
        run_folders = [path for path in paths if is_run_folder(path)]
        if len(run_folders) == len(paths) > 1:
            members = [sweep.Member.from_run(RunFolder.open(path)) for path in run_folders]
    folders = [RunFolder.open(path) for path in run_folders]
    needs_records = not members or compare or html is not None or as_json
    run_reports = _read_records(paths, gpu) if needs_records else []
    if html is not None:  # before anything is printed, because a closed pipe ends the command
        from superpod.pages import report_page

        page_options.write_page(html, report_page.render_report(run_reports, command=page_options.command()))
    if as_json:
        _print_json(members, run_reports, is_single=len(run) == 1 and not is_sweep)
    elif members:
        _print_members(members, f"sweep {Path(run[0]).name}" if is_sweep else f"{len(run)} runs")
    elif len(run_reports) > 1:
        tables.print_folded_table(report_text.COLUMN_TITLES, report_text.build_comparison_rows(run_reports), fold=0)
    else:
        _print_one(*run_reports[0])
    if not as_json and compare and len(run_reports) > 1:
        _print_curves([record for record, _ in run_reports])
    for folder in folders:
        _warn_if_not_a_file(folder.path / "metrics.jsonl")
    if plot is not None:
        _plot(folders, plot)


def _refuse_missing(paths: list[Path]) -> None:
    """Raise UserError if a path does not exist."""
    expected = "an existing run folder RUNS/RECIPE/TIME-ID (printed by `recipes run`), a log, or a folder of logs"
    for path in paths:
        if not path.exists():
            hint = unreadable_error(path, FileNotFoundError(), expected).hint
            raise UserError(f"{path} does not exist", hint)


def _read_records(paths: list[Path], gpu: str) -> list[Reported]:
    """Return the record and the figures of each run folder or log; `gpu` is the GPU type of logs without one."""
    from superpod.reports import report_figures
    from superpod.reports.external import external_runs
    from superpod.reports.runs import run_record
    from superpod.reports.why import is_run_folder
    from superpod.runtime.runs.run_folder import RunFolder

    records = []
    for path in paths:
        record = run_record.read_run(RunFolder.open(path)) if is_run_folder(path) else external_runs.read_run(path, gpu)
        records.append((record, report_figures.compute_figures(record)))
    return records


def _warn_if_not_a_file(metrics: Path) -> None:
    """Print a warning if a metrics file is a pipe or a device, which is not read."""
    if metrics.exists() and not metrics.is_file():
        print(f"warning: {metrics} is not a regular file and was not read, so no steps are shown", file=sys.stderr)


def _check_plot(path: Path | None) -> None:
    """Raise UserError if the file type of --plot is not supported, or the file exists and is not such a plot."""
    from superpod.reports.report import MAKER

    if path is None:
        return
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path} is not a .png, .svg or .pdf file", "for example losses.png")
    output_file.check(path, "--plot", lambda *ends: any(MAKER.encode() in end for end in ends), by="recipes report")


def _plot(runs: list[RunFolder], path: Path) -> None:
    """Plot the losses of runs to a file. Raises UserError without run folders or matplotlib, or if writing fails."""
    from superpod.reports import report as reports

    if not runs:
        raise UserError("--plot supports only run folders", "use --html FILE for logs of other programs")
    try:
        plot_file = reports.save_loss_plot(runs[0], path) if len(runs) == 1 else reports.save_runs_plot(runs, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "use a different folder") from error
    except ModuleNotFoundError as missing:
        raise UserError(f"--plot needs {missing.name}", "pip install -c constraints.txt -e '.[nemo]'") from missing
    print(f"losses {plot_file}", file=sys.stderr)


def _print_json(members: list[Member], reported: list[Reported], *, is_single: bool) -> None:
    """Print a list with an object per run; for a single run, only its object."""
    figures_of_path = {record.path.absolute(): dataclasses.asdict(figures) for record, figures in reported}
    entries: list[dict[str, Any]] = []
    for member in members:
        figures = figures_of_path.get(member.path.absolute())
        entries.append({**dataclasses.asdict(member), "figures": figures})
    if not members:
        entries = [_json_facts(record) | {"figures": dataclasses.asdict(figures)} for record, figures in reported]
    print(json.dumps(entries[0] if is_single else entries, indent=1, default=str))


def _json_facts(record: Record) -> dict[str, Any]:
    from superpod.reports.report import summary
    from superpod.runtime.runs.run_folder import RunFolder

    if record.is_own:
        return {"source": record.source, **dataclasses.asdict(summary(RunFolder.open(record.path)))}
    return {"source": record.source, "path": record.path, "name": record.name}


def _print_members(rows: list[Member], title: str) -> None:
    from superpod.reports import sweep

    tables.print_table(sweep.render(title, rows))
    for row in rows:
        if row.problem:
            print(f"{row.path}: {row.problem}")


def _print_one(record: Record, figures: Figures) -> None:
    """Print the report of one run with its curves; for a run of this project, also save loss.png in its folder."""
    from superpod.reports import report_text
    from superpod.reports.report import build_rows, summary
    from superpod.runtime.runs.run_folder import RunFolder

    console = tables.console()
    if record.is_own:
        title = record.path.parent.name
        pairs = build_rows(summary(RunFolder.open(record.path)))
    else:
        title = record.name
        pairs = report_text.build_heading_rows(record, figures)
    folder_rows = [pair for pair in pairs if pair[0] == "folder"]
    other_rows = [pair for pair in pairs if pair[0] != "folder"]
    console.print(report_text.build_table(title, [*other_rows, *report_text.build_rows(record, figures), *folder_rows]))
    for line in report_text.draw_curves([record], _screen(console)):
        console.print(line, overflow="crop", no_wrap=True)
    if record.is_own:
        _save_loss_plot(RunFolder.open(record.path), console)


def _print_curves(records: list[Record]) -> None:
    from superpod.reports import report_text

    console = tables.console()
    screen = _screen(console)
    for line in (*report_text.draw_curves(records, screen), *report_text.build_legend(records, screen)):
        console.print(line, overflow="crop", no_wrap=True)


def _screen(console: Console) -> Screen:
    """Return the width, the Unicode support and the color support of a console, for drawing curves."""
    from superpod.reports.report_text import Screen

    colors = console.is_terminal and not console.no_color and console.color_system is not None
    return Screen(tables.chart_width(), "utf" in console.encoding.lower(), colors)


def print_report(folder: RunFolder) -> None:
    """Print a short report at the end of a run, and save loss.png in its folder."""
    from superpod.reports.report import render, summary

    console = tables.console()
    console.print(render(summary(folder)))
    _save_loss_plot(folder, console)


def _save_loss_plot(folder: RunFolder, console: Console) -> None:
    """Save loss.png in a run folder, if the run has metrics and belongs to this user; print its path or the error."""
    from superpod.reports.report import save_loss_plot
    from superpod.runtime.runs import owner

    if folder.metrics() and owner.is_mine(folder.path):
        try:
            curve = save_loss_plot(folder, folder.path / "loss.png")
            console.print(f"loss curve {curve}", markup=False, highlight=False, soft_wrap=True)
        except (OSError, ModuleNotFoundError) as error:
            console.print(f"no loss curve: {error}", markup=False, highlight=False)
