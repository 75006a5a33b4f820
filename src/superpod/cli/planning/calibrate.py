"""`recipes calibrate`: fit the planner's hardware data to measured runs."""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import RUN, resolve_runs
from superpod.common import output_file
from superpod.errors import UserError, counted

if TYPE_CHECKING:
    from superpod.planner.calibration.calibrate import Calibration, MeasuredRun

MAX_NAMED = 5
"""Maximum number of skipped or implausible rows to list by name."""
MIN_RUNS = 3
"""Minimum number of runs per GPU type for cross-validation."""
IMPLAUSIBLE_RATIO = 10
"""Factor between measured and planned step time above which a row is probably wrong."""


def calibrate(
    run: Annotated[list[str] | None, typer.Argument(help=f"{RUN} Repeatable.", callback=resolve_runs)] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="CSV file with the columns of `recipes predict`, and step_time_s or tokens_per_s_per_gpu.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="TOML file to write, for use with --hardware.")] = None,
) -> None:
    """Fit the planner to three or more runs measured on your own machines. Requires no GPU.

    Estimates network bandwidth and latency, the overlap of communication, and kernel and launch times, and reports the
    cross-validated prediction error. Pass the resulting file to plan, check, predict or submit with --hardware FILE.
    """
    from superpod.planner.calibration import calibrate as calibrating
    from superpod.planner.calibration import calibration_file
    from superpod.reports import measured_runs
    from superpod.runtime.runs.run_folder import RunFolder

    _check_output(out)
    measurements = [measured_runs.measure_run(RunFolder.open(folder)) for folder in run or []] + _read_rows(rows)
    if not measurements:
        raise UserError("calibrate needs measured runs", "pass run folders, or a table: --from runs.csv")
    by_gpu: dict[str, list[MeasuredRun]] = defaultdict(list)
    for one in measurements:
        by_gpu[one.job.node.gpu.name].append(one)
    calibrations = [calibrating.calibrate(runs) for runs in by_gpu.values()]
    for calibration, runs in zip(calibrations, by_gpu.values(), strict=True):
        first, *others = calibration_file.summarize(calibration)
        print(first)
        for line in [*others, *_warnings(calibration), *_single_job_warning(runs)]:
            print(f"  {line}")
    if out is not None:
        source = f"{len(measurements)} runs in {_describe_sources(run or [], rows)}"
        output_file.write(out, calibration_file.format_toml(calibrations, source), "--out")
        print(f"wrote {out}\n  next: recipes plan ... --hardware {shlex.quote(str(out))}")


def _read_rows(path: Path | None) -> list[MeasuredRun]:
    """Return the runs in the valid rows of a CSV file; print why other rows are skipped.

    Raises:
        UserError: no row is valid.
    """
    from superpod.collection.facts import names
    from superpod.planner.tables import measured
    from superpod.reports.measured_runs import explain_impossible

    if path is None:
        return []
    rows, problems = measured.read(path, lambda note: print(f"note: {note}", file=sys.stderr), names.translate)
    runs = []
    for row in rows:
        problem = explain_impossible(row)
        if problem:
            problems.append(f"{row.name}: {problem}")
        else:
            runs.append(row)

    for problem in problems[:MAX_NAMED]:
        print(f"skipped: {problem}", file=sys.stderr)
    if len(problems) > MAX_NAMED:
        print(f"skipped: {counted(len(problems) - MAX_NAMED, 'more row')}", file=sys.stderr)
    if not runs:
        hint = "fill in step_time_s or tokens_per_s_per_gpu, one row per run; leave outcome empty, or set it to ok"
        if problems:
            hint = "correct the skipped rows above"
        raise UserError(f"{path} has no row for a finished and measured run", hint)

    warning = _memory_warning(runs)
    if warning:
        print(warning, file=sys.stderr)
    return runs


def _memory_warning(runs: list[MeasuredRun]) -> str:
    """Return a warning about measured runs for which the planner predicts out of memory; "" if there are none."""
    from superpod.planner import predict

    predictions = predict.many([run.job for run in runs])
    names = [f"{run.name} ({p.reason})" for run, p in zip(runs, predictions, strict=True) if p.verdict == "oom"]
    if not names:
        return ""
    listed_names = names[:MAX_NAMED]
    if len(names) > MAX_NAMED:
        listed_names.append(f"{len(names) - MAX_NAMED:,} more")
    return (
        f"warning: the planner predicts out of memory for {counted(len(names), 'measured run')}: "
        f"{', '.join(listed_names)}\n  next: add the columns recompute and allocated_gib_max, or check the layout"
    )


def _warnings(calibration: Calibration) -> list[str]:
    """Return warnings about step times far from the plan, and about too few runs for cross-validation."""
    count = len(calibration.names)
    ratios = calibration.measured / calibration.default_times
    implausible = [
        (name, ratio)
        for name, ratio in zip(calibration.names, ratios, strict=True)
        if not 1 / IMPLAUSIBLE_RATIO < ratio < IMPLAUSIBLE_RATIO
    ]
    lines = [
        f"warning: {name} took {ratio:.3g} times its planned step time; check its number of GPUs, batch size, "
        "sequence length and units"
        for name, ratio in implausible[:MAX_NAMED]
    ]
    if len(implausible) > MAX_NAMED:
        more_runs = counted(len(implausible) - MAX_NAMED, "more run")
        lines.append(f"warning: the step times of {more_runs} differ as much from the plan")
    if count < MIN_RUNS:
        lines.append(
            f"warning: {counted(count, 'run')} cannot determine the prediction error, or the shares of computation, "
            f"network and launches; use {MIN_RUNS} or more runs with different layouts"
        )
    return lines


def _single_job_warning(runs: list[MeasuredRun]) -> list[str]:
    """Return a warning if all runs are of the same job, for which cross-validation is meaningless; otherwise []."""
    if len(runs) < 2 or any(run.job != runs[0].job for run in runs):
        return []
    return [
        f"warning: all {len(runs)} runs have the same layout, so computation, network and launches cannot be "
        "distinguished, and a small prediction error proves nothing; add runs with a different TP, PP, micro-batch "
        "size or number of nodes"
    ]


def _describe_sources(folders: list[str], rows: Path | None) -> str:
    """Return the names of the first three run folders and the path of the CSV file, for the calibration file."""
    names = [Path(folder).name for folder in folders[:3]]
    if len(folders) > 3:
        names.append("...")
    if rows is not None:
        names.append(str(rows))
    return ", ".join(names)


def _check_output(out: Path | None) -> None:
    """Raise UserError if `out` exists and is not a calibration file, or cannot be written."""
    from superpod.planner.calibration import calibration_file

    first_line = calibration_file.format_toml([], "").partition("\n")[0].encode()
    if out is not None:
        output_file.check(
            out, "--out", lambda start, _: start.startswith(first_line), by="recipes calibrate", to_devices=True
        )
