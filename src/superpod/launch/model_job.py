"""A step of one task in the job of a fine-tuning: `python -m superpod.launch.model_job import|export RUN`.

`attempt.py` starts it before and after the ranks, in their environment. Its last line says what went wrong.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.launch import export_artifacts, finetune
from superpod.runtime.attempts.model_steps import BASE
from superpod.runtime.runs import pending_export
from superpod.runtime.runs.run_folder import RunFolder

EVALUATE = "evaluate"
"""Key of run.json: whether the exported folder is measured."""


def model_step_facts(base: Path, folder: str = "hf", *, evaluate: bool = True) -> dict[str, Any]:
    """What run.json must have for these steps: the checkpoint to import to, and the folder to write."""
    return {BASE: str(base), pending_export.EXPORTS_TO: folder, EVALUATE: evaluate}


def _print(line: str) -> None:
    print(line, flush=True)


def import_model(run: RunFolder) -> None:
    """Import the model of a run where no other run has; one that does so now is waited for.

    Raises:
        UserError: the model's folder is another one than when the run was submitted, or cannot be imported.
    """
    task, base = finetune.Task.from_run(run), Path(str(run.facts[BASE]))
    model = Path(task.model)
    if not model.is_dir():
        raise UserError(f"{model} is not there, seen from {os.uname().nodename}", "a folder that every node sees")
    if finetune.base_checkpoint(model, base.parent, forward_check=task.forward_check) != base:
        raise UserError(
            f"{model} has changed since the run was submitted: its samples are encoded and its layout is checked for "
            "the model that it was",
            "submit a new run",
        )
    finetune.import_model(model, base.parent, _print, forward_check=task.forward_check)
    _print(f"imported: {base}")


def export(run: RunFolder) -> None:
    """Write the folder of a trained run, and what comes with it.

    Raises:
        UserError: it cannot be exported, or is not the model that was trained.
    """
    target = run.path / str(run.facts[pending_export.EXPORTS_TO])
    exported = finetune.export(run, target)
    for line in (f"{exported['checkpoint']}, validation loss {exported['val_loss']}: {target}", *exported["notes"]):
        _print(line)
    noted = {"folder": str(target), "checkpoint": exported["checkpoint"], "val_loss": exported["val_loss"]}
    evaluate = bool(run.facts.get(EVALUATE, True))
    try:
        measured = export_artifacts.write_artifacts(run, target, exported, _print, evaluation=evaluate)
    except Exception:
        pending_export.record(run.path, noted)  # the folder is there, and the next job would fail at the same
        raise
    pending_export.record(run.path, noted)  # last: a job that is ended before leaves all of it to the next one
    if measured and not measured.agrees:
        raise UserError(measured.refusal(target))


VERBS: Mapping[str, Callable[[RunFolder], None]] = {"import": import_model, "export": export}


def main(verb: str, folder: str) -> int:
    """Do one of `VERBS` for a run; the exit code."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the time limit is near: a step that ends in time is none the less
    os.environ["SLURM_JOB_NAME"] = "interactive"  # Lightning then does not look for Slurm: this is one process
    try:
        VERBS[verb](RunFolder.open(folder))
    except UserError as error:
        print(f"{error}; {error.hint}" if error.hint else str(error), flush=True)
        return 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        print(f"{verb} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
