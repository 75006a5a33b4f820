"""`recipes profile`: show a breakdown of the time of a profiled step, and compare it with the plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import spellings, tables
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
    help="Analyze profiles of training steps, recorded by torch.profiler or Nsight Systems.",
)


@app.callback()
def _group() -> None:
    # A callback makes Typer keep `show` as a subcommand although it is the only one.
    pass


@app.command("show")
@with_size
def show(
    profile: Annotated[
        str, typer.Argument(help="torch.profiler trace (.json), Nsight Systems export (.sqlite), or run.")
    ],
    name: Annotated[str | None, typer.Argument(help="Recipe to compare with. Default: the plan of the run.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run to compare with, if the profile is a file.")] = None,
    *,
    size: SizeOptions,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, help="Rank to show, if the profile is a run. Default: the lowest profiled rank."),
    ] = None,
    gpu: Annotated[int | None, typer.Option("--gpu", min=0, help="GPU to show, if the file has several.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Number of steps in a file without step markers.")] = 0,
    top: Annotated[int, typer.Option("--top", min=0, max=1000, help="Number of kernels to list.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show a breakdown of the time of a profiled step, compare it with typical values and the plan, suggest changes."""
    from superpod.profiles import profile_summary

    if name and run:
        raise UserError(f"a profile is compared with one plan, not {name} and --run {run}", "leave one of them out")
    if not name:
        for option, value in size.given_options().items():
            raise UserError(f"{option} {value} requires a recipe", "add its name: recipes profile show PROFILE NAME")
    path, recording, planned = _read_profile(profile, rank, gpu, steps)
    planned = _requested_plan(name, run, size) or planned
    summary = profile_summary.summarize(path, recording, planned, top)
    if as_json:
        tables.print_json(profile_summary.as_json(summary))
        return
    from superpod.cli.runs import profile_view

    profile_view.show(summary)


def _read_profile(text: str, rank: int | None, gpu: int | None, steps: int) -> tuple[Path, Recording, Planned | None]:
    """Return the path of a profile, its parsed recording and, if `text` is a run or `last`, the plan of the run.

    The other arguments are the options of the same names.
    """
    from superpod.profiles import profile_files, profile_summary
    from superpod.reports.runs import run_list
    from superpod.requests.profile_request import ProfileRequest
    from superpod.runtime.runs.run_folder import RunFolder

    path = Path(text)
    if text != "last" and not path.is_dir():
        if rank is not None:
            raise UserError(
                f"--rank {rank} applies only to a run; {text} is the file of one rank",
                "leave out --rank, or pass a run",
            )
        return path, profile_files.read(path, gpu=gpu, steps=steps), None
    folder = RunFolder.open(run_list.resolve_run(text))
    path = profile_files.find_profile(folder, rank)
    profile_text = str(folder.facts.get("profile", ""))
    if profile_text and not steps:
        request = ProfileRequest.parse(profile_text)
        steps = request.last - request.first + 1
    return path, profile_files.read(path, gpu=gpu, steps=steps), profile_summary.read_run_plan(folder)


def _requested_plan(name: str | None, run: str | None, size: SizeOptions) -> Planned | None:
    """Return the plan of the recipe `name` or of `run`; None if both are None."""
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
    from superpod.planner import legality, predict

    request = size.request(spellings.normalize_name(name), (), None)
    job = request.job()
    legality.require(job)
    source = f"{request.recipe}, {job.gpus} x {job.node.gpu.name}, {job.layout.short()}"
    return profile_summary.Planned(source, job.node.gpu.name, predict.one(job).terms_s)
