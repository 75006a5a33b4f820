"""`recipes status`: runs, from their folders and from Slurm. It changes nothing, whoever calls it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.request_options import AsJson, Cluster
from superpod.errors import readable

if TYPE_CHECKING:
    from superpod.lifecycle.run_list import ListedRun
    from superpod.slurm.connection import Connection
    from superpod.slurm.mirror import Mirror
    from superpod.slurm.profile_schema import Cluster as Profile
    from superpod.slurm.watch import RunView

STYLE = {"done": "green", "failed": "red", "stalled": "red", "cancelled": "yellow", "running": "cyan", "saving": "cyan"}
BAD = ("failed", "stalled", "unreadable")
"""States with which `--exit-code` ends with 1."""


def status(
    run: Annotated[str, typer.Argument(help="A run or a sweep; default: all of your runs of the cluster.")] = "",
    cluster: Cluster = "",
    runs: Annotated[str, typer.Option("--runs", help="The folder of runs; default: the profile's.")] = "",
    everybody: Annotated[bool, typer.Option("--all", help="The runs of all users.")] = False,
    as_json: AsJson = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 1 if a run shown has failed, is stalled or cannot be read.")
    ] = False,
    prometheus: Annotated[
        Path | None,
        typer.Option(
            "--prometheus", metavar="FILE.prom", help="Write the numbers for node_exporter's textfile folder."
        ),
    ] = None,
) -> None:
    """Show runs: state, step, loss, tokens/s, MFU, time left, attempt, checkpoint. Changes nothing."""
    from superpod.slurm import connection, profiles, watch

    profile = profiles.load(cluster) if cluster else None
    slurm = connection.of(profile) if profile else connection.Connection()
    listed, mirror = _listed(slurm, profile, run, runs)
    shown = [one for one in listed if run or everybody or one.mine]
    seen = watch.views([one.run for one in shown if not one.problem], slurm, mirror.users if mirror else None)
    by_path = {view.run.path: view for view in seen}
    views = [by_path.get(one.run.path) or watch.unreadable(one.run, one.problem) for one in shown]
    views = [dataclasses.replace(view, user=one.user) for view, one in zip(views, shown, strict=True)]
    views = [_of_there(view, mirror) for view in views] if mirror else views
    if prometheus:
        from superpod.slurm import prometheus as metrics

        metrics.write(prometheus, views)
    if as_json:
        import json

        print(json.dumps([_facts(view, mirror) for view in views], indent=1))
    else:
        _print_table(views, with_users=everybody)
    _print_notes(views, len(listed) - len(shown))
    if exit_code and any(view.state in BAD for view in views):
        raise typer.Exit(1)


def _listed(slurm: Connection, profile: Profile | None, run: str, runs: str) -> tuple[list[ListedRun], Mirror | None]:
    """The runs to choose from, and the copy that they lie in where the cluster is behind SSH."""
    from superpod.lifecycle import run_list, sweep
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import mirror as mirrors

    folder = runs or (profile.folders.runs if profile else "runs")
    if slurm.remote:
        mirror = mirrors.fetch(slurm, str(Path(run).parents[1]) if run else folder)
        me = slurm.run(["id", "-un"]).strip()
        copy = mirror.path / Path(run).parent.name / Path(run).name
        if run and sweep.is_sweep(copy):
            remote = [run_list.listed(path) for _, path in sweep.runs_of(copy)]
        else:
            remote = [run_list.listed(copy)] if run else run_list.below(mirror.path)
        users = [mirror.users.get(one.run.path, "?") for one in remote]
        owned = zip(remote, users, strict=True)
        return [dataclasses.replace(one, user=user, mine=user in (me, "?")) for one, user in owned], mirror
    if not run:
        return run_list.below(Path(folder)), None
    if sweep.is_sweep(Path(run)):
        return [run_list.listed(path) for _, path in sweep.runs_of(Path(run))], None
    listed = run_list.listed(Path(run))
    if listed.problem:
        RunFolder.open(run)  # a run that was named is refused with its own message and exit code 2
    return [listed], None


def _of_there(view: RunView, mirror: Mirror) -> RunView:
    """A copy's row, with the paths of the run itself in all that it says."""
    message, alarm, *resumed = (mirror.there(view.run.path, text) for text in (view.message, view.alarm, *view.resumed))
    return dataclasses.replace(view, message=message, alarm=alarm, resumed=tuple(resumed))


def _facts(view: RunView, mirror: Mirror | None) -> dict[str, object]:
    path = mirror.remote_path(view.run.path) if mirror else str(view.run.path)
    return {**dataclasses.asdict(view), "run": path, "recipe": view.run.recipe}


def _print_table(views: list[RunView], *, with_users: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    head = ("run", "state", "step", "loss", "tokens/s", "MFU", "left", "attempt", "checkpoint")
    head = ("user", *head) if with_users else head
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for view in views:
        steps = f"{view.step}/{view.max_steps}" if view.max_steps else str(view.step)
        saved = f"step {view.checkpoint_step}, {tables.ago(view.checkpoint_age_s)} ago" if view.checkpoint_step else "-"
        cells = [
            Text(readable(f"{view.run.recipe}/{view.run.path.name}")),
            Text(readable(view.state), style=STYLE.get(view.state, "red")),
            steps if view.state != "unreadable" else "-",
            "-" if view.loss is None else f"{view.loss:.4f}",
            "-" if view.tokens_per_s is None else f"{view.tokens_per_s:,.0f}",
            "-" if view.mfu is None else f"{view.mfu:.1%}",
            tables.ago(view.eta_s),
            view.attempt or "-",
            saved,
        ]
        table.add_row(*([Text(readable(view.user))] if with_users else []), *cells)
    tables.show(table)
    for view in views:
        for message in (view.message, view.alarm, *view.resumed):
            if message:
                print(readable(f"{view.run.path.name}: {message}"))
    if not views:
        print("no runs")


def _print_notes(views: list[RunView], others: int) -> None:
    """What the table does not show, on stderr."""
    from superpod.slurm import watch

    if others:
        print(f"{others} runs of other users: --all shows them", file=sys.stderr)
    if any(view.jobs_unknown == watch.SILENT for view in views):
        print(f"{watch.SILENT}: these states are from the run folders alone", file=sys.stderr)
