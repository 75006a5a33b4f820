"""`recipes run`: train a recipe on this machine."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import RunNotDone
from superpod.cli.options.profile_option import ProfileOptions, with_profile
from superpod.cli.options.request_options import Build, Data, Name, Overrides, Resume, Runs, make_request
from superpod.cli.options.size_options import SizeOptions, print_notes, with_size
from superpod.cli.options.wandb_option import Wandb, with_wandb
from superpod.cli.runs.report import print_report
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.launch.local import AttemptEnd
    from superpod.runtime.runs.run_folder import RunFolder


@with_profile
@with_size
def run(
    name: Name,
    overrides: Overrides = None,
    data: Data = None,
    resume: Resume = None,
    *,
    size: SizeOptions,
    start: Annotated[Path | None, typer.Option("--from", help="Checkpoint or run with initial weights.")] = None,
    wandb: Wandb = "",
    profiling: ProfileOptions,
    runs: Runs = Path("runs"),
    build: Build = True,
) -> None:
    """Train a recipe on the GPUs of this machine, or rehearse it on the CPUs if there are none."""
    from superpod.collection import installed
    from superpod.launch import start_checkpoint

    overrides, profile = with_wandb(overrides, wandb), profiling.check_on_machine()
    if start:
        overrides = [*overrides, start_checkpoint.to_override(start, name)]
    folder = None
    request = make_request(name, overrides, data, size) if resume is None else None
    installed.require("training")
    from superpod.launch import earlier_run, local_attempt, preflight
    from superpod.runtime.checkpoints import resume as resume_rule

    if request is None:
        assert resume is not None
        size_options = size.given_options()
        folder, request = earlier_run.open_pretraining(runs, name, resume, overrides or [], data, size_options)
        with folder.lock():
            resume_rule.decide_by_sizes(folder)
        request.check()
    if profile:
        request = replace(request, profile=profile)
    print_notes(request.mock_data_notes)
    target = folder.path if folder else runs
    preflight.require_writable(target)
    preflight.require_disk_space(target, folder.facts.get("checkpoint_bytes", 0) if folder else 0)
    _finish(*local_attempt.build_and_train(request, folder, runs, build=build))


def _finish(end: AttemptEnd, folder: RunFolder) -> None:
    """Print the report of a run. Raises RunNotDone if it is not done."""
    with contextlib.suppress(BrokenPipeError):  # keep the exit code of the training
        print_report(folder)
        _print_profile_command(folder)
        if end.state != "done" and any(folder.checkpoints.iterdir()):
            print(f"to resume: recipes run {folder.recipe} --resume {shlex.quote(str(folder.path))}")
    if end.state != "done":
        raise RunNotDone(end.exit_code)


def _print_profile_command(folder: RunFolder) -> None:
    """If a run was profiled, print the command that shows its profile, or the reason why there is none."""
    from superpod.profiles import profile_files

    if not folder.facts.get("profile"):
        return
    try:
        profile_files.find_profile(folder)
        print(f"profile: recipes profile show {shlex.quote(str(folder.path))}")
    except UserError as none:
        print(f"no profile: {none}")
