"""Arguments and options that several commands share, and the request that they describe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import spellings
from superpod.cli.options.size_options import SizeOptions, print_notes

if TYPE_CHECKING:
    from superpod.requests.request import Request

Name = Annotated[str, typer.Argument(help="Recipe name, from `recipes list`.", callback=spellings.normalize_name)]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, such as trainer.max_steps=10.")]
Data = Annotated[Path | None, typer.Option(help="Data folder written by `recipes data`. Default: mock data.")]
Resume = Annotated[str | None, typer.Option(help="Run folder to resume, or `last`.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that contains the run folders.")]
Build = Annotated[
    bool,
    typer.Option("--build/--no-build", help="First build the models of three ranks if the recipe is changed (20 s)."),
]
TargetCluster = Annotated[
    str,
    typer.Option("--cluster", help="Cluster profile: a built-in one such as dgx_h100, or a TOML file."),
]
AttemptTime = Annotated[
    str,
    typer.Option("--time", help="Time limit per attempt in Slurm format, such as 04:00:00. Default: from the profile."),
]
SharedRuns = Annotated[str, typer.Option("--runs", help="Folder for run folders. Default: from the profile.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def resolve_run(text: str | None) -> str | None:
    """Return the path of the run folder in an argument; `last` is the newest run in ./runs. None and "" are kept."""
    return resolve_run_in("runs", text) if text else text


def resolve_run_in(runs: str, text: str) -> str:
    """Return the path of the run folder in an argument; `last` is the newest run in `runs` (`run_list.resolve_run`).

    The path is printed on stderr if it differs from the argument. Commands with --runs call this function themselves,
    because the callback of an argument cannot read other options.
    """
    from superpod.reports.runs import run_list

    run = run_list.resolve_run(text, runs)
    if run != text:
        print(f"{text} is {run}", file=sys.stderr)
    return run


def resolve_runs(texts: list[str] | None) -> list[str] | None:
    """Return the run folder of each argument; see `resolve_run`."""
    return [str(resolve_run(text)) for text in texts] if texts else texts


def resolve_folder(path: Path) -> Path:
    """Return the run folder of an argument (see `resolve_run`), or another path unchanged."""
    return Path(resolve_run(str(path)) or path)


RUN = "Run folder, folder of a recipe (for its newest run), or `last`."
Run = Annotated[str, typer.Argument(help=RUN, callback=resolve_run)]
Cluster = Annotated[str, typer.Option("--cluster", help="Cluster profile of the run. Default: this machine.")]


def make_request(
    name: str, overrides: Sequence[str] | None, data: Path | None, size: SizeOptions, *, to_run: bool = True
) -> Request:
    """Return the request for a command line after the checks that need no NeMo; print its notes and warnings.

    Args:
        name: name of the recipe.
        overrides: changes to the recipe.
        data: data folder; None = mock data.
        size: size options.
        to_run: require a legal layout, and let the planner choose the sizes that the command line does not set. False
            for a recipe that is only printed.

    Raises:
        UserError: `Request.check` fails, or the layout is illegal at the requested size.
    """
    from superpod.nemo2 import options

    request = size.request(name, overrides, data)
    request.check()
    print_notes(request.notes())
    if to_run:  # otherwise the request keeps the origin of each value for `show --why`
        request.require_legal_layout()
        request = request.with_resolved_size()
    for warning in (*options.warnings(request.overrides), *_warn_of_missing_weights(request)):
        print(f"warning: {warning}", file=sys.stderr)
    return request


def _warn_of_missing_weights(request: Request) -> list[str]:
    """Return a warning if the pretrained weights of a fine-tuning recipe are missing and no override replaces them."""
    from superpod.collection import registry
    from superpod.collection.facts import missing_weights

    name = request.recipe
    if name not in registry.recipes() or any(text.startswith("resume.restore_config") for text in request.overrides):
        return []
    problem, instead = missing_weights.explain(registry.find(name))
    return [f"{problem}\n  next: {instead}"] if problem else []
