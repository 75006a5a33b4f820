"""Check the header of a table of runs, for `recipes predict` or `recipes calibrate`.

A missing required column is an error, because otherwise a default would apply to all rows without a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from superpod.errors import UserError
from superpod.planner.tables import column_names

EXAMPLE = ("model,gpu,gpus,tp", "llama3_8b,h100,8,2")
"""(header, row) of an example table, for messages."""
REQUIRED_COLUMNS = ("model", "gpu", "tp")
"""Columns that every table must have."""


def names(source: Path, cells: Sequence[str], note: Callable[[str], None], others: Sequence[str] = ()) -> list[str]:
    """Return the column names in a header, in lower case.

    Args:
        source: the table, for messages.
        cells: cells of the first line.
        note: function that is called with messages about misspelt columns.
        others: known columns in addition to those of `predict`, the most common first.

    Raises:
        UserError: the header is empty, lacks a required column, or has a column twice.
    """
    given_names = [name.strip().lower() for name in cells]
    misspelt = column_names.describe_misspelt(given_names, others)
    if missing := [key for key in REQUIRED_COLUMNS if key not in given_names]:
        raise _missing_columns_error(source, given_names, missing, misspelt, ",".join([EXAMPLE[0], *others[:1]]))
    if twice := next((name for name, count in Counter(filter(None, given_names)).items() if count > 1), ""):
        raise UserError(f"{source} has two columns named {twice}", "remove or rename one of them")
    for message in misspelt:
        note(message)
    return given_names


def _missing_columns_error(
    source: Path, given_columns: list[str], missing_columns: list[str], misspelt_columns: list[str], example: str
) -> UserError:
    """Return the error for a header without required columns, with the probable cause."""
    has_none = f"it has no column {', '.join(missing_columns)}"
    hint = f"the first line must name the columns: {example}"
    if not given_columns:
        return UserError(f"{source} is empty: {has_none}", hint)
    if not any(given_columns):
        return UserError(f"the first line of {source} is blank: {has_none}", hint)
    for mark, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(given_columns) == 1 and mark in given_columns[0]:
            return UserError(f"{source} has {word} between its cells", f"use commas: {example}")
    return UserError(f"{source} has no column {', '.join(missing_columns)}", "; ".join([*misspelt_columns, hint]))
