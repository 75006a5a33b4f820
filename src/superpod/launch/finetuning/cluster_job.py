"""Prepare a fine-tuning run for a cluster: the samples are packed at submission, and the job imports the model."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.launch import model_job
from superpod.launch.finetuning import finetune
from superpod.runtime.attempts.model_steps import PACKED
from superpod.runtime.runs import owner

if TYPE_CHECKING:
    from superpod.launch.finetuning.finetune import Task
    from superpod.requests.request import Request
    from superpod.requests.resolve import ResolvedRun

SAMPLES = ".samples"
"""Folder next to the run folders (`owner.folder_in`) with the packed samples, in one folder per submission."""


def resolve_finetuning(request: Request, task: Task, runs: Path, note: Callable[[str], None]) -> ResolvedRun:
    """Resolve the run of a fine-tuning job: the recipe with the packed data and the checkpoint to import.

    The folders of `task`, and the folder for runs `runs`, are shared by all nodes and this machine. `note` is called
    with each line to print. Raises UserError, and removes the packed samples, if the model does not match the recipe or
    the samples are unsuitable.
    """
    from superpod.nemo2.export import flatten
    from superpod.rehearsal import install
    from superpod.requests.resolve import resolve

    built_run = resolve(request)
    install()  # the model's configuration is compared here, without a GPU or Transformer Engine
    bases = _folder_in(runs, finetune.BASES)
    base = finetune.base_checkpoint(Path(task.model), bases, forward_check=task.forward_check)
    samples = Path(tempfile.mkdtemp(prefix="", dir=_folder_in(runs, SAMPLES)))
    samples.chmod(0o755)
    try:
        facts = finetune.task_change(task, samples, note, request.overrides, deferred_base=base)(built_run.partial)
    except BaseException:
        shutil.rmtree(samples, ignore_errors=True)
        raise
    trainer = built_run.partial.trainer
    return dataclasses.replace(
        built_run,
        max_steps=trainer.max_steps,
        save_every=trainer.val_check_interval,  # after each validation
        data_facts={**built_run.data_facts, **facts, **model_job.model_step_facts(base), PACKED: str(samples / "data")},
        lines=[str(line) for line in flatten.flatten(built_run.partial)],
    ).export()


def _folder_in(runs: Path, name: str) -> Path:
    """Return this user's folder `name` in `runs`, like `owner.folder_in`. Raises UserError instead of OSError."""
    try:
        return owner.folder_in(runs, name)
    except OSError as error:
        raise UserError(
            f"cannot write to {runs}: {error.strerror}", "specify a different shared folder with --runs"
        ) from None


def discard_samples(run: ResolvedRun) -> None:
    """Remove the packed samples of a run that was not submitted."""
    packed_path = run.data_facts.get(PACKED)
    if packed_path:
        shutil.rmtree(Path(packed_path).parent, ignore_errors=True)
