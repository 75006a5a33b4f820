"""Open the local run that `--resume` specifies, and check whether it may be resumed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from superpod.errors import UserError
from superpod.requests import restored_environment, resume_changes
from superpod.requests.request import Request
from superpod.runtime.processes.attempt_processes import refuse_running
from superpod.runtime.runs import owner, pending_facts
from superpod.runtime.runs.run_folder import RunFolder


def find(runs: Path, name: str, resume: str) -> RunFolder:
    """Return the run of the recipe `name` that `--resume` specifies, and restore its environment variables.

    `resume` is a run folder, or `last` for the newest run in `runs`. Raises UserError if the run does not exist, or is
    of another recipe or user.
    """
    if not resume:
        raise UserError("--resume needs a run", "pass a run folder, or `last`")
    folder = RunFolder.latest(runs, name) if resume == "last" else RunFolder.open(resume)
    if folder is None:
        raise UserError(
            f"{runs} contains no run of {name}", "start one without --resume, or set the folder with --runs"
        )
    if folder.recipe != name:
        raise UserError(f"{folder.path} is a run of {folder.recipe}, not of {name}")
    owner.refuse_others(folder.path, "continue it")
    owner.refuse_unsafe(folder.path)
    restored_environment.restore_variables(folder)
    return folder


def open_pretraining(
    runs: Path, name: str, resume: str, overrides: Sequence[str], data: Path | None, size_options: Mapping[str, object]
) -> tuple[RunFolder, Request]:
    """Return the run that `recipes run --resume` specifies (like `find`), and its request with the changes.

    The changes are `overrides`, and `data` unless it is None. `size_options` (option -> value) are refused. Raises
    UserError if the run does not exist, is in use or done, or cannot be resumed with one of the changes.
    """
    folder = find(runs, name, resume)
    with folder.lock():
        refuse_running(folder.path)
        pending_facts.apply(folder)  # stored by a launcher that was killed
    if "finetune" in folder.facts:
        raise UserError(
            f"{folder.path} is a fine-tuning run", f"resume it with `recipes finetune {name} --resume {folder.path}`"
        )
    if folder.done and not overrides:
        raise UserError(f"{folder.path} is done", "increase the number of steps, for example trainer.max_steps=100")
    for option, value in size_options.items():
        raise UserError(f"{option} {value} cannot be changed when a run is resumed", "start a new run")
    for change in resume_changes.find_changes(folder, overrides):
        print(f"change {change}", file=sys.stderr)
    return folder, Request.from_run(folder, overrides, data.absolute() if data else None)
