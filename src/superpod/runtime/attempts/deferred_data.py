"""Deferred data: a data folder that another job makes, for which this run waits. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from superpod.errors import UserError
from superpod.runtime.runs.run_folder import RunFolder

KEY = "late_data"
"""Key of run.json: the data folder did not exist when the run was submitted."""

FILE = "dataset.json"
"""Written last by `recipes data`."""


class MissingDataError(UserError):
    """The folder is missing: every further job of the run would find the same."""


def require(run: RunFolder, pause: Callable[[], None]) -> None:
    """Refuse to start ranks without the folder. Looks twice, with a pause between: file systems show a new folder late.

    Raises:
        MissingDataError: the folder is not there.
    """
    facts = run.facts
    file = Path(str(facts.get("data", "")), FILE)
    if not facts.get(KEY) or file.is_file():
        return
    pause()
    if not file.is_file():
        raise MissingDataError(
            f"the data folder {file.parent} is not there, or has no {FILE}: the job that this run has waited for was "
            "to make it",
            f"look at that job's output; once the folder is there, {run.resume_hint}",
        )
