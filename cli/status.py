"""`recipes status`: runs on a cluster, from their folders and from Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.request_options import AsJson, Cluster
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.node.run_folder import RunFolder
    from superpod.slurm.connection import Connection
    from superpod.slurm.watch import Seen

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
    seen = watch.of_folder(folders, slurm)
    if as_json:
        import json

        print(json.dumps([_facts(s) for s in seen], indent=1))
    else:
        _print_table(seen)
    if top_up:
        for s in seen:
            _top_up(s, slurm)


def _runs_of(run: str, cluster: str, runs: str) -> tuple[Connection, list[RunFolder]]:
    """The connection to Slurm, and the folders of the runs to show."""
    from superpod.node import guard
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import connection, mirror, profiles

    profile = profiles.load(cluster) if cluster else None
    slurm = connection.of(profile) if profile else connection.Connection()
    folder = runs or (profile.folders.runs if profile else "runs")
    if slurm.remote:
        local = mirror.fetch(slurm, str(Path(run).parents[1]) if run else folder)
        return slurm, [RunFolder.open(local / Path(run).parent.name / Path(run).name)] if run else guard.runs_of(local)
    if run:
        return slurm, [RunFolder.open(run)]
    if not Path(folder).is_dir():
        raise UserError(f"there is no folder of runs at {folder}", "name a run, --runs DIR, or --cluster PROFILE")
    return slurm, guard.runs_of(Path(folder))


def _facts(seen: Seen) -> dict[str, object]:
    import dataclasses

    return {**dataclasses.asdict(seen), "run": str(seen.run.path), "recipe": seen.run.recipe}


def _print_table(seen: list[Seen]) -> None:
    from rich.table import Table
    from rich.text import Text

    head = ("run", "state", "step", "loss", "tokens/s", "MFU", "left", "attempt", "checkpoint")
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for s in seen:
        steps = f"{s.step}/{s.max_steps}" if s.max_steps else str(s.step)
        saved = f"step {s.checkpoint_step}, {tables.ago(s.checkpoint_age_s)} ago" if s.checkpoint_step else "-"
        table.add_row(
            f"{s.run.recipe}/{s.run.path.name}",
            Text(s.state, style=STYLE.get(s.state, "")),
            steps,
            "-" if s.loss is None else f"{s.loss:.4f}",
            "-" if s.tokens_per_s is None else f"{s.tokens_per_s:,.0f}",
            "-" if s.mfu is None else f"{s.mfu:.1%}",
            tables.ago(s.eta_s),
            s.attempt or "-",
            saved,
        )
    tables.show(table)
    for s in seen:
        for message in (s.message, s.alarm):
            if message:
                print(f"{s.run.path.name}: {message}")
    if not seen:
        print("no runs")


def _top_up(seen: Seen, slurm: Connection) -> None:
    """Queue the attempts that a run lacks; its cluster's profile says how many it should have."""
    from superpod.node.files import read_json
    from superpod.node.first_step import excluded
    from superpod.node.guard import CHAIN
    from superpod.slurm import submit, watch

    chain = read_json(seen.run.path / CHAIN)
    if chain is None or slurm.remote:
        return  # without a chain, its user started it here or by a plain sbatch; a remote run's folder is a mirror
    lacks = watch.wants_attempts(seen, int(seen.run.facts.get("attempts", 1)))
    if lacks and seen.jobs is not None and watch.queue(slurm) is not None:
        jobs = submit.queue(slurm, str(seen.run.path), lacks, excluded(seen.run))
        submit.note(seen.run, jobs)
        print(f"{seen.run.path.name}: queued {len(jobs)} more: {', '.join(jobs)}")
