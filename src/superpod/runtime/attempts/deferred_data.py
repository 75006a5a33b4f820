"""Require the data of a run that was submitted before another job created its data folder. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from superpod.errors import UserError
from superpod.runtime.runs.run_folder import RunFolder

KEY = "late_data"
"""Key of run.json: true if the data folder did not exist yet when the run was submitted."""

FILE = "dataset.json"
"""The file that `recipes data` writes last."""


class MissingDataError(UserError):
    """The data folder is missing or incomplete, so all later jobs of the run would fail too."""


def require(run: RunFolder, pause: Callable[[], None]) -> None:
    """Check before the ranks start that the data folder exists. Does nothing for a run without deferred data.

    The folder is checked again after `pause`, since a network file system may show a new folder late. Raises
    MissingDataError if it does not exist or is incomplete.
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
