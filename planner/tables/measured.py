"""Measured runs in a table: predict's columns, and what a step took."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from superpod.errors import UserError
from superpod.planner.calibrate import Measured
from superpod.planner.files import text_of
from superpod.planner.tables import column_names, published

TIMES = ("step_time_s", "tokens_per_s_per_gpu")
"""Columns of a measured time: one of them is enough."""
BYTES = ("allocated_gib_max", "reserved_gib_max")
"""Columns of a measured peak, of the fullest rank; either may be there, and either blank."""
FINISHED = ("", "ok", "done", "completed")
"""Of a column `outcome`: rows of other outcomes measured nothing."""


TABLE = "a table of measured runs: a CSV file with the columns of docs/planner.md"


def read(path: Path, note: Callable[[str], None] = lambda words: None) -> tuple[list[Measured], list[str]]:
    """The measured runs of a CSV file, and a sentence for every row that cannot be used.

    `note` hears of columns that are not read and look like one that is.

    Raises:
        UserError: it is no such table.
    """
    reader = csv.DictReader(text_of(path, TABLE).lstrip("\ufeff").splitlines())
    names = reader.fieldnames or []
    for words in column_names.misspelt(names, (*TIMES, *BYTES, "outcome")):
        note(words)
    if not set(TIMES) & set(names):
        raise UserError(f"{path} has no column {' or '.join(TIMES)}", "its first line names the columns")
    if "model" not in names:
        raise UserError(f"{path} has no column model", "the columns are those of `recipes predict`: docs/planner.md")
    runs, problems = [], []
    try:
        for name, row in _rows(reader):
            try:
                if (run := _measured(name, row)) is not None:
                    runs.append(run)
            except UserError as wrong:
                problems.append(f"{name}: {wrong}")
    except csv.Error as broken:
        raise UserError(f"{path} is no CSV file: {broken}") from broken
    return runs, problems


def _rows(reader: csv.DictReader[str]) -> Iterator[tuple[str, dict[str, str]]]:
    for row in reader:
        cells = {key: value for key, value in row.items() if isinstance(key, str) and isinstance(value, str)}
        yield cells.get("id") or f"line {reader.line_num}", cells


def _measured(name: str, row: dict[str, str]) -> Measured | None:
    """The run of a row; None where it did not finish, or nothing was measured."""
    if row.get("outcome", "").strip().lower() not in FINISHED or not any(row.get(key, "").strip() for key in TIMES):
        return None
    job = published.job(row)
    seconds, rate = (_number(row, key) for key in TIMES)
    seconds = seconds if seconds is not None else job.tokens / (rate or 1.0) / job.gpus
    return Measured(name, job, seconds, *(_number(row, key) for key in BYTES))


def _number(row: dict[str, str], key: str) -> float | None:
    text = published.without_groups(row.get(key, "").strip())
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UserError(f"{key} is {text!r}; it is a number above 0", "write 1.55, with a point" if "," in text else "")
    return value
