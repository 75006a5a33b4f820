"""The verbs of `recipes`. A verb parses, calls and prints, in the file of its name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from superpod import collection
from superpod.cli import ckpt, cluster, data, profile
from superpod.cli.calibrate import calibrate
from superpod.cli.cancel import cancel
from superpod.cli.check import check
from superpod.cli.cost import cost
from superpod.cli.diff import diff
from superpod.cli.doctor import doctor
from superpod.cli.explain import explain
from superpod.cli.export import export
from superpod.cli.finetune import finetune
from superpod.cli.fit import fit
from superpod.cli.generate import generate
from superpod.cli.hardware_option import with_hardware
from superpod.cli.history import history
from superpod.cli.list import list_
from superpod.cli.logs import logs
from superpod.cli.memory import memory
from superpod.cli.perplexity import perplexity
from superpod.cli.plan import plan
from superpod.cli.predict import predict
from superpod.cli.prove import prove
from superpod.cli.rehearse import rehearse
from superpod.cli.render import render
from superpod.cli.report import report
from superpod.cli.run import run
from superpod.cli.scale import scale
from superpod.cli.show import show
from superpod.cli.status import status
from superpod.cli.submit import submit
from superpod.cli.top_up import top_up
from superpod.cli.tune import tune
from superpod.cli.ui import ui
from superpod.cli.verbs import Verbs
from superpod.cli.why import why

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    """Ours and those of the libraries that a run takes, as far as they are installed."""
    if not wanted:
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
        bool, typer.Option("--version", help="Print versions and exit.", callback=_print_version, is_eager=True)
    ] = False,
    recipes: Annotated[
        list[Path] | None,
        typer.Option("--recipes", metavar="DIR", help="A folder of your own models, layouts and hardware; repeatable."),
    ] = None,
) -> None:
    """NeMo 2.0 / Megatron-Core training recipes: read, rehearse and run them."""
    if recipes:
        collection.add(*recipes)


VERBS = {
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
"""The groups of `recipes --help`, in its order."""

for _group, _verbs in VERBS.items():
    for _name, _verb in _verbs.items():
        app.command(_name, rich_help_panel=_group)(_verb)
app.add_typer(profile.app, name="profile", help="What a recorded step spent its time on.", rich_help_panel="Run")
app.add_typer(cluster.app, name="cluster", help="A cluster's profile and its health.", rich_help_panel="Slurm")
app.add_typer(
    data.app,
    name="data",
    help="Make training data: tokenizer, .bin and .idx files, blends.",
    rich_help_panel="Data and checkpoints",
)
app.add_typer(
    ckpt.app, name="ckpt", help="Checkpoints: list, verify, prune, convert.", rich_help_panel="Data and checkpoints"
)
