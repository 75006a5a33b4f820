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
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        help="Number of nodes; if the recipe has no layout for it, one is planned. Default: smallest declared.",
    ),
]
Data = Annotated[Path | None, typer.Option(help="Data folder written by `recipes data`. Default: mock data.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that contains the run folders.")]
Build = Annotated[
    bool,
    typer.Option(
        "--build/--no-build", help="If the recipe is changed, first build the models of three ranks (20 s, once)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def resolve_run(text: str | None) -> str | None:
    """Return the run folder that an argument names; `last` is the newest run in ./runs. See `resolve_run_in`."""
    return resolve_run_in("runs", text) if text else text


def resolve_run_in(runs: str, text: str) -> str:
    """Return the run folder that an argument names (`run_list.resolve_run`); `last` is the newest run in `runs`.

    Prints the folder if it differs from the argument. Commands with --runs call this function themselves, because the
    callback of an argument does not see the other options.
    """
    from superpod.reports.runs import run_list

    run = run_list.resolve_run(text, runs)
    if run != text:
        print(f"{text} is {run}", file=sys.stderr)
    return run


def resolve_runs(texts: list[str] | None) -> list[str] | None:
    """Apply `resolve_run` to each argument."""
    return [str(resolve_run(text)) for text in texts] if texts else texts


def resolve_folder(path: Path) -> Path:
    """Apply `resolve_run` to a path that need not be a run folder."""
    return Path(resolve_run(str(path)) or path)


RUN = "Run folder, a recipe's folder (for its newest run), or `last`."
Run = Annotated[str, typer.Argument(help=RUN, callback=resolve_run)]
Cluster = Annotated[str, typer.Option("--cluster", help="Profile of the cluster where the run is.")]


def make_request(
    name: str, overrides: Sequence[str] | None, data: Path | None, size: SizeOptions, *, to_run: bool = True
) -> Request:
    """Return the request for a command line, checked as far as possible without NeMo; print its notes and warnings.

    Args:
        name: name of the recipe.
        overrides: changes to the recipe.
        data: data folder.
        size: size options.
        to_run: refuse a size or layout that cannot run, and let the planner choose what the command line does not set.
            False for a recipe that is only shown, which may be illegal.

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
    for warning in (*options.warnings(request.overrides), *_missing_weights(request)):
        print(f"warning: {warning}", file=sys.stderr)
    return request


def _missing_weights(request: Request) -> list[str]:
    """Return a warning if the pretrained weights of a fine-tuning recipe are missing and not replaced by others."""
    from superpod.collection import registry
    from superpod.collection.facts import missing_weights

    name = request.recipe
    if name not in registry.recipes() or any(text.startswith("resume.restore_config") for text in request.overrides):
        return []
    problem, instead = missing_weights.explain(registry.find(name))
    return [f"{problem}\n  next: {instead}"] if problem else []
