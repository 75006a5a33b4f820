"""The first line of a table of runs, to predict or measured: both are refused alike for what it lacks.

A column that is missing there would be a default in every row, and nobody would see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from superpod.errors import UserError
from superpod.planner.tables import column_names

EXAMPLE = ("model,gpu,gpus,tp", "llama3_8b,h100,8,2")
"""A first line and a row, for messages."""
NEEDED = ("model", "gpu", "tp")
"""Without these columns a file is another kind of table."""


def names(source: Path, cells: Sequence[str], note: Callable[[str], None], others: Sequence[str] = ()) -> list[str]:
    """The columns that a first line names. `note` hears of those that are not read and look like one that is.

    Args:
        source: the table, for messages.
        cells: of its first line.
        note: takes a sentence.
        others: columns that are read beside predict's, the most usual first.

    Raises:
        UserError: there is no first line, it has not what every table has, or it names a column twice.
    """
    given = [name.strip().lower() for name in cells]
    misspelt = column_names.misspelt(given, others)
    if missing := [key for key in NEEDED if key not in given]:
        raise _none(source, given, missing, misspelt, ",".join([EXAMPLE[0], *others[:1]]))
    if twice := next((name for name, count in Counter(filter(None, given)).items() if count > 1), ""):
        raise UserError(f"{source} has two columns {twice}", "its first line names each column once")
    for words in misspelt:
        note(words)
    return given


def _none(source: Path, given: list[str], missing: list[str], misspelt: list[str], example: str) -> UserError:
    """What is wrong with a first line, and what to write there."""
    has_none = f"it has no column {', '.join(missing)}"
    hint = f"its first line names the columns: {example}"
    if not given:
        return UserError(f"{source} is empty: {has_none}", hint)
    if not any(given):
        return UserError(f"the first line of {source} is blank: {has_none}", hint)
    for mark, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(given) == 1 and mark in given[0]:
            return UserError(f"{source} has {word} between its cells", f"write commas: {example}")
    return UserError(f"{source} has no column {', '.join(missing)}", "; ".join([*misspelt, hint]))
