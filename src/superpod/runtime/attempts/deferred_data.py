"""Deferred data: a run that is submitted before another job has created its data folder. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from superpod.errors import UserError
from superpod.runtime.runs.run_folder import RunFolder

KEY = "late_data"
"""Key of run.json: true if the data folder did not exist when the run was submitted."""

FILE = "dataset.json"
"""The file that `recipes data` writes last."""


class MissingDataError(UserError):
    """The data folder is missing, and more jobs of the run would fail in the same way."""


def require(run: RunFolder, pause: Callable[[], None]) -> None:
    """Require the data folder before the ranks start. Checks twice, since a new folder may become visible late.

    Args:
        run: the run.
        pause: waits before the second check.

    Raises:
        MissingDataError: the folder does not exist or is incomplete.
    """
    facts = run.facts
    file = Path(str(facts.get("data", "")), FILE)
    if not facts.get(KEY) or file.is_file():
        return
    pause()
    if not file.is_file():
        raise MissingDataError(
            f"the data folder {file.parent} does not exist or has no {FILE}; the job on which this run depends should "
            "have created it",
            f"check the output of that job; once the folder exists, {run.resume_hint}",
        )
