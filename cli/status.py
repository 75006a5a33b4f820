"""`recipes status`: runs on a cluster, from their folders and from Slurm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.request_options import AsJson, Cluster
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.node.run_folder import RunFolder
    from superpod.slurm.connection import Connection
    from superpod.slurm.watch import RunView

STYLE = {"done": "green", "failed": "red", "stalled": "red", "cancelled": "yellow", "running": "cyan", "saving": "cyan"}


def status(
    run: Annotated[str, typer.Argument(help="A run folder; default: all runs of the cluster.")] = "",
    cluster: Cluster = "",
    runs: Annotated[str, typer.Option("--runs", help="The folder of runs; default: the profile's.")] = "",
    as_json: AsJson = False,
    top_up: Annotated[bool, typer.Option("--top-up/--no-top-up", help="Queue missing attempts.")] = True,
) -> None:
    """Show runs: state, step, loss, tokens/s, MFU, time left, attempt, checkpoint; queue missing attempts."""
    from superpod.slurm import watch

    slurm, folders = _runs_of(run, cluster, runs)
    views = watch.views(folders, slurm)
    if as_json:
        import json

        print(json.dumps([_facts(view) for view in views], indent=1))
    else:
        _print_table(views)
    if top_up:
        for view in views:
            _top_up(view, slurm)


def _runs_of(run: str, cluster: str, runs: str) -> tuple[Connection, list[RunFolder]]:
    """The connection to Slurm, and the folders of the runs to show."""
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import connection, mirror, profiles

    profile = profiles.load(cluster) if cluster else None
    slurm = connection.of(profile) if profile else connection.Connection()
    folder = runs or (profile.folders.runs if profile else "runs")
    if slurm.remote:
        local = mirror.fetch(slurm, str(Path(run).parents[1]) if run else folder)
        return slurm, [RunFolder.open(local / Path(run).parent.name / Path(run).name)] if run else _readable(local)
    if run:
        return slurm, [RunFolder.open(run)]
    if not Path(folder).is_dir():
        raise UserError(f"there is no folder of runs at {folder}", "name a run, --runs DIR, or --cluster PROFILE")
    return slurm, _readable(Path(folder))


def _readable(folder: Path) -> list[RunFolder]:
    """The runs below a folder that can be opened; why another one cannot is said beside the table."""
    from superpod.node import guard
    from superpod.node.run_folder import RunFolder

    runs = []
    for run in guard.runs_of(folder):
        try:
            runs.append(RunFolder.open(run.path))
        except UserError as error:
            print(f"left out: {error}" + (f"\n  next: {error.hint}" if error.hint else ""), file=sys.stderr)
    return runs


def _facts(view: RunView) -> dict[str, object]:
    import dataclasses

    return {**dataclasses.asdict(view), "run": str(view.run.path), "recipe": view.run.recipe}


def _print_table(views: list[RunView]) -> None:
    from rich.table import Table
    from rich.text import Text

    head = ("run", "state", "step", "loss", "tokens/s", "MFU", "left", "attempt", "checkpoint")
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for view in views:
        steps = f"{view.step}/{view.max_steps}" if view.max_steps else str(view.step)
        saved = f"step {view.checkpoint_step}, {tables.ago(view.checkpoint_age_s)} ago" if view.checkpoint_step else "-"
        table.add_row(
            f"{view.run.recipe}/{view.run.path.name}",
            Text(view.state, style=STYLE.get(view.state, "")),
            steps,
            "-" if view.loss is None else f"{view.loss:.4f}",
            "-" if view.tokens_per_s is None else f"{view.tokens_per_s:,.0f}",
            "-" if view.mfu is None else f"{view.mfu:.1%}",
            tables.ago(view.eta_s),
            view.attempt or "-",
            saved,
        )
    tables.show(table)
    for view in views:
        for message in (view.message, view.alarm):
            if message:
                print(f"{view.run.path.name}: {message}")
    if not views:
        print("no runs")


def _top_up(view: RunView, slurm: Connection) -> None:
    """Queue the attempts that a run lacks; its cluster's profile says how many it should have."""
    from superpod.node.files import read_json
    from superpod.node.first_step import excluded
    from superpod.node.guard import CHAIN
    from superpod.slurm import submit, watch

    chain = read_json(view.run.path / CHAIN)
    if chain is None or slurm.remote:
        return  # without a chain, its user started it here or by a plain sbatch; a remote run's folder is a mirror
    lacks = watch.missing_attempts(view, int(view.run.facts.get("attempts", 1)))
    if lacks and view.jobs is not None and watch.queue(slurm) is not None:
        jobs = submit.queue(slurm, str(view.run.path), lacks, excluded(view.run))
        submit.note(view.run, jobs)
        print(f"{view.run.path.name}: queued {len(jobs)} more: {', '.join(jobs)}")
