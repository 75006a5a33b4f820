"""Measured runs in a table: predict's columns, and what a step took."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

from superpod.errors import UserError
from superpod.planner.calibration.calibrate import MeasuredRun
from superpod.planner.formats.files import read_text
from superpod.planner.planned_job import PlannedJob
from superpod.planner.tables import csv_cells, header, published
from superpod.planner.tables.csv_cells import Cells

TIMES = ("step_time_s", "tokens_per_s_per_gpu")
"""Columns of a measured time: one of them is enough."""
BYTES = ("allocated_gib_max", "reserved_gib_max")
"""Columns of a measured peak, of the fullest rank; either may be there, and either blank."""
FINISHED = ("", "ok", "done", "completed")
"""Of a column `outcome`: rows of other outcomes measured nothing."""
AGREE = 0.05
"""Relative difference up to which both times of a row are of one run: tables round them, and average over other
steps."""


TABLE = "a table of measured runs: a CSV file with the columns of docs/planner.md"


def read(path: Path, note: Callable[[str], None] = lambda words: None) -> tuple[list[MeasuredRun], list[str]]:
    """The measured runs of a CSV file, and a sentence for every row that cannot be used.

    `note` hears of columns that are not read and look like one that is.

    Raises:
        UserError: it is no such table.
    """
    rows = csv_cells.read(io.StringIO(read_text(path, TABLE).lstrip("\ufeff")))
    names = header.names(path, next(rows, Cells([])).values, note, (*TIMES, *BYTES, "outcome"))
    if not set(TIMES) & set(names):
        hint = f"its first line names the columns: {header.EXAMPLE[0]},{TIMES[0]}"
        raise UserError(f"{path} has no column {' or '.join(TIMES)}", hint)
    runs, problems = [], []
    for cells in rows:
        row = csv_cells.named(names, cells)
        name = row.get("id") or f"line {cells.line}"
        try:
            if (run := _measured(name, row)) is not None:
                runs.append(run)
        except UserError as wrong:
            problems.append(f"{name}: {published.one_line(wrong)}")
    return runs, problems


def _measured(name: str, row: dict[str, str]) -> MeasuredRun | None:
    """The run of a row; None where it did not finish, or nothing was measured."""
    if csv_cells.BROKEN in row:
        raise UserError(row[csv_cells.BROKEN])
    if row.get("outcome", "").strip().lower() not in FINISHED or not any(row.get(key, "").strip() for key in TIMES):
        return None
    job = published.job(row)
    return MeasuredRun(name, job, _seconds(row, job), *(_positive_number(row, key) for key in BYTES))


def _seconds(row: dict[str, str], job: PlannedJob) -> float:
    """What a step took, by either column; both are of one run, or neither can be believed."""
    seconds, rate = (_positive_number(row, key) for key in TIMES)
    by_rate = job.tokens / rate / job.gpus if rate else None
    times = [time for time in (seconds, by_rate) if time is not None]
    if max(times) > (1 + AGREE) * min(times):
        raise UserError(
            f"step_time_s is {seconds:.4g}, but tokens_per_s_per_gpu {rate:.6g} means {by_rate:.4g} at gbs "
            f"{job.layout.gbs} x seq {job.seq} on {job.gpus} GPUs; they may differ by {AGREE:.0%}",
            "leave the wrong one blank, or correct gbs, seq or gpus",
        )
    return times[0]


def _positive_number(row: dict[str, str], key: str) -> float | None:
    text = published.strip_thousands_separators(row.get(key, "").strip())
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        has_comma = re.fullmatch(r"\d+,\d+", text)
        if has_comma:
            point = text.replace(",", ".")
            raise UserError(f"{key} must be a number with a decimal point, not {text!r}", f"write {point}")
        raise UserError(f"{key} must be a number above 0, not {text!r}")
    return value
