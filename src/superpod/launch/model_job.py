"""Import or export the model in a fine-tuning job: `python -m superpod.launch.model_job import|export RUN`.

`attempt.py` runs it as a job step with a single task before and after the ranks, in their environment. If it fails,
the last line of its output is the error.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.launch.finetuning import export_artifacts, finetune
from superpod.runtime.attempts.model_steps import BASE
from superpod.runtime.runs import pending_export
from superpod.runtime.runs.run_folder import RunFolder

EVALUATE = "evaluate"
"""Key of run.json: whether to evaluate the exported folder."""


def model_step_facts(base: Path) -> dict[str, Any]:
    """Return the entries of run.json for these steps; `base` is the path of the imported checkpoint."""
    return {BASE: str(base), pending_export.EXPORTS_TO: "hf", EVALUATE: True}


_print = functools.partial(print, flush=True)


def import_model(run: RunFolder) -> None:
    """Import the model of a run, unless it is imported. If another run is importing it, wait.

    Raises UserError if the model has changed since the submission, or cannot be imported.
    """
    task, base = finetune.Task.from_run(run), Path(str(run.facts[BASE]))
    model = Path(task.model)
    if not model.is_dir():
        raise UserError(
            f"{model} does not exist on {os.uname().nodename}", "use a folder on a file system that all nodes share"
        )
    if finetune.base_checkpoint(model, base.parent, forward_check=task.forward_check) != base:
        raise UserError(
            f"{model} has changed since the run was submitted: the samples were tokenized and the layout was checked "
            "for the previous version",
            "submit a new run",
        )
    finetune.import_model(model, base.parent, _print, forward_check=task.forward_check)
    _print(f"imported: {base}")


def export(run: RunFolder) -> None:
    """Export a trained run to a Hugging Face folder, export its adapter, and evaluate the exported model.

    Raises UserError if the export fails, or the exported model does not have the validation loss of the trained model.
    """
    target = run.path / str(run.facts[pending_export.EXPORTS_TO])
    export_facts = finetune.export(run, target)
    checkpoint, val_loss = export_facts["checkpoint"], export_facts["val_loss"]
    for line in (f"{checkpoint}, validation loss {val_loss}: {target}", *export_facts["notes"]):
        _print(line)
    recorded_facts = {"folder": str(target), "checkpoint": checkpoint, "val_loss": val_loss}
    evaluate = bool(run.facts.get(EVALUATE, True))
    try:
        result = export_artifacts.write_artifacts(run, target, export_facts, _print, evaluation=evaluate)
    except Exception:
        # The folder is complete, and the next job would fail in the same way.
        pending_export.record(run.path, recorded_facts)
        raise
    pending_export.record(run.path, recorded_facts)  # last, so that the next job repeats an interrupted export
    if result and not result.agrees:
        raise UserError(result.mismatch_message(target))


STEPS: Mapping[str, Callable[[RunFolder], None]] = {"import": import_model, "export": export}


def main(step: str, folder: str) -> int:
    """Run the step "import" or "export" for the run in `folder`; return the exit code."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the request to save before the time limit is for ranks only
    os.environ["SLURM_JOB_NAME"] = "interactive"  # keeps Lightning from using Slurm: this is a single process
    try:
        STEPS[step](RunFolder.open(folder))
    except UserError as error:
        print(f"{error}; {error.hint}" if error.hint else str(error), flush=True)
        return 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        print(f"{step} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
