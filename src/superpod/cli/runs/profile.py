"""`recipes profile`: break down the time of a profiled step and compare it with the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import AsJson
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.cli.verbs import CommandGroup
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.profiles.profile_recording import Recording
    from superpod.profiles.profile_summary import Planned

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Analyze profiles of training steps from torch.profiler or Nsight Systems.",
)


@app.callback()
def _group() -> None:
    # A callback makes Typer keep `show` as a subcommand although it is the only one.
    pass


@app.command("show")
@with_size
def show(
    profile: Annotated[
        str, typer.Argument(help="torch.profiler trace (.json, .json.gz), Nsight Systems export (.sqlite), or a run.")
    ],
    name: Annotated[str | None, typer.Argument(help="Recipe to compare with. Default for a run: its own plan.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run to compare with, if the profile is a file.")] = None,
    *,
    size: SizeOptions,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, help="Rank to show, if the profile is a run. Default: the lowest profiled rank."),
    ] = None,
    gpu: Annotated[int | None, typer.Option("--gpu", min=0, help="GPU to analyze if the file has several.")] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="Number of steps in the file, if it contains no step markers.")
    ] = 0,
    top: Annotated[int, typer.Option("--top", min=0, max=1000, help="Number of kernels to list.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show how the time of a profiled step was spent, compare it with typical values and the plan, suggest changes."""
    from superpod.profiles import profile_summary

    if name and run:
        raise UserError(f"{name} and --run {run}: a profile is compared with one plan only", "leave one of them out")
    if not name:
        for option, value in size.given_options().items():
            raise UserError(
                f"{option} {value} needs a recipe", "add its name after the profile: recipes profile show FILE NAME"
            )
    path, recording, planned = _read_profile(profile, rank, gpu, steps)
    planned = _requested_plan(name, run, size) or planned
    summary = profile_summary.summarize(path, recording, planned, top)
    if as_json:
        print(json.dumps(profile_summary.as_json(summary), indent=1))
        return
    from superpod.cli.runs import profile_view

    profile_view.show(summary)


def _read_profile(text: str, rank: int | None, gpu: int | None, steps: int) -> tuple[Path, Recording, Planned | None]:
    """Return the file, the parsed recording and, if `text` is a run, its plan."""
    from superpod.profiles import profile_files, profile_summary
    from superpod.reports.runs import run_list
    from superpod.requests.profile_request import ProfileRequest
    from superpod.runtime.runs.run_folder import RunFolder

    path = Path(text)
    if text != "last" and not path.is_dir():
        if rank is not None:
            raise UserError(f"--rank {rank}: {text} is the file of a single rank", "pass the run, or leave out --rank")
        return path, profile_files.read(path, gpu=gpu, steps=steps), None
    folder = RunFolder.open(run_list.resolve_run(text))
    path = profile_files.find_profile(folder, rank)
    profile_text = str(folder.facts.get("profile", ""))
    if profile_text and not steps:
        request = ProfileRequest.parse(profile_text)
        steps = request.last - request.first + 1
    return path, profile_files.read(path, gpu=gpu, steps=steps), profile_summary.read_run_plan(folder)


def _requested_plan(name: str | None, run: str | None, size: SizeOptions) -> Planned | None:
    """Return the plan of the recipe or run to compare with; None if neither is given."""
    from superpod.profiles import profile_summary
    from superpod.reports.runs import run_list
    from superpod.runtime.runs.run_folder import RunFolder

    if run is not None:
        folder = RunFolder.open(run_list.resolve_run(run))
        planned = profile_summary.read_run_plan(folder)
        if planned is None:
            raise UserError(f"{folder.path / 'plan.json'} contains no step time", "pass a recipe instead of --run")
        return planned
    if name is None:
        return None
    from superpod.cli import spellings
    from superpod.planner import legality, predict

    request = size.request(spellings.normalize_name(name), (), None)
    job = request.job()
    legality.require(job)
    source = f"{request.recipe}, {job.gpus} x {job.node.gpu.name}, {job.layout.short()}"
    return profile_summary.Planned(source, job.node.gpu.name, predict.one(job).terms_s)
