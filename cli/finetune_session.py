"""One `recipes finetune` from its checked request to its exported folder, under the run's lock from start to end.

The attempt is open while model and data are prepared and while the folder is exported, so that a launcher that is
killed there is noticed too, and nothing calls the run done before its folder is written.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.cli.validated import require_built
from superpod.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from superpod.launchers.finetune import Task
    from superpod.launchers.local import AttemptEnd, LocalRun
    from superpod.lifecycle.request import Request
    from superpod.node.run_folder import Attempt, RunFolder

FOLDER = "hf"
"""What a run writes at its end, in its own folder, where no other place is named."""


def run_to_resume(runs: Path, name: str, resume: str, changes: Sequence[str], out: Path | None) -> RunFolder:
    """The run that `--resume` names: it can train on, or only its export is left.

    Raises:
        UserError: it is in use, it is done, none of its checkpoints is intact, or a change is not possible.
    """
    from superpod.cli.request_options import earlier_run
    from superpod.launchers import finetune as tuning
    from superpod.launchers import finetune_overrides
    from superpod.lifecycle import resume_changes
    from superpod.node import owed_export, pending_facts, processes
    from superpod.node import resume as resume_rule
    from superpod.recipes.weights import huggingface

    folder = earlier_run(runs, name, resume)
    tuning.Task.of(folder)  # refuses a run that is no fine-tuning
    with folder.lock():  # for a moment: a run in use elsewhere is refused before NeMo is imported
        processes.refuse_beside_others(folder)
        pending_facts.take_over(folder)  # of a launcher that was killed
        changed = resume_changes.changes(folder, changes)
        resume_rule.decide_by_sizes(folder)
    for change in changed:
        print(f"change {change}", file=sys.stderr)
    if folder.done and not owed_export.left(folder.path) and finetune_overrides.steps_of(changes) is None:
        raise UserError(
            f"{folder.path} is done: its learning rate has reached its end",
            f"start a new run with more --steps from its folder, or export it: {_export_command(folder, None)}",
        )
    if not owed_export.is_left_behind(folder.path, _target(folder, out)):
        huggingface.must_be_new(_target(folder, out), "" if out is None else "--out ")
    return folder


def started(task: Task, recipe: str, start: Path | None) -> Task:
    """The task, with the NeMo checkpoint that `--from` means. Raises UserError where it is another model's."""
    from dataclasses import replace

    from superpod.launchers import start as starts
    from superpod.recipes.registry import find

    if start is None:
        return task
    rows = starts.vocabulary(Path(task.model))
    return replace(task, start=str(starts.chosen(start.absolute(), find(recipe).shape, rows)))


def go(
    task: Task,
    request: Request,
    folder: RunFolder | None,
    out: Path | None,
    runs: Path,
    more_steps: bool = False,
    evaluate: bool = True,
    build: bool = True,
) -> None:
    """Prepare, train and export; of a run that is trained, only export.

    Args:
        task: what is fine-tuned, on what.
        request: the recipe and its changes.
        folder: the run to continue; None = a new one.
        out: the folder to write; None = in the run folder.
        runs: where a new run folder is made.
        more_steps: a run that is trained goes on training.
        build: whether to build the models of three ranks first, if the recipe is changed.
        evaluate: measure the written folder with transformers, and end with 1 where it is not what was trained.
    """
    from superpod.cli import tables, training
    from superpod.cli.report import print_report
    from superpod.launchers import finetune as tuning
    from superpod.lifecycle.quiet import quietly
    from superpod.node import owed_export
    from superpod.node.files import read_json
    from superpod.node.run_folder import DONE, RunFolder

    wrong = ""
    target = str(out.absolute()) if out else FOLDER
    facts = request.facts() | {tuning.FACT: asdict(task), owed_export.EXPORTS_TO: target}
    run = folder or RunFolder.create(runs, request.recipe, facts=facts, recipe_lines=[])
    with _removed_without_attempt(run, folder is None), quietly() as terminal, run.lock():
        console = tables.console(terminal, highlight=True)
        only_export = run.done and bool(owed_export.left(run.path)) and not more_steps
        if out and folder:
            owed_export.write_to(run.path, target)
        end = None if only_export else _trained(console, task, request, run, folder is None, build)
        if end is None or end.state == "done":
            if early := (read_json(run.path / DONE) or {}).get("early"):
                console.print(f"stopped early: {early}", markup=False, highlight=False, soft_wrap=True)
            wrong = _export(console, run, _target(run, out), evaluate)
    stopped = end if end and end.state != "done" else None
    with contextlib.suppress(BrokenPipeError):  # the exit code is the training's
        print_report(run)
        if wrong:
            print(f"WRONG: {wrong}", file=sys.stderr)
        elif stopped:
            print(f"to continue: recipes finetune {request.recipe} --resume {shlex.quote(str(run.path))}")
    if wrong or stopped:
        raise training.NotDone(1 if wrong or not stopped else stopped.exit_code)


