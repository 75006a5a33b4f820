"""Arguments and options that several verbs share, and the request that they make."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import spellings
from superpod.cli.options.size_options import SizeOptions, say
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.requests.request import Request
    from superpod.runtime.runs.run_folder import RunFolder

Name = Annotated[str, typer.Argument(help="A recipe's name, from `recipes list`.", callback=spellings.model_or_recipe)]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes, such as trainer.max_steps=10.")]
Nodes = Annotated[
    int | None, typer.Option("--nodes", help="Size in nodes; default: the smallest. Undeclared ones are planned.")
]
Data = Annotated[Path | None, typer.Option(help="Data folder, made by `recipes data`; default: mock data.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of the run folders.")]
Build = Annotated[
    bool,
    typer.Option(
        "--build/--no-build", help="Build the models of three ranks where the recipe is changed (20 s, once)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def newest_run(text: str | None) -> str | None:
    """The run folder that an argument means, as `newest_in` of ./runs."""
    return newest_in("runs", text) if text else text


def newest_in(runs: str, text: str) -> str:
    """The run folder that an argument means (`run_list.newest`), `last` being the newest in `runs`.

    Says so where that is another word. A verb with --runs calls it itself: a callback knows no other option.
    """
    from superpod.reports.runs import run_list

    if (run := run_list.newest(text, runs)) == text:
        return text
    print(f"{text} is {run}", file=sys.stderr)
    return run


def newest_runs(texts: list[str] | None) -> list[str] | None:
    """As `newest_run`, of each."""
    return [str(newest_run(text)) for text in texts] if texts else texts


def newest_folder(path: Path) -> Path:
    """As `newest_run`, of a path that may also be another folder."""
    return Path(newest_run(str(path)) or path)


RUN = "A run folder; of a recipe's folder its newest run; or `last`."
Run = Annotated[str, typer.Argument(help=RUN, callback=newest_run)]
Cluster = Annotated[str, typer.Option("--cluster", help="Profile of the cluster that has the run.")]


def request_of(
    name: str, overrides: Sequence[str] | None, data: Path | None, size: SizeOptions, *, to_run: bool = True
) -> Request:
    """The request that a command line makes, checked as far as possible without NeMo; says what to know.

    Args:
        name: of a recipe.
        overrides: changes of it.
        data: a data folder.
        size: the options of its size.
        to_run: refuse a size or layout that cannot run, and decide what is left to the planner; a recipe that is only
            shown may be illegal.

    Raises:
        UserError: as `Request.check`, and where the size that was asked for is illegal in its layout.
    """
    from superpod.nemo2 import options

    request = size.request(name, overrides, data)
    request.check()
    say(request.notes())
    if to_run:  # else it keeps what decided it, which `show --why` names
        request.refuse_illegal()
        request = request.decided()
    for warning in (*options.warnings(request.overrides), *_of_weights(request)):
        print(f"warning: {warning}", file=sys.stderr)
    return request


def _of_weights(request: Request) -> list[str]:
    """That a fine-tuning recipe does not find its weights, unless the request names others."""
    from superpod.collection import registry
    from superpod.collection.facts import missing_weights

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
    from superpod.requests import run_environment
    from superpod.runtime.runs import owner
    from superpod.runtime.runs.run_folder import RunFolder

    if not resume:
        raise UserError("--resume names no run", "give a run folder, or `last`")
    folder = RunFolder.latest(runs, name) if resume == "last" else RunFolder.open(resume)
    if folder is None:
        raise UserError(f"no run of {name} in {runs}", "start one without --resume, or name its folder with --runs")
    if folder.recipe != name:
        raise UserError(f"{folder.path} is a run of {folder.recipe}, not of {name}")
    owner.refuse_others(folder.path, "continue it")
    owner.refuse_unsafe(folder.path)
    run_environment.restore_variables(folder)
    return folder
