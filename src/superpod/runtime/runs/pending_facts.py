"""Store changes to run.json in an attempt, and apply them to the run once the attempt has trained a step.

A change with which no step can be trained is discarded. A change with which a step was trained is kept, even if the
launcher was killed. Standard library only.
"""

from __future__ import annotations

from superpod.common.json_files import JsonObject, read_json, write_json
from superpod.runtime.runs.run_folder import Attempt, RunFolder, as_user_errors

FILE = "pending.json"
"""File in an attempt's folder with the arguments `facts` and `lines` of `RunFolder.update`."""


def store(attempt: Attempt, facts: JsonObject, lines: list[str]) -> None:
    """Store changed keys of run.json and lines of recipe.txt in an attempt before its ranks start. Raises UserError."""
    with as_user_errors(attempt.path):
        write_json(attempt.path / FILE, {"facts": facts, "lines": lines})


def apply(run: RunFolder) -> None:
    """Apply the stored changes of the newest attempt if it has trained a step; remove them. Raises UserError."""
    attempts = run.attempts
    pending_facts = read_json(attempts[-1].path / FILE) if attempts else None
    if not pending_facts:
        return
    if any(line.get("attempt") == attempts[-1].name for line in run.newest_metrics()):
        run.update(dict(pending_facts["facts"]), list(pending_facts["lines"]))
    discard(attempts[-1])


def discard(attempt: Attempt) -> None:
    """Remove the stored changes of an attempt. Raises UserError."""
    with as_user_errors(attempt.path):
        (attempt.path / FILE).unlink(missing_ok=True)
