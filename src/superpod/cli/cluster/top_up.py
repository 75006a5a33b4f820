"""`recipes top-up`: queue the attempts that runs lack."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import Cluster, newest_in
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.runtime.runs.run_folder import RunFolder


def top_up(
    runs_named: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Run folders, or `last`.")] = None,
    cluster: Cluster = "",
    runs: Annotated[str, typer.Option("--runs", help="All of yours in this folder; default: the profile's.")] = "",
    attempts: Annotated[
        int | None, typer.Option("--attempts", min=1, help="Jobs to have queued; default: as submitted.")
    ] = None,
) -> None:
    """Queue the attempts that your runs lack, so that they go on by themselves; exit 1 if one cannot be helped."""
    from superpod.requests import run_environment
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.profiles import profiles
    from superpod.slurm.submission import connection
    from superpod.slurm.submission import top_up as queueing

    profile = profiles.load(cluster) if cluster else None
    slurm = connection.connect(profile) if profile else connection.Connection()
    if slurm.remote:
        raise UserError("top-up works only where the run folders are", f"log in to {slurm} first")
    folder = runs or (profile.folders.runs if profile else "")
    if not runs_named and not folder:
        raise UserError("top-up names no run", "name runs, --runs DIR, or --cluster PROFILE for all of yours")
    named = [newest_in(folder or "runs", run) for run in runs_named or []]
    chosen = [RunFolder.open(run) for run in named] or _going_on(folder)
    failed = False
    for run in chosen:
        try:
            with run_environment.restored_variables(run):
                jobs = queueing.top_up(run, slurm, attempts or 0)
        except UserError as error:
            if len(chosen) == 1:
                raise
            failed = True
            print(f"{run.path.name}: {error}", file=sys.stderr)
            continue
        print(f"{run.path.name}: " + (f"queued {len(jobs.ids)} more: {jobs}" if jobs else "nothing to queue"))
        if jobs and jobs.shortfall:
            print(f"{run.path.name}: {jobs.shortfall}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _going_on(folder: str) -> list[RunFolder]:
    """This user's runs in a folder that are neither done nor stopped."""
    from superpod.reports.runs import run_list
    from superpod.runtime.runs import run_state

    runs = [listed.run for listed in run_list.below(Path(folder)) if listed.mine and not listed.problem]
    return [run for run in runs if (run.path / run_state.CHAIN).exists() and not run.done and not run.stop]
