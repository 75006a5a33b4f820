"""Arguments and options that several verbs share, and the request that they make."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.lifecycle.request import Request
    from superpod.node.run_folder import RunFolder

Name = Annotated[str, typer.Argument(help="A recipe's name, from `recipes list`.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes, such as trainer.max_steps=10.")]
Nodes = Annotated[int | None, typer.Option("--nodes", help="Size in nodes; default: the smallest.")]
Data = Annotated[Path | None, typer.Option(help="Data folder, made by `recipes data`; default: mock data.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of the run folders.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

Run = Annotated[str, typer.Argument(help="A run folder.")]
Cluster = Annotated[str, typer.Option("--cluster", help="Profile of the cluster that has the run.")]


def request_of(name: str, overrides: Sequence[str] | None, data: Path | None, num_nodes: int | None) -> Request:
    """The request that a command line makes, checked as far as possible without NeMo.

    Raises:
        UserError: as `Request.check`.
    """
    from superpod.lifecycle.request import Request
    from superpod.recipes import options

    request = Request(name, tuple(overrides or ()), data.absolute() if data else None, num_nodes)
    request.check()
    for warning in (*options.warnings(request.overrides), *_of_weights(request)):
        print(f"warning: {warning}", file=sys.stderr)
    return request


def _of_weights(request: Request) -> list[str]:
    """That a fine-tuning recipe does not find its weights, unless the request names others."""
    from superpod.recipes import registry
    from superpod.recipes.facts import missing_weights

    name = request.recipe
    if name not in registry.recipes() or any(text.startswith("resume.restore_config") for text in request.overrides):
        return []
    problem, instead = missing_weights.of(registry.find(name))
    return [f"{problem}\n  next: {instead}"] if problem else []


def earlier_run(runs: Path, name: str, resume: str) -> RunFolder:
    """The run of a recipe that `--resume` names: its folder, or `last`.

    Raises:
        UserError: there is no such run, it is of another recipe, or another user's.
    """
    from superpod.node import owner
    from superpod.node.run_folder import RunFolder

    if not resume:
        raise UserError("--resume names no run", "give a run folder, or `last`")
    folder = RunFolder.latest(runs, name) if resume == "last" else RunFolder.open(resume)
    if folder is None:
        raise UserError(f"no run of {name} in {runs}", "start one without --resume, or name its folder with --runs")
    if folder.recipe != name:
        raise UserError(f"{folder.path} is a run of {folder.recipe}, not of {name}")
    owner.refuse_others(folder.path, "continue it")
    return folder
