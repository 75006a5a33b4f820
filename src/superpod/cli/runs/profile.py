"""`recipes profile`: what a recorded step spent its time on, beside what was planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import RUN, AsJson
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.cli.verbs import Verbs
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.profiles.profile_recording import Recording
    from superpod.profiles.profile_summary import Planned

app = typer.Typer(cls=Verbs, no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Profiles of a few steps: torch.profiler's traces, and Nsight Systems' exports."""


@app.command("show")
@with_size
def show(
    profile: Annotated[str, typer.Argument(help="A trace (.json, .json.gz), an export (.sqlite), or a run.")],
    name: Annotated[str | None, typer.Argument(help="A recipe whose plan stands beside it; of a run its own.")] = None,
    run: Annotated[str | None, typer.Option("--run", help=f"{RUN} Its plan stands beside the profile.")] = None,
    *,
    size: SizeOptions,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Of a run: the rank; default: its lowest.")] = None,
    gpu: Annotated[int | None, typer.Option("--gpu", min=0, help="The GPU, where a file has several.")] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="Steps that the file holds, where nothing marks them.")
    ] = 0,
    top: Annotated[int, typer.Option("--top", min=0, max=1000, help="Kernels that are listed.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a recorded step went, against usual bounds and beside the plan, and what to change."""
    from superpod.profiles import profile_summary

    if name and run:
        raise UserError(f"{name} and --run {run}: one plan stands beside a profile", "leave one of the two out")
    for option, value in size.given().items() if not name else ():
        raise UserError(
            f"{option} {value} without a recipe", "name it after the profile: recipes profile show FILE NAME"
        )
    path, recording, planned = _read(profile, rank, gpu, steps)
    planned = _planned(name, run, size) or planned
    summary = profile_summary.of(path, recording, planned, top)
    if as_json:
        print(json.dumps(profile_summary.as_json(summary), indent=1))
        return
    from superpod.cli.runs import profile_view

    profile_view.show(summary)


def _read(text: str, rank: int | None, gpu: int | None, steps: int) -> tuple[Path, Recording, Planned | None]:
    """The file, what it holds, and the plan of the run that it is of."""
    from superpod.profiles import profile_files, profile_summary
    from superpod.reports.runs import run_list
    from superpod.requests.profile_request import ProfileRequest
    from superpod.runtime.runs.run_folder import RunFolder

    path = Path(text)
    if text != "last" and not path.is_dir():
        if rank is not None:
            raise UserError(f"--rank {rank}: {text} is a file, of one rank", "give the run, or leave --rank out")
        return path, profile_files.read(path, gpu=gpu, steps=steps), None
    folder = RunFolder.open(run_list.newest(text))
    path = profile_files.of_run(folder, rank)
    wanted = str(folder.facts.get("profile", ""))
    if wanted and not steps:
        request = ProfileRequest.parse(wanted)
        steps = request.last - request.first + 1
    return path, profile_files.read(path, gpu=gpu, steps=steps), profile_summary.plan_of_run(folder)


def _planned(name: str | None, run: str | None, size: SizeOptions) -> Planned | None:
    """The plan that the command names; None where it names none."""
    from superpod.profiles import profile_summary
    from superpod.reports.runs import run_list
    from superpod.runtime.runs.run_folder import RunFolder

    if run is not None:
        folder = RunFolder.open(run_list.newest(run))
        planned = profile_summary.plan_of_run(folder)
        if planned is None:
            raise UserError(f"{folder.path / 'plan.json'} has no plan of a step", "name a recipe instead of --run")
        return planned
    if name is None:
        return None
    from superpod.cli import spellings
    from superpod.planner import legality, predict

    request = size.request(spellings.model_or_recipe(name), (), None)
    job = request.job()
    legality.require(job)
    source = f"{request.recipe}, {job.gpus} x {job.node.gpu.name}, {job.layout.short()}"
    return profile_summary.Planned(source, job.node.gpu.name, predict.one(job).terms_s)
