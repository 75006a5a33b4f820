"""`recipes run` and `recipes report`: a recipe on this machine, and what a run came to."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from superpod.launchers.local import AttemptEnd, Job, Prepared
    from superpod.node.run_folder import Attempt, RunFolder

Runs = Annotated[Path, typer.Option("--runs", help="Where run folders are kept.")]


class NotDone(Exception):
    """The run is told and its folder says how it ended; what is left is the exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def run(
    name: Annotated[str, typer.Argument(help="A recipe's name, from `recipes list`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as trainer.max_steps=10.")] = None,
    data: Annotated[Path | None, typer.Option(help="A folder made by `recipes data`; default: mock data.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run folder, or with the `last` one.")] = None,
    num_nodes: Annotated[int | None, typer.Option("--nodes", help="Size; default: its smallest.")] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Train a recipe on this machine: on its GPUs, or, where it has none, as a rehearsal on CPUs."""
    import shutil

    from rich.console import Console

    from superpod.cli.progress import waiting
    from superpod.launchers import local, preflight
    from superpod.lifecycle.quiet import quietly
    from superpod.node import processes

    folder = _earlier(runs, name, resume, overrides or []) if resume is not None else None
    if folder and num_nodes:
        raise UserError(f"--nodes {num_nodes}: a run keeps its size when it goes on", "start a new run at that size")
    job = local.Job.of(folder, overrides or []) if folder else local.Job(name, overrides or [], None, num_nodes)
    if data:
        job.data = data.absolute()
    if folder:
        with folder.lock():
            processes.refuse_beside_others(folder)
    local.check(job)
    preflight.writable(folder.path if folder else runs)
    preflight.disk(folder.path if folder else runs, folder.facts.get("checkpoint_bytes", 0) if folder else 0)
    width = shutil.get_terminal_size().columns
    with quietly() as terminal:
        console = Console(file=terminal, width=width)
        with waiting(console, "importing NeMo and building the recipe (10 to 20 s)"), _leaving_at_once(console):
            prepared = local.prepare(job)
        ended, folder = _run(console, job, prepared, folder, runs)
    _report(folder)
    if ended.state != "done":
        if any(folder.checkpoints.iterdir()):
            print(f"go on with: recipes run {name} --resume {shlex.quote(str(folder.path))}")
        raise NotDone(ended.exit_code)


def earlier(runs: Path, name: str, resume: str) -> RunFolder:
    """The run of a recipe that `--resume` names: its folder, or `last`. Raises UserError: there is none."""
    from superpod.node.run_folder import RunFolder

    if not resume:
        raise UserError("--resume names no run", "give a run folder, or `last`")
    folder = RunFolder.latest(runs, name) if resume == "last" else RunFolder.open(resume)
    if folder is None:
        raise UserError(f"no run of {name} in {runs}", "start one without --resume, or name its folder with --runs")
    if folder.recipe != name:
        raise UserError(f"{folder.path} is a run of {folder.recipe}, not of {name}")
    return folder


def _earlier(runs: Path, name: str, resume: str, overrides: list[str]) -> RunFolder:
    folder = earlier(runs, name, resume)
    if "finetune" in folder.facts:
        raise UserError(
            f"{folder.path} is a fine-tuning", f"go on with: recipes finetune {name} --resume {folder.path}"
        )
    if folder.done and not overrides:
        raise UserError(f"{folder.path} is done", "give it more steps, such as trainer.max_steps=100")
    return folder


def _run(
    console: Console, job: Job, prepared: Prepared, folder: RunFolder | None, runs: Path
) -> tuple[AttemptEnd, RunFolder]:
    import os

    from superpod.cli.progress import Steps
    from superpod.launchers import local, preflight
    from superpod.node import processes
    from superpod.node.run_folder import RunFolder
    from superpod.recipes import flatten

    facts = job.facts() | prepared.facts | {"checkpoint_bytes": prepared.checkpoint_bytes}
    lines = [str(line) for line in flatten.flatten(prepared.partial)]
    folder = folder or RunFolder.create(runs, job.recipe, facts=facts, recipe_lines=lines)
    with folder.lock():
        processes.refuse_beside_others(folder)
        preflight.disk(folder.path, prepared.checkpoint_bytes)
        marker = folder.go_on(prepared.max_steps)
        folder.write_plan(prepared.plan)
        attempt = folder.new_attempt()
        attempt.write_env(os.environ)
        _announce(console, prepared, folder, attempt)
        ended = local.AttemptEnd("failed", 1, "the launcher failed")
        try:
            with Steps(console, folder, prepared.max_steps) as steps:
                ended = local.launch(prepared, folder, attempt, steps.tick)
        finally:
            with _told(console):
                if steps.last > steps.first:
                    folder.keep(facts, lines)
                elif marker:
                    folder.put_back(marker)
            with _told(console):
                attempt.finish(ended.state, exit_code=ended.exit_code, message=ended.message, last_step=steps.last)
    style = {"done": "green", "cancelled": "yellow"}.get(ended.state, "red")
    console.print(f"[{style}]{ended.state}[/] at step {steps.last} of {prepared.max_steps}")
    if ended.message:
        console.print(ended.message, markup=False, highlight=False, soft_wrap=True)
    return ended, folder


@contextmanager
def _leaving_at_once(console: Console, tidy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ctrl-C ends the command here, once `tidy` is done: bare excepts in what NeMo imports swallow it otherwise."""
    import signal

    from superpod.cli import leave_interrupted

    def leave(*_: object) -> None:
        tidy()
        console.show_cursor(True)
        leave_interrupted(console.file)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _told(console: Console) -> Iterator[None]:
    """How a run ended stands, though its folder cannot be written any more: a full disk is only said."""
    try:
        yield
    except UserError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)


def _announce(console: Console, prepared: Prepared, folder: RunFolder, attempt: Attempt) -> None:
    if prepared.rehearsed:
        changes = "".join(f"{c.path or 'recipe'}: {c.old} -> {c.new}  ({c.reason})\n" for c in prepared.rehearsed)
        (attempt.path / "rehearsal.txt").write_text(changes, encoding="utf-8")
        console.print(
            f"no GPU here: rehearsing on {prepared.ranks} CPU ranks, the recipe's own NeMo and Megatron-Core on gloo; "
            f"{len(prepared.rehearsed)} GPU settings changed, listed in attempts/{attempt.name}/rehearsal.txt"
        )
    console.print(f"run folder {folder.path}, attempt {attempt.name}", markup=False, highlight=False, soft_wrap=True)


def report(
    run: Annotated[str, typer.Argument(help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Sum up a run: losses, throughput, memory, how it ended; draws loss.png in its folder."""
    from superpod.node.run_folder import RunFolder

    folder = RunFolder.open(run)
    if as_json:
        import dataclasses
        import json

        from superpod.lifecycle.report import summary

        print(json.dumps(dataclasses.asdict(summary(folder)), indent=1, default=str))
    else:
        _report(folder)


def _report(folder: RunFolder) -> None:
    from rich.console import Console

    from superpod.lifecycle.report import loss_curve, render, summary

    console = Console()
    console.print(render(summary(folder)))
    if folder.metrics():
        try:
            curve = loss_curve(folder, folder.path / "loss.png")
            console.print(f"loss curve {curve}", markup=False, highlight=False, soft_wrap=True)
        except (OSError, ModuleNotFoundError) as error:
            console.print(f"no loss curve: {error}", markup=False, highlight=False)