def _target(folder: RunFolder, out: Path | None) -> Path:
    from superpod.node import owed_export

    return out.absolute() if out else folder.path / str(folder.facts.get(owed_export.EXPORTS_TO) or FOLDER)


def _trained(console: Console, task: Task, request: Request, run: RunFolder, is_new: bool, build: bool) -> AttemptEnd:
    """How the attempt ended. When preparing fails, a new run folder is removed, and of an earlier one the attempt."""
    from superpod.cli import training
    from superpod.launchers.subprocess_call import stop_running
    from superpod.node import orphans, owed_export

    attempt = run.new_attempt()

    def remove() -> None:
        stop_running()
        shutil.rmtree(run.path if is_new else attempt.path, ignore_errors=True)

    with _removed_on_failure(attempt, remove), orphans.watched(attempt.path):
        local_run = _prepared(console, task, request, run, remove)
        require_built([local_run.resolved], build=build, console=console)
        _show_samples(console, local_run)
        owed_export.forget(run.path)
        return training.train_held(console, local_run, run, attempt)


@contextmanager
def _removed_without_attempt(run: RunFolder, is_new: bool) -> Iterator[None]:
    """Remove a new run that is interrupted before it has an attempt; from then on `_removed_on_failure` decides."""
    try:
        yield
    except BaseException:
        if is_new and not run.attempts:
            shutil.rmtree(run.path, ignore_errors=True)
        raise


@contextmanager
def _removed_on_failure(attempt: Attempt, remove: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if "resume" not in attempt.result:  # its ranks were not started
            remove()
        raise


def _prepared(console: Console, task: Task, request: Request, run: RunFolder, remove: Callable[[], None]) -> LocalRun:
    from superpod.cli.progress import leaving_at_once, waiting
    from superpod.launchers import finetune as tuning
    from superpod.launchers import local

    def note(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    message = "importing NeMo, building the recipe, and preparing model and samples"
    with waiting(console, message), leaving_at_once(console, remove):
        return local.prepare(request, tuning.change(task, run.path, note, request.overrides))


def _export_command(folder: RunFolder, out: Path | None) -> str:
    return shlex.join(["recipes", "ckpt", "convert", str(folder.path), str(out or "OUT")])


def _show_samples(console: Console, local_run: LocalRun) -> None:
    from superpod.recipes.data import finetune_data

    for line in finetune_data.lines(local_run.facts["samples"]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for field, (old, new) in local_run.facts["model_taken"].items():
        console.print(f"model.config.{field}: {old} -> {new}, as the model has it", markup=False, highlight=False)


def _export(console: Console, run: RunFolder, target: Path, evaluate: bool) -> str:
    """Write the folder and what comes with it; returns what is wrong with it, '' for nothing."""
    from superpod.cli.progress import waiting
    from superpod.launchers import finetune as tuning
    from superpod.launchers import handover
    from superpod.node import orphans, owed_export

    try:
        with waiting(console, "exporting the best checkpoint"), orphans.watched(run.attempts[-1].path):
            exported = tuning.export(run, target)
    except BaseException:
        console.print(f"the training is done, but not exported; {run.resume_hint} with the export", soft_wrap=True)
        raise
    facts = {"folder": str(target), "checkpoint": exported["checkpoint"], "val_loss": exported["val_loss"]}
    owed_export.note(run.path, facts)
    loss = "" if exported["val_loss"] is None else f", validation loss {exported['val_loss']:.4f}"
    merged = f", {exported['merged']} matrices merged" if exported["merged"] else ""
    line = f"{exported['checkpoint']}{loss}{merged}: Hugging Face folder {target}"

    def say(words: str) -> None:
        console.print(words, markup=False, highlight=False, soft_wrap=True)

    for words in (line, *exported["notes"]):
        say(words)
    with waiting(console, "looking at what was written"):
        measured = handover.finish(run, target, exported, say, evaluation=evaluate)
    return "" if measured is None or measured.agrees else measured.refusal(target)
