"""`recipes top-up`: queue more jobs for runs with fewer jobs than they need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import Cluster, resolve_run_in
from superpod.errors import UserError, counted
from superpod.slurm.profiles import profiles
from superpod.slurm.submission import connection

if TYPE_CHECKING:
    from superpod.runtime.runs.run_folder import RunFolder


def top_up(
    runs_named: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Run folders, or `last`.")] = None,
    cluster: Cluster = "",
    runs: Annotated[
        str,
        typer.Option("--runs", help="Folder of the runs to top up, if no RUN is given. Default: from the profile."),
    ] = "",
    attempts: Annotated[
        int | None, typer.Option("--attempts", min=1, help="Jobs to keep queued. Default: as submitted.")
    ] = None,
) -> None:
    """Queue more jobs for your unfinished runs; exit 1 if a run cannot be continued."""
    from superpod.requests import restored_environment
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.submission import top_up as queueing

    profile = profiles.load(cluster) if cluster else None
    slurm = connection.connect(profile) if profile else connection.Connection()
    if slurm.remote:
        raise UserError("top-up runs only on the machine with the run folders", f"log in to {slurm} and retry")
    folder = runs or (profile.folders.runs if profile else "")
    if not runs_named and not folder:
        raise UserError("top-up needs a run", "pass run folders, or --runs DIR or --cluster PROFILE for all your runs")
    folders = [resolve_run_in(folder or "runs", run) for run in runs_named or []]
    unfinished = [RunFolder.open(run) for run in folders] or _unfinished_runs(folder)
    has_failed = False
    for run in unfinished:
        try:
            with restored_environment.restored_variables(run):
                jobs = queueing.top_up(run, slurm, attempts or 0)
        except UserError as error:
            if len(unfinished) == 1:
                raise
            has_failed = True
            print(f"{run.path.name}: {error}", file=sys.stderr)
            continue
        if not jobs:
            print(f"{run.path.name}: nothing to queue")
            continue
        print(f"{run.path.name}: queued {counted(len(jobs.ids), 'more job')}: {jobs}")
        if jobs.shortfall:
            print(f"{run.path.name}: {jobs.shortfall}", file=sys.stderr)
    if has_failed:
        raise typer.Exit(1)


def _unfinished_runs(folder: str) -> list[RunFolder]:
    """Return this user's runs in a folder that are neither done nor stopped."""
    from superpod.reports.runs import run_list
    from superpod.runtime.runs import run_state

    runs = [listed.run for listed in run_list.list_runs(Path(folder)) if listed.mine and not listed.problem]
    return [run for run in runs if (run.path / run_state.CHAIN).exists() and not run.done and not run.stop]
