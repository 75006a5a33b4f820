"""Registers the commands of `recipes`. The file of each command parses options, calls the library and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from superpod.cli.cluster import cluster
from superpod.cli.cluster.cancel import cancel
from superpod.cli.cluster.render import render
from superpod.cli.cluster.submit import submit
from superpod.cli.cluster.top_up import top_up
from superpod.cli.data import ckpt, data
from superpod.cli.data.generate import generate
from superpod.cli.data.perplexity import perplexity
from superpod.cli.options.hardware_option import with_hardware
from superpod.cli.planning.calibrate import calibrate
from superpod.cli.planning.check import check
from superpod.cli.planning.cost import cost
from superpod.cli.planning.explain import explain
from superpod.cli.planning.fit import fit
from superpod.cli.planning.memory import memory
from superpod.cli.planning.plan import plan
from superpod.cli.planning.predict import predict
from superpod.cli.planning.scale import scale
from superpod.cli.recipes.diff import diff
from superpod.cli.recipes.export import export
from superpod.cli.recipes.list import list_
from superpod.cli.recipes.prove import prove
from superpod.cli.recipes.show import show
from superpod.cli.recipes.tune import tune
from superpod.cli.running.doctor import doctor
from superpod.cli.running.finetune import finetune
from superpod.cli.running.rehearse import rehearse
from superpod.cli.running.run import run
from superpod.cli.runs import profile
from superpod.cli.runs.history import history
from superpod.cli.runs.logs import logs
from superpod.cli.runs.report import report
from superpod.cli.runs.status import status
from superpod.cli.runs.ui import ui
from superpod.cli.runs.why import why
from superpod.cli.verbs import CommandGroup
from superpod.common import collection

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(is_requested: bool) -> None:
    """Print the versions of this package and of the libraries that training uses, then exit."""
    if not is_requested:
        return
    from importlib.metadata import PackageNotFoundError, version

    for package in ("superpod-recipes", "nemo_toolkit", "megatron-core", "nemo-run", "transformer-engine", "torch"):
        try:
            print(package, version(package))
        except PackageNotFoundError:
            print(package, "not installed")
    raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print package versions and exit.", callback=_print_version, is_eager=True),
    ] = False,
    recipes: Annotated[
        list[Path] | None,
        typer.Option("--recipes", metavar="DIR", help="Folder with further models, layouts and hardware; repeatable."),
    ] = None,
) -> None:
    """Plan, check, rehearse and run training recipes for NeMo 2.0 and Megatron-Core."""
    if recipes:
        collection.add(*recipes)


COMMANDS = {
    "Plan": {
        "plan": plan,
        "check": check,
        "fit": fit,
        "memory": memory,
        "explain": explain,
        "scale": scale,
        "cost": cost,
        "predict": predict,
        "calibrate": calibrate,
    },
    "Recipes": {
        "list": list_,
        "show": show,
        "export": export,
        "diff": diff,
        "tune": tune,
        "prove": prove,
    },
    "Run": {
        "rehearse": rehearse,
        "run": run,
        "finetune": finetune,
        "report": report,
        "ui": with_hardware(ui),
        "why": why,
        "doctor": doctor,
    },
    "Slurm": {
        "submit": with_hardware(submit),
        "render": with_hardware(render),
        "top-up": top_up,
        "status": status,
        "logs": logs,
        "cancel": cancel,
        "history": history,
    },
    "Data and checkpoints": {
        "generate": generate,
        "perplexity": perplexity,
    },
}
"""Commands per panel of `recipes --help`, in the order shown."""

for _panel, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_command)
for _name, _group_app, _panel in (
    ("profile", profile.app, "Run"),
    ("cluster", cluster.app, "Slurm"),
    ("data", data.app, "Data and checkpoints"),
    ("ckpt", ckpt.app, "Data and checkpoints"),
):
    app.add_typer(_group_app, name=_name, rich_help_panel=_panel)
