"""Run a session of `recipes finetune` under the run's lock: prepare, train, export.

The attempt stays open while the model and the data are prepared and while the checkpoint is exported. Therefore a
launcher that is killed in these phases is detected, and the run is not done before its folder is exported.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.launch.model_check import require_built
from superpod.runtime.runs import run_facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from superpod.launch.finetuning.finetune import Task
    from superpod.launch.local import AttemptEnd, LocalRun
    from superpod.requests.request import Request
    from superpod.runtime.runs.run_folder import RunFolder

FOLDER = "hf"
"""Default name of the exported folder, which is in the run folder."""


@dataclass(frozen=True)
class Outcome:
    """The result of a session."""

    run: RunFolder
    stopped: AttemptEnd | None
    """the end of the attempt if it did not complete the training; None if it did"""
    export_error: str
    """the difference between the exported and the trained model; "" = none"""


def run_to_resume(runs: Path, name: str, resume: str, changes: Sequence[str], out: Path | None) -> RunFolder:
    """Return the run that `--resume` specifies (like `earlier_run.find`) if it can be trained further or exported.

    `changes` are the overrides of the command line; `out` is the folder to export to, None = that of the run. Raises
    UserError if the run is in use or done, has no intact checkpoint, or does not permit one of the changes.
    """
    from superpod.launch import earlier_run
    from superpod.launch.finetuning import finetune as tuning
    from superpod.launch.finetuning import tuning_overrides
    from superpod.requests import resume_changes
    from superpod.runtime.checkpoints import resume as resume_rule
    from superpod.runtime.processes.attempt_processes import refuse_running
    from superpod.runtime.runs import pending_export, pending_facts
    from superpod.weights.transfer import conversion

    folder = earlier_run.find(runs, name, resume)
    tuning.Task.from_run(folder)  # raises UserError if the run is not a fine-tuning
    with folder.lock():  # refuses a run in use before NeMo is imported; released again
        refuse_running(folder.path)
        pending_facts.apply(folder)  # stored by a launcher that was killed
        changed = resume_changes.find_changes(folder, changes)
        resume_rule.decide_by_sizes(folder)
    for change in changed:
        print(f"change {change}", file=sys.stderr)
    if folder.done and not folder.has_pending_export and tuning_overrides.read_steps(changes) is None:
        raise UserError(
            f"{folder.path} is done: its learning-rate schedule has ended",
            "start a new run from this one with more --steps, or export it with "
            f"`{shlex.join(['recipes', 'ckpt', 'convert', str(folder.path), 'OUT'])}`",
        )
    if not pending_export.is_unrecorded(folder.path, _target(folder, out)):
        conversion.require_new_output(_target(folder, out), "" if out is None else "--out ")
    return folder


def with_start(task: Task, recipe: str, start: Path | None) -> Task:
    """Return the task with the NeMo checkpoint that `start` (`--from`) specifies; unchanged if `start` is None.

    Raises UserError if no checkpoint is intact, or it is of a different model.
    """
    from superpod.collection.registry import find
    from superpod.launch import start_checkpoint

    if start is None:
        return task
    rows = start_checkpoint.read_vocab_size(Path(task.model))
    return replace(task, start=str(start_checkpoint.select_checkpoint(start.absolute(), find(recipe).shape, rows)))


def run_session(
    task: Task,
    request: Request,
    folder: RunFolder | None,
    out: Path | None,
    runs: Path,
    more_steps: bool = False,
    evaluate: bool = True,
    build: bool = True,
) -> Outcome:
    """Prepare, train and export a run. A run that is already trained is only exported.

    Args:
        task: the model and the data.
        request: the recipe and its changes.
        folder: the run to resume; None = a new run.
        out: the folder to export to; None = a folder in the run folder.
        runs: the folder in which a new run is created.
        more_steps: whether to train further if the run is already trained.
        evaluate: whether to evaluate the exported model with transformers.
        build: whether to build the models of three ranks first if the recipe is changed.
    """
    from superpod.common.json_files import read_json
    from superpod.common.quiet import silence_libraries
    from superpod.launch.display import consoles
    from superpod.runtime.runs import pending_export
    from superpod.runtime.runs.run_folder import DONE, RunFolder

    export_error = ""
    target = str(out.absolute()) if out else FOLDER
    facts = request.facts() | {run_facts.FINETUNE: asdict(task), pending_export.EXPORTS_TO: target}
    run = folder or RunFolder.create(runs, request.recipe, facts=facts, recipe_lines=[])

    def remove_new_run() -> None:  # later, `_train` removes it
        if folder is None and not run.attempts:
            shutil.rmtree(run.path, ignore_errors=True)

    with _on_failure(remove_new_run), silence_libraries() as terminal, run.lock():
        console = consoles.console(terminal, highlight=True)
        if out and folder:
            pending_export.set_folder(run.path, target)
        end = None
        if more_steps or not run.has_pending_export:
            end = _train(console, task, request, run, folder is None, build)
        if end is None or end.state == "done":
            stop_reason = (read_json(run.path / DONE) or {}).get("early")
            if stop_reason:
                consoles.print_plain(console, f"stopped early: {stop_reason}")
            export_error = _export(console, run, _target(run, out), evaluate)
    return Outcome(run, end if end and end.state != "done" else None, export_error)


def _target(folder: RunFolder, out: Path | None) -> Path:
    """Return the folder for the exported model: `out` (--out), the folder of an earlier attempt, or the default."""
    from superpod.runtime.runs import pending_export

    if out:
        return out.absolute()
    return folder.path / str(folder.facts.get(pending_export.EXPORTS_TO) or FOLDER)


def _train(console: Console, task: Task, request: Request, run: RunFolder, is_new: bool, build: bool) -> AttemptEnd:
    """Run an attempt and return its end. If the preparation fails, remove the attempt, or the folder of a new run."""
    from superpod.launch import local_attempt
    from superpod.launch.subprocess_call import stop_running
    from superpod.runtime.processes import watchdog
    from superpod.runtime.runs import pending_export

    attempt = run.new_attempt()

    def remove() -> None:
        stop_running()
        shutil.rmtree(run.path if is_new else attempt.path, ignore_errors=True)

    def remove_unstarted() -> None:
        if "resume" not in attempt.result:  # written before the ranks are started
            remove()

    with _on_failure(remove_unstarted), watchdog.run_watchdog(attempt.path):
        local_run = _prepare(console, task, request, run, remove)
        require_built([local_run.resolved], build=build, console=console)
        _print_samples(console, local_run)
        pending_export.discard_record(run.path)
        return local_attempt.train_locked(console, local_run, run, attempt)


@contextmanager
def _on_failure(clean_up: Callable[[], None]) -> Iterator[None]:
    """Call `clean_up` if the block raises an exception."""
    try:
        yield
    except BaseException:
        clean_up()
        raise


def _prepare(console: Console, task: Task, request: Request, run: RunFolder, remove: Callable[[], None]) -> LocalRun:
    """Import the model, pack the samples and build the configuration. Ctrl-C calls `remove` and exits."""
    from superpod.launch import local
    from superpod.launch.display import consoles
    from superpod.launch.display.progress_bar import exit_on_interrupt, spinner
    from superpod.launch.finetuning import finetune as tuning

    note = partial(consoles.print_plain, console)
    message = "importing NeMo, building the recipe and preparing model and samples"
    with spinner(console, message), exit_on_interrupt(console, remove):
        return local.prepare(request, tuning.task_change(task, run.path, note, request.overrides))


def _print_samples(console: Console, local_run: LocalRun) -> None:
    """Print the numbers of samples, and the fields of the recipe that were set to the values of the model."""
    from superpod.launch.display import consoles
    from superpod.weights.finetuning import packed_data

    for line in packed_data.format_counts(local_run.facts["samples"]):
        consoles.print_plain(console, line)
    for field, (old, new) in local_run.facts["model_taken"].items():
        console.print(f"model.config.{field}: {old} -> {new}, taken from the model", markup=False, highlight=False)


def _export(console: Console, run: RunFolder, target: Path, evaluate: bool) -> str:
    """Export the best checkpoint to `target` and evaluate it; return a message if its loss differs, otherwise ""."""
    from superpod.launch.display import consoles
    from superpod.launch.display.progress_bar import spinner
    from superpod.launch.finetuning import export_artifacts
    from superpod.launch.finetuning import finetune as tuning
    from superpod.runtime.processes import watchdog
    from superpod.runtime.runs import pending_export

    try:
        with spinner(console, "exporting the best checkpoint"), watchdog.run_watchdog(run.attempts[-1].path):
            export_facts = tuning.export(run, target)
    except BaseException:
        console.print(f"training is done, but the export failed; {run.resume_hint} with the export", soft_wrap=True)
        raise
    facts = {"folder": str(target), "checkpoint": export_facts["checkpoint"], "val_loss": export_facts["val_loss"]}
    pending_export.record(run.path, facts)
    loss = "" if export_facts["val_loss"] is None else f", validation loss {export_facts['val_loss']:.4f}"
    merged_note = f", {export_facts['merged']} matrices merged" if export_facts["merged"] else ""
    line = f"{export_facts['checkpoint']}{loss}{merged_note}: Hugging Face folder {target}"

    note = partial(consoles.print_plain, console)
    for text in (line, *export_facts["notes"]):
        note(text)
    with spinner(console, "evaluating the exported model"):
        result = export_artifacts.write_artifacts(run, target, export_facts, note, evaluation=evaluate)
    if result is None or result.agrees:
        return ""
    return result.mismatch_message(target)
