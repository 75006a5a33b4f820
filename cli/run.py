"""`recipes run`: a recipe on this machine."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.profile_option import ProfileOptions, with_profile
from superpod.cli.request_options import Build, Data, Name, Overrides, Runs, earlier_run, request_of
from superpod.cli.size_options import SizeOptions, say, with_size
from superpod.cli.validated import require_built
from superpod.cli.wandb_option import Wandb, with_wandb
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.lifecycle.request import Request
    from superpod.node.run_folder import RunFolder


@with_profile
@with_size
def run(
    name: Name,
    overrides: Overrides = None,
    data: Data = None,
    resume: Annotated[str | None, typer.Option(help="Continue this run folder, or the `last` one.")] = None,
    *,
    size: SizeOptions,
    start: Annotated[
        Path | None, typer.Option("--from", help="NeMo checkpoint, or run, with the weights to start from.")
    ] = None,
    wandb: Wandb = "",
    profiling: ProfileOptions,
    runs: Runs = Path("runs"),
    build: Build = True,
) -> None:
    """Train a recipe on this machine: on its GPUs, or as a rehearsal on CPUs if it has none."""
    from superpod.launchers import start as starts
    from superpod.recipes import installed

    overrides, profile = with_wandb(overrides, wandb), profiling.require_here()
    if start:
        overrides = [*overrides, starts.override(start, name)]
    folder = None
    request = request_of(name, overrides, data, size) if resume is None else None
    installed.require("training")
    from superpod.launchers import preflight
    from superpod.node import resume as resume_rule

    if request is None:
        assert resume is not None
        folder, request = _resumed(runs, name, resume, overrides or [], data, size)
        with folder.lock():
            resume_rule.decide_by_sizes(folder)
        request.check()
    if profile:
        request = replace(request, profile=profile)
    say(request.mock_data_notes)
    target = folder.path if folder else runs
    preflight.writable(target)
    preflight.disk(target, folder.facts.get("checkpoint_bytes", 0) if folder else 0)
    _train(request, folder, runs, build=build)


def _resumed(
    runs: Path, name: str, resume: str, overrides: list[str], data: Path | None, size: SizeOptions
) -> tuple[RunFolder, Request]:
    """The run to continue, and its request with the changes of this command line."""
    from superpod.lifecycle import resume_changes
    from superpod.lifecycle.request import Request
    from superpod.node import pending_facts, processes

    folder = earlier_run(runs, name, resume)
    with folder.lock():
        processes.refuse_beside_others(folder)
        pending_facts.take_over(folder)  # of a launcher that was killed
    if "finetune" in folder.facts:
        raise UserError(
            f"{folder.path} is a fine-tuning run", f"to continue it: recipes finetune {name} --resume {folder.path}"
        )
    if folder.done and not overrides:
        raise UserError(f"{folder.path} is done", "give it more steps, such as trainer.max_steps=100")
    for option, value in size.given().items():
        raise UserError(f"{option} {value}: a run keeps its size when it continues", "start a new run at that size")
    for change in resume_changes.changes(folder, overrides):
        print(f"change {change}", file=sys.stderr)
    return folder, Request.of_run(folder, overrides, data.absolute() if data else None)


def _train(request: Request, folder: RunFolder | None, runs: Path, *, build: bool) -> None:
    from superpod.cli import tables, training
    from superpod.cli.progress import leaving_at_once, waiting
    from superpod.cli.report import print_report
    from superpod.launchers import local
    from superpod.lifecycle.quiet import quietly

    with quietly() as terminal:
        console = tables.console(terminal, highlight=True)
        with waiting(console, "importing NeMo and building the recipe (10 to 20 s)"), leaving_at_once(console):
            local_run = local.prepare(request)
        require_built([local_run.resolved], build=build, console=console)
        end, folder = training.train(console, local_run, folder, runs)
    with contextlib.suppress(BrokenPipeError):  # the exit code is the training's
        print_report(folder)
        _name_profile(folder)
        if end.state != "done" and any(folder.checkpoints.iterdir()):
            print(f"to continue: recipes run {request.recipe} --resume {shlex.quote(str(folder.path))}")
    if end.state != "done":
        raise training.NotDone(end.exit_code)


def _name_profile(folder: RunFolder) -> None:
    """How to look at what was profiled of a run, or why there is nothing to look at."""
    from superpod.lifecycle import profile_files

    if not folder.facts.get("profile"):
        return
    try:
        profile_files.of_run(folder)
        print(f"profile: recipes profile show {shlex.quote(str(folder.path))}")
    except UserError as none:
        print(f"no profile: {none}")
