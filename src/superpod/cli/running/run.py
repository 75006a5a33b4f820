"""`recipes run`: train a recipe on this machine."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.profile_option import ProfileOptions, with_profile
from superpod.cli.options.request_options import Build, Data, Name, Overrides, Runs, earlier_run, make_request
from superpod.cli.options.size_options import SizeOptions, print_notes, with_size
from superpod.cli.options.wandb_option import Wandb, with_wandb
from superpod.cli.running.validated import require_built
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.requests.request import Request
    from superpod.runtime.runs.run_folder import RunFolder


@with_profile
@with_size
def run(
    name: Name,
    overrides: Overrides = None,
    data: Data = None,
    resume: Annotated[str | None, typer.Option(help="Run folder to resume, or `last`.")] = None,
    *,
    size: SizeOptions,
    start: Annotated[
        Path | None, typer.Option("--from", help="NeMo checkpoint or run with the initial weights.")
    ] = None,
    wandb: Wandb = "",
    profiling: ProfileOptions,
    runs: Runs = Path("runs"),
    build: Build = True,
) -> None:
    """Train a recipe on the GPUs of this machine, or rehearse it on CPUs if there are none."""
    from superpod.collection import installed
    from superpod.launch import start_checkpoint

    overrides, profile = with_wandb(overrides, wandb), profiling.check_on_machine()
    if start:
        overrides = [*overrides, start_checkpoint.to_override(start, name)]
    folder = None
    request = make_request(name, overrides, data, size) if resume is None else None
    installed.require("training")
    from superpod.launch import preflight
    from superpod.runtime.checkpoints import resume as resume_rule

    if request is None:
        assert resume is not None
        folder, request = _open_earlier_run(runs, name, resume, overrides or [], data, size)
        with folder.lock():
            resume_rule.decide_by_sizes(folder)
        request.check()
    if profile:
        request = replace(request, profile=profile)
    print_notes(request.mock_data_notes)
    target = folder.path if folder else runs
    preflight.require_writable(target)
    preflight.require_disk_space(target, folder.facts.get("checkpoint_bytes", 0) if folder else 0)
    _train(request, folder, runs, build=build)


def _open_earlier_run(
    runs: Path, name: str, resume: str, overrides: list[str], data: Path | None, size: SizeOptions
) -> tuple[RunFolder, Request]:
    """Return the run to resume and its request with the changes of this command line."""
    from superpod.requests import resume_changes
    from superpod.requests.request import Request
    from superpod.runtime.processes.attempt_processes import refuse_running
    from superpod.runtime.runs import pending_facts

    folder = earlier_run(runs, name, resume)
    with folder.lock():
        refuse_running(folder.path)
        pending_facts.apply(folder)  # left behind by a launcher that was killed
    if "finetune" in folder.facts:
        raise UserError(
            f"{folder.path} is a fine-tuning run", f"to continue it: recipes finetune {name} --resume {folder.path}"
        )
    if folder.done and not overrides:
        raise UserError(f"{folder.path} is done", "increase the number of steps, for example trainer.max_steps=100")
    for option, value in size.given_options().items():
        raise UserError(f"{option} {value} cannot be changed when a run is resumed", "start a new run")
    for change in resume_changes.find_changes(folder, overrides):
        print(f"change {change}", file=sys.stderr)
    return folder, Request.from_run(folder, overrides, data.absolute() if data else None)


def _train(request: Request, folder: RunFolder | None, runs: Path, *, build: bool) -> None:
    from superpod.cli import tables
    from superpod.cli.running import training
    from superpod.cli.running.progress_bar import exit_on_interrupt, spinner
    from superpod.cli.runs.report import print_report
    from superpod.common.quiet import silence_libraries
    from superpod.launch import local

    with silence_libraries() as terminal:
        console = tables.console(terminal, highlight=True)
        with spinner(console, "importing NeMo and building the recipe (10 to 20 s)"), exit_on_interrupt(console):
            local_run = local.prepare(request)
        require_built([local_run.resolved], build=build, console=console)
        end, folder = training.train(console, local_run, folder, runs)
    with contextlib.suppress(BrokenPipeError):  # keep the exit code of the training
        print_report(folder)
        _print_profile_command(folder)
        if end.state != "done" and any(folder.checkpoints.iterdir()):
            print(f"to continue: recipes run {request.recipe} --resume {shlex.quote(str(folder.path))}")
    if end.state != "done":
        raise training.NotDone(end.exit_code)


def _print_profile_command(folder: RunFolder) -> None:
    """Print the command that shows a run's profile, or why there is no profile."""
    from superpod.profiles import profile_files

    if not folder.facts.get("profile"):
        return
    try:
        profile_files.find_profile(folder)
        print(f"profile: recipes profile show {shlex.quote(str(folder.path))}")
    except UserError as none:
        print(f"no profile: {none}")
