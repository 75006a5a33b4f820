"""`recipes calibrate`: measured runs -> a hardware file that makes plans fit one's own machines."""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import RUN, newest_runs
from superpod.common import output_file
from superpod.errors import UserError, counted

if TYPE_CHECKING:
    from superpod.planner.calibration.calibrate import Calibration, Measured

MOST_NAMED = 5
"""Rows that cannot be used, or look odd, and are named."""
ENOUGH = 3
"""Runs of a GPU from which on something is left out, and numbers are told from each other."""
ODD = 10
"""Times as slow or as fast as planned, from which on a row is more likely wrong than measured."""


def calibrate(
    run: Annotated[list[str] | None, typer.Argument(help=f"{RUN} Several.", callback=newest_runs)] = None,
    rows: Annotated[
        Path | None,
        typer.Option("--from", help="CSV with predict's columns and step_time_s or tokens_per_s_per_gpu."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="TOML to write, for --hardware; default: only print.")
    ] = None,
) -> None:
    """Fit the planner to your own machines, from runs that you measured: three help already. Needs no GPU.

    It finds the network's real bandwidth and latency, which overlaps work, what kernels and their launches take, and
    says how well runs are predicted that it left out. `--hardware FILE` then takes the file in plan, check, predict and
    submit.
    """
    from superpod.planner.calibration import calibrate as calibrating
    from superpod.planner.calibration import calibration_file

    _check(out)
    measured = [*_runs(run or []), *_rows(rows)]
    if not measured:
        raise UserError("there is no measured run", "name run folders, or a table: --from runs.csv")
    by_gpu: dict[str, list[Measured]] = defaultdict(list)
    for one in measured:
        by_gpu[one.job.node.gpu.name].append(one)
    calibrations = [calibrating.calibrate(runs) for runs in by_gpu.values()]
    for calibration, runs in zip(calibrations, by_gpu.values(), strict=True):
        first, *others = calibration_file.sentences(calibration)
        print(first)
        for line in [*others, *_doubts(calibration), *_one_layout(runs)]:
            print(f"  {line}")
    if out is not None:
        output_file.write(
            out, calibration_file.text(calibrations, f"{len(measured)} runs of {_sources(run or [], rows)}"), "--out"
        )
        print(f"wrote {out}: recipes plan ... --hardware {shlex.quote(str(out))}")


def _runs(folders: list[str]) -> list[Measured]:
    from superpod.reports import measured_runs
    from superpod.runtime.runs.run_folder import RunFolder

    return [measured_runs.measured(RunFolder.open(folder)) for folder in folders]


def _rows(path: Path | None) -> list[Measured]:
    from superpod.planner.tables import measured
    from superpod.reports.measured_runs import impossible

    if path is None:
        return []
    rows, problems = measured.read(path, lambda words: print(f"note: {words}", file=sys.stderr))
    runs = [row for row in rows if not impossible(row)]
    problems += [f"{row.name}: {wrong}" for row in rows if (wrong := impossible(row))]
    for problem in problems[:MOST_NAMED]:
        print(f"left out: {problem}", file=sys.stderr)
    if len(problems) > MOST_NAMED:
        print(f"left out: {counted(len(problems) - MOST_NAMED, 'row')} more", file=sys.stderr)
    if not runs:
        raise UserError(
            f"{path} has no row of a run that finished and was measured",
            "mend the rows that are left out above"
            if problems
            else "fill step_time_s or tokens_per_s_per_gpu in a row a run, with outcome blank or ok",
        )
    for line in _unfitting(runs):
        print(line, file=sys.stderr)
    return runs


def _unfitting(runs: list[Measured]) -> list[str]:
    """Rows that ran, and that the planner says do not fit: the table says less than the run did, or another layout."""
    from superpod.planner import predict

    predictions = predict.many([run.job for run in runs])
    short = [f"{run.name} ({p.reason})" for run, p in zip(runs, predictions, strict=True) if p.verdict == "oom"]
    if not short:
        return []
    more = [f"{len(short) - MOST_NAMED:,} more"] * (len(short) > MOST_NAMED)
    return [
        f"warning: {counted(len(short), 'row')} ran, and by the planner would not fit: "
        f"{', '.join([*short[:MOST_NAMED], *more])}; give recompute / allocated_gib_max columns, or check the layout"
    ]


def _doubts(calibration: Calibration) -> list[str]:
    """What so few runs cannot tell, and runs that are hardly what they are said to be."""
    count = len(calibration.names)
    times = calibration.measured / calibration.shipped
    odd = [(name, x) for name, x in zip(calibration.names, times, strict=True) if not 1 / ODD < x < ODD]
    lines = [
        f"warning: {name} took {x:.3g} times its planned step; a wrong number of GPUs, batch, sequence or unit?"
        for name, x in odd[:MOST_NAMED]
    ]
    if len(odd) > MOST_NAMED:
        lines.append(f"warning: so did {counted(len(odd) - MOST_NAMED, 'run')} more")
    if count < ENOUGH:
        left_out = "no run was left out" if count == 1 else "each was predicted from the other alone"
        lines.append(
            f"warning: {count} run{'s' * (count > 1)}, {left_out}: how well others are predicted cannot be told, nor "
            f"whether computation, the network or launches are slow; from {ENOUGH} runs of several layouts on, it can"
        )
    return lines


def _one_layout(runs: list[Measured]) -> list[str]:
    """Runs of one and the same job predict each other whatever the numbers are: an error of 0 says nothing then."""
    if len(runs) < 2 or any(run.job != runs[0].job for run in runs):
        return []
    return [
        f"warning: the {len(runs)} runs are all of one layout: nothing tells apart computation, the network and "
        "launches, and that runs left out are predicted well is no evidence; add runs of another TP, PP, micro-batch "
        "or number of nodes"
    ]


def _sources(folders: list[str], rows: Path | None) -> str:
    return ", ".join(
        [*(Path(folder).name for folder in folders[:3]), *["..."] * (len(folders) > 3), *map(str, filter(None, [rows]))]
    )


def _check(out: Path | None) -> None:
    """Refuse to write over what another has written. Raises UserError."""
    from superpod.planner.calibration import calibration_file

    first = calibration_file.text([], "").partition("\n")[0].encode()
    if out is not None:
        output_file.check(
            out, "--out", lambda start, _: start.startswith(first), by="recipes calibrate", to_devices=True
        )
