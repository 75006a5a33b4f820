"""What an attempt runs with, until the run has it: kept in the attempt, and taken over once a step was made.

A change that keeps the run from making a step is not kept for later attempts; one that trained is, though its
launcher was killed. Standard library only.
"""

from __future__ import annotations

from superpod.common.files import JsonObject, read_json, write_json
from superpod.runtime.runs.run_folder import Attempt, RunFolder, as_user_errors

FILE = "pending.json"
"""In an attempt's folder: `facts` and `lines` for `RunFolder.update`."""


def store(attempt: Attempt, facts: JsonObject, lines: list[str]) -> None:
    """Before the ranks of an attempt start. Raises UserError."""
    with as_user_errors(attempt.path):
        write_json(attempt.path / FILE, {"facts": facts, "lines": lines})


def apply(run: RunFolder) -> None:
    """Where the newest attempt made a step and nobody has taken its facts over, do so. Raises UserError."""
    attempts = run.attempts
    pending = read_json(attempts[-1].path / FILE) if attempts else None
    if not pending:
        return
    if any(line.get("attempt") == attempts[-1].name for line in run.newest_metrics()):
        run.update(dict(pending["facts"]), list(pending["lines"]))
    discard(attempts[-1])


def discard(attempt: Attempt) -> None:
    """The facts are the run's, or are not to be. Raises UserError."""
    with as_user_errors(attempt.path):
        (attempt.path / FILE).unlink(missing_ok=True)
