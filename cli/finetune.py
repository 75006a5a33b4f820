"""`recipes finetune`: a Hugging Face folder and a file of samples in, a Hugging Face folder out."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.request_options import Nodes, Runs, earlier_run
from superpod.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from superpod.launchers.finetune import Task
    from superpod.launchers.local import LocalRun
    from superpod.lifecycle.request import Request
    from superpod.node.run_folder import RunFolder


def finetune(
    name: Annotated[str, typer.Argument(help="A recipe of sft, lora or dora, from `recipes list`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as optim.config.lr=1e-4.")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder, or ORG/NAME in this machine's cache.")] = None,
    data: Annotated[Path | None, typer.Option(help=".jsonl of prompts and completions, chats, or text.")] = None,
    validation_data: Annotated[
        Path | None, typer.Option(help="File of samples to validate on.", show_default="a share of --data")
    ] = None,
    validation: Annotated[float, typer.Option(help="Share of the samples held out.")] = 0.05,
    long: Annotated[str, typer.Option(help="Samples beyond the sequence length: refuse, cut or drop.")] = "refuse",
    pack: Annotated[bool, typer.Option("--pack/--no-pack", help="Put several samples into one sequence.")] = True,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of training.", show_default="the recipe's")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples' order, which decides those held out.")] = 1234,
    out: Annotated[Path | None, typer.Option(help="Folder to write.", show_default="hf in the run folder")] = None,
    resume: Annotated[str | None, typer.Option(help="Continue this run folder, or the `last` one.")] = None,
    num_nodes: Nodes = None,
    runs: Runs = Path("runs"),
) -> None:
    """Fine-tune a model on this machine: import, training, best checkpoint, export. Without a GPU, a rehearsal."""
    from superpod.launchers import finetune as tuning
    from superpod.launchers import preflight
    from superpod.lifecycle.request import Request
    from superpod.recipes.weights import huggingface

    if out:
        huggingface.must_be_new(out, "--out ")
    folder = _run_to_resume(runs, name, resume) if resume is not None else None
    files = [str(path.absolute()) if path else "" for path in (data, validation_data)]
    task = tuning.Task(model or "", files[0], files[1], validation, seed, long, pack, steps)
    if folder and task != tuning.Task("", ""):
        raise UserError("--resume keeps the run's model and data", "leave out the options that set them")
    if folder:
        task, request = tuning.Task.of(folder), Request.of_run(folder, overrides or [])
    else:
        if not model or not data:
            raise UserError("finetune needs --model and --data", "or --resume RUN")
        Request(name).check()
        task = replace(task, model=str(tuning.model_folder(model)))
        request = Request(name, tuple(overrides or ()), None, num_nodes)
    request = replace(request, overrides=tuning.with_both_lengths(request.overrides))
    request.check()
    tuning.check(name, task, request.overrides, request.num_nodes)
    preflight.writable(folder.path if folder else runs)
    _train(task, request, folder, out, runs)


def _run_to_resume(runs: Path, name: str, resume: str) -> RunFolder:
    from superpod.node import resume as resume_rule

    folder = earlier_run(runs, name, resume)
    if folder.done:
        raise UserError(
            f"{folder.path} is done: its learning rate has reached its end",
            f"start a new run with --steps N, or export this one: {_export_command(folder, None)}",
        )
    with folder.lock():
        resume_rule.refuse_if_none(folder)
        return folder  # taken for a moment only: a run in use elsewhere is refused before NeMo is imported


def _train(task: Task, request: Request, folder: RunFolder | None, out: Path | None, runs: Path) -> None:
    from rich.console import Console

    from superpod.cli import training
    from superpod.cli.report import print_report
    from superpod.lifecycle.quiet import quietly

    with quietly() as terminal:
        console = Console(file=terminal, width=shutil.get_terminal_size().columns)
        folder, local_run = _prepared(console, task, request, folder, runs)
        end, folder = training.train(console, local_run, folder, runs)
        if end.state == "done":
            _export(console, folder, out)
    print_report(folder)
    if end.state != "done":
        if any(folder.checkpoints.iterdir()):
            print(f"to continue: recipes finetune {request.recipe} --resume {shlex.quote(str(folder.path))}")
        raise training.NotDone(end.exit_code)


def _prepared(
    console: Console, task: Task, request: Request, folder: RunFolder | None, runs: Path
) -> tuple[RunFolder, LocalRun]:
    """The run folder and what will run in it; when preparing fails, a new folder is removed."""
    from superpod.cli.progress import leaving_at_once, waiting
    from superpod.launchers import finetune as tuning
    from superpod.launchers import local
    from superpod.node.run_folder import RunFolder

    def note(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    facts = request.facts() | {tuning.FACT: asdict(task)}
    run = folder or RunFolder.create(runs, request.recipe, facts=facts, recipe_lines=[])

    def remove_new_folder() -> None:
        if folder is None:
            shutil.rmtree(run.path, ignore_errors=True)

    try:
        message = "importing NeMo, building the recipe, and preparing model and samples"
        with waiting(console, message), leaving_at_once(console, remove_new_folder):
            local_run = local.prepare(request, tuning.change(task, run.path, note))
    except BaseException:
        remove_new_folder()
        raise
    _show_samples(console, local_run)
    return run, local_run


def _export_command(folder: RunFolder, out: Path | None) -> str:
    return shlex.join(["recipes", "ckpt", "convert", str(folder.path), str(out or "OUT")])


def _show_samples(console: Console, local_run: LocalRun) -> None:
    counts = local_run.facts["samples"]
    for file in counts["read"]:
        lost = ", ".join(f"{file[name]} {name}" for name in ("cut", "dropped") if file[name])
        console.print(f"{file['samples']} samples{f' ({lost})' if lost else ''}, {file['learnt']} tokens to learn")
    for part in ("training", "validation"):
        filling = counts[part]
        count = f"{filling['sequences']} sequence{'s' if filling['sequences'] > 1 else ''}"
        console.print(f"{part}: {filling['samples']} samples in {count}, {filling['filled']:.0%} full", highlight=False)
    for field, (old, new) in local_run.facts["model_taken"].items():
        console.print(f"model.config.{field}: {old} -> {new}, as the model has it", markup=False, highlight=False)


def _export(console: Console, folder: RunFolder, out: Path | None) -> None:
    from superpod.cli.progress import waiting
    from superpod.launchers import finetune as tuning

    target = out or folder.path / "hf"
    try:
        with waiting(console, "exporting the best checkpoint"):
            exported = tuning.export(folder, target)
    except BaseException:
        console.print(
            f"the training is done, but not exported; to export it: {_export_command(folder, out)}", soft_wrap=True
        )
        raise
    loss = "" if exported["val_loss"] is None else f", validation loss {exported['val_loss']:.4f}"
    merged = f", {exported['merged']} matrices merged" if exported["merged"] else ""
    line = f"{exported['checkpoint']}{loss}{merged}: Hugging Face folder {target}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
