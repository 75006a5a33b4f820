"""`recipes finetune`: a Hugging Face folder and a file of samples in, a Hugging Face folder out."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import run as running
from superpod.cli.run import NotDone, Runs
from superpod.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from superpod.launchers.finetune import Task
    from superpod.launchers.local import Job, Prepared
    from superpod.node.run_folder import RunFolder


def finetune(
    name: Annotated[str, typer.Argument(help="A recipe of sft, lora or dora, from `recipes list`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as optim.config.lr=1e-4.")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder, or ORG/NAME in this machine's cache.")] = None,
    data: Annotated[Path | None, typer.Option(help=".jsonl of prompts and completions, chats, or text.")] = None,
    validation_data: Annotated[
        Path | None, typer.Option(help="Its own file.", show_default="a share of --data")
    ] = None,
    validation: Annotated[float, typer.Option(help="Share of the samples held out.")] = 0.05,
    long: Annotated[str, typer.Option(help="Samples beyond the sequence length: refuse, cut or drop.")] = "refuse",
    pack: Annotated[bool, typer.Option("--pack/--no-pack", help="Several samples in a sequence.")] = True,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of training.", show_default="the recipe's")] = None,
    seed: Annotated[int, typer.Option(help="Decides which samples are held out, and their order.")] = 1234,
    out: Annotated[Path | None, typer.Option(help="Folder to write.", show_default="hf in the run folder")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run folder, or with the `last` one.")] = None,
    num_nodes: Annotated[int | None, typer.Option("--nodes", help="Size; default: its smallest.")] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Fine-tune a model on this machine: import, training, best checkpoint, export. Without a GPU, a rehearsal."""
    from superpod.launchers import finetune as tuning
    from superpod.launchers import local, preflight
    from superpod.recipes.weights import huggingface

    if out:
        huggingface.must_be_new(out, "--out ")
    folder = _earlier(runs, name, resume) if resume is not None else None
    files = [str(each.absolute()) if each else "" for each in (data, validation_data)]
    task = tuning.Task(model or "", files[0], files[1], validation, seed, long, pack, steps)
    if folder and task != tuning.Task("", ""):
        raise UserError("--resume goes on with what the run was given", "leave out what says something of its data")
    if folder:
        task, job = tuning.Task.of(folder), local.Job.of(folder, overrides or [])
    else:
        if not model or not data:
            raise UserError("finetune needs --model and --data", "or --resume RUN")
        local.check(local.Job(name))
        task = replace(task, model=str(tuning.model_folder(model)))
        job = local.Job(name, overrides or [], None, num_nodes)
    local.check(job)
    tuning.check(name, task)
    preflight.writable(folder.path if folder else runs)
    _run(name, task, job, folder, out, runs)


def _earlier(runs: Path, name: str, resume: str) -> RunFolder:
    found = running.earlier(runs, name, resume)
    if found.done:
        raise UserError(
            f"{found.path} is done: its learning rate has come to its end",
            f"start a new one, with --steps N; or export it: {_export_again(found, None)}",
        )
    with found.lock():
        return found  # what goes on elsewhere is said before NeMo is imported


def _run(name: str, task: Task, job: Job, folder: RunFolder | None, out: Path | None, runs: Path) -> None:
    from rich.console import Console

    from superpod.lifecycle.quiet import quietly

    with quietly() as terminal:
        console = Console(file=terminal, width=shutil.get_terminal_size().columns)
        folder, prepared = _prepared(console, task, job, folder, runs)
        ended, folder = running._run(console, job, prepared, folder, runs)
        if ended.state == "done":
            _export(console, folder, out)
    running._report(folder)
    if ended.state != "done":
        if any(folder.checkpoints.iterdir()):
            print(f"go on with: recipes finetune {name} --resume {shlex.quote(str(folder.path))}")
        raise NotDone(ended.exit_code)


def _prepared(
    console: Console, task: Task, job: Job, folder: RunFolder | None, runs: Path
) -> tuple[RunFolder, Prepared]:
    """The run folder and what will run in it; a new folder goes again when preparing fails."""
    from superpod.cli.run import _leaving_at_once
    from superpod.launchers import finetune as tuning
    from superpod.launchers import local
    from superpod.node.run_folder import RunFolder

    def note(words: str) -> None:
        console.print(words, markup=False, highlight=False, soft_wrap=True)

    note("importing NeMo and building the recipe (10 to 20 s)")
    mine = folder or RunFolder.create(
        runs, job.recipe, facts=job.facts() | {tuning.FACT: asdict(task)}, recipe_lines=[]
    )

    def tidy() -> None:
        if folder is None:
            shutil.rmtree(mine.path, ignore_errors=True)

    try:
        with _leaving_at_once(console, tidy):
            prepared = local.prepare(job, tuning.change(task, mine.path, note))
    except BaseException:
        tidy()
        raise
    _tell(console, prepared)
    return mine, prepared


def _export_again(folder: RunFolder, out: Path | None) -> str:
    return shlex.join(["recipes", "ckpt", "convert", str(folder.path), str(out or "OUT")])


def _tell(console: Console, prepared: Prepared) -> None:
    counts = prepared.facts["samples"]
    for each in counts["read"]:
        lost = ", ".join(f"{each[name]} {name}" for name in ("cut", "dropped") if each[name])
        console.print(f"{each['samples']} samples{f' ({lost})' if lost else ''}, {each['learnt']} tokens to learn")
    for part in ("training", "validation"):
        each = counts[part]
        count = f"{each['sequences']} sequence{'s' if each['sequences'] > 1 else ''}"
        console.print(f"{part}: {each['samples']} samples in {count}, {each['filled']:.0%} full", highlight=False)
    for field, (old, new) in prepared.facts["model_taken"].items():
        console.print(f"model.config.{field}: {old} -> {new}, as the model has it", markup=False, highlight=False)


def _export(console: Console, folder: RunFolder, out: Path | None) -> None:
    from superpod.launchers import finetune as tuning

    console.print("exporting the best checkpoint")
    place = out or folder.path / "hf"
    try:
        said = tuning.export(folder, place)
    except BaseException:
        console.print(f"the training is done, and not exported; do it by {_export_again(folder, out)}", soft_wrap=True)
        raise
    loss = "" if said["val_loss"] is None else f", validation loss {said['val_loss']:.4f}"
    merged = f", {said['merged']} matrices merged" if said["merged"] else ""
    words = f"{said['checkpoint']}{loss}{merged}: Hugging Face folder {place}"
    console.print(words, markup=False, highlight=False, soft_wrap=True)
