"""`recipes run`: a recipe on this machine."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.request_options import Data, Name, Nodes, Overrides, Runs, earlier_run, request_of
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.lifecycle.request import Request
    from superpod.node.run_folder import RunFolder


def run(
    name: Name,
    overrides: Overrides = None,
    data: Data = None,
    resume: Annotated[str | None, typer.Option(help="Continue this run folder, or the `last` one.")] = None,
    num_nodes: Nodes = None,
    runs: Runs = Path("runs"),
) -> None:
    """Train a recipe on this machine: on its GPUs, or as a rehearsal on CPUs if it has none."""
    from superpod.launchers import preflight
    from superpod.node import processes
    from superpod.node import resume as resume_rule

    folder = None
    if resume is None:
        request = request_of(name, overrides, data, num_nodes)
    else:
        folder, request = _resumed(runs, name, resume, overrides or [], data, num_nodes)
        with folder.lock():
            processes.refuse_beside_others(folder)
            resume_rule.refuse_if_none(folder)
        request.check()
    target = folder.path if folder else runs
    preflight.writable(target)
    preflight.disk(target, folder.facts.get("checkpoint_bytes", 0) if folder else 0)
    _train(request, folder, runs)


def _resumed(
    runs: Path, name: str, resume: str, overrides: list[str], data: Path | None, num_nodes: int | None
) -> tuple[RunFolder, Request]:
    """The run to continue, and its request with the changes of this command line."""
    from superpod.lifecycle.request import Request

    folder = earlier_run(runs, name, resume)
    if "finetune" in folder.facts:
        raise UserError(
            f"{folder.path} is a fine-tuning run", f"to continue it: recipes finetune {name} --resume {folder.path}"
        )
    if folder.done and not overrides:
        raise UserError(f"{folder.path} is done", "give it more steps, such as trainer.max_steps=100")
    if num_nodes:
        raise UserError(f"--nodes {num_nodes}: a run keeps its size when it continues", "start a new run at that size")
    return folder, Request.of_run(folder, overrides, data.absolute() if data else None)


def _train(request: Request, folder: RunFolder | None, runs: Path) -> None:
    from rich.console import Console

    from superpod.cli import training
    from superpod.cli.progress import leaving_at_once, waiting
    from superpod.cli.report import print_report
    from superpod.launchers import local
    from superpod.lifecycle.quiet import quietly

    width = shutil.get_terminal_size().columns
    with quietly() as terminal:
        console = Console(file=terminal, width=width)
        with waiting(console, "importing NeMo and building the recipe (10 to 20 s)"), leaving_at_once(console):
            local_run = local.prepare(request)
        end, folder = training.train(console, local_run, folder, runs)
    print_report(folder)
    if end.state != "done":
        if any(folder.checkpoints.iterdir()):
            print(f"to continue: recipes run {request.recipe} --resume {shlex.quote(str(folder.path))}")
        raise training.NotDone(end.exit_code)
