"""Read a table of measured runs: the columns of `recipes predict`, and the measured step time and memory."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

from superpod.errors import UserError
from superpod.planner.calibration.calibrate import MeasuredRun
from superpod.planner.formats.config_files import read_text
from superpod.planner.planned_job import PlannedJob
from superpod.planner.tables import csv_cells, header, published
from superpod.planner.tables.csv_cells import Cells

TIMES = ("step_time_s", "tokens_per_s_per_gpu")
"""Columns of the measured time; one of them is required."""
BYTES = ("allocated_gib_max", "reserved_gib_max")
"""Columns of the measured peak memory, of the rank with the highest peak; both are optional."""
FINISHED_OUTCOMES = ("", "ok", "done", "completed")
"""Values of the column `outcome` for completed runs; rows with other values are skipped."""
MAX_DIFFERENCE = 0.05
"""Maximum relative difference between both times of a row; tables round them and average over different steps."""


TABLE = "a table of measured runs: a CSV file with the columns of docs/planner.md"


def read(
    path: Path, note: Callable[[str], None] = lambda message: None, translate: Callable[[str], str] = str
) -> tuple[list[MeasuredRun], list[str]]:
    """Return the measured runs in a CSV file, and a message for each invalid row.

    Args:
        path: the file.
        note: function that is called with messages about misspelt columns.
        translate: returns the name of the model that a text means; see `published.Facts`.

    Raises:
        UserError: the file is not a table of measured runs.
    """
    rows = csv_cells.read(io.StringIO(read_text(path, TABLE).lstrip("\ufeff")))
    names = header.names(path, next(rows, Cells([])).values, note, (*TIMES, *BYTES, "outcome"))
    if not set(TIMES) & set(names):
        hint = f"the first line must name the columns: {header.EXAMPLE[0]},{TIMES[0]}"
        raise UserError(f"{path} has no column {' or '.join(TIMES)}", hint)
    runs, problems = [], []
    facts = published.Facts(published.builtin().hardware, translate)
    for cells in rows:
        row = csv_cells.to_dict(names, cells)
        name = row.get("id") or f"line {cells.line}"
        try:
            if (run := _read_run(name, row, facts)) is not None:
                runs.append(run)
        except UserError as wrong:
            problems.append(f"{name}: {published.one_line(wrong)}")
    return runs, problems


def _read_run(name: str, row: dict[str, str], facts: published.Facts) -> MeasuredRun | None:
    """Return the run that a row describes; None if it was not completed or has no measured time.

    Raises:
        UserError: the row is invalid.
    """
    if csv_cells.BROKEN in row:
        raise UserError(row[csv_cells.BROKEN])
    is_finished = row.get("outcome", "").strip().lower() in FINISHED_OUTCOMES
    if not is_finished or not any(row.get(key, "").strip() for key in TIMES):
        return None
    job = published.job(row, facts)
    return MeasuredRun(name, job, _read_step_time(row, job), *(_read_positive_number(row, key) for key in BYTES))


def _read_step_time(row: dict[str, str], job: PlannedJob) -> float:
    """Return the measured step time in seconds, from the time or the throughput of a row.

    Raises:
        UserError: a value is invalid, or the two differ by more than MAX_DIFFERENCE.
    """
    seconds, rate = (_read_positive_number(row, key) for key in TIMES)
    by_rate = job.tokens / rate / job.gpus if rate else None
    times = [time for time in (seconds, by_rate) if time is not None]
    if max(times) > (1 + MAX_DIFFERENCE) * min(times):
        raise UserError(
            f"step_time_s is {seconds:.4g}, but tokens_per_s_per_gpu {rate:.6g} means {by_rate:.4g} at gbs "
            f"{job.layout.gbs} x seq {job.seq} on {job.gpus} GPUs; they may differ by at most {MAX_DIFFERENCE:.0%}",
            "leave the incorrect one blank, or correct gbs, seq or gpus",
        )
    return times[0]


def _read_positive_number(row: dict[str, str], key: str) -> float | None:
    """Return a positive number from a row; None if the cell is blank. Raises UserError if it is invalid."""
    text = published.strip_thousands_separators(row.get(key, "").strip())
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        if re.fullmatch(r"\d+,\d+", text):
            hint = f"use {text.replace(',', '.')}"
            raise UserError(f"{key} must be a number with a decimal point, not {text!r}", hint)
        raise UserError(f"{key} must be a number greater than 0, not {text!r}")
    return value
