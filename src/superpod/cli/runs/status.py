"""`recipes status`: show the state of runs according to their folders and Slurm. Changes nothing."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.options.request_options import AsJson, Cluster, resolve_run_in
from superpod.cli.runs import run_rows
from superpod.errors import UserError, counted
from superpod.slurm.profiles import profiles
from superpod.slurm.submission import connection

if TYPE_CHECKING:
    from superpod.reports.runs.run_list import ListedRun
    from superpod.slurm.profiles.profile_schema import Cluster as Profile
    from superpod.slurm.status.mirror import Mirror
    from superpod.slurm.status.run_views import RunView
    from superpod.slurm.submission.connection import Connection

BAD_STATES = ("failed", "stalled", "unreadable")
"""States for which `--exit-code` exits with 1."""

Watch = Annotated[bool, typer.Option("--watch", help="Show a live page. q or Ctrl-C quits; arrow keys select a run.")]
Every = Annotated[float, typer.Option("--every", metavar="SECONDS", help="Update interval of --watch.")]


def status(
    run: Annotated[
        str,
        typer.Argument(help="Run folder, sweep or `last`. Default: all your runs in --runs."),
    ] = "",
    cluster: Cluster = "",
    runs: Annotated[str, typer.Option("--runs", help="Folder of run folders. Default: from the profile.")] = "",
    everybody: Annotated[bool, typer.Option("--all", help="Show the runs of all users.")] = False,
    as_json: AsJson = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 1 if a run is failed, stalled or unreadable.")
    ] = False,
    watch_it: Watch = False,
    every: Every = 2.0,
    prometheus: Annotated[
        Path | None,
        typer.Option(
            "--prometheus",
            metavar="FILE.prom",
            help="Write metrics to this file, for the textfile collector of node_exporter.",
        ),
    ] = None,
) -> None:
    """Show the state of runs: step, loss, tokens/s, MFU, time left, attempt and checkpoint. Changes nothing."""
    from superpod.slurm.status import run_views

    if watch_it:
        _refuse_with_watch(run, every, as_json, exit_code, prometheus)
    profile = profiles.load(cluster) if cluster else None
    slurm = connection.connect(profile) if profile else connection.Connection()
    if run and not slurm.remote:
        run = resolve_run_in(_folder(runs, profile), run)
    if watch_it and _can_redraw():
        _show_live_page(slurm, _folder(runs, profile), run, everybody=everybody, every_s=every)
        return
    listed, mirror = _list_runs(slurm, profile, run, runs)
    shown_runs = [one for one in listed if run or everybody or one.mine]
    seen = run_views.summarize_runs(
        [one.run for one in shown_runs if not one.problem], slurm, mirror.users if mirror else None
    )
    by_path = {view.run.path: view for view in seen}
    views = [by_path.get(one.run.path) or run_views.unreadable_view(one.run, one.problem) for one in shown_runs]
    views = [dataclasses.replace(view, user=one.user) for view, one in zip(views, shown_runs, strict=True)]
    if mirror:
        views = [_with_remote_paths(view, mirror) for view in views]
    if prometheus:
        from superpod.slurm.status import prometheus as metrics

        metrics.write(prometheus, views)
    if as_json:
        tables.print_json([_facts(view, mirror) for view in views])
    else:
        _print_table(views, with_users=everybody)
    _print_notes(views, len(listed) - len(shown_runs))
    if exit_code and any(view.state in BAD_STATES for view in views):
        raise typer.Exit(1)


def _refuse_with_watch(run: str, every: float, as_json: bool, exit_code: bool, prometheus: Path | None) -> None:
    """Raise UserError if an option conflicts with --watch, or the interval is invalid or given as RUN."""
    one_time_options = {"--json": as_json, "--exit-code": exit_code, "--prometheus": prometheus}
    for option, value in one_time_options.items():
        if value:
            raise UserError(f"--watch and {option} cannot be combined", "leave one of them out")
    if not 0.2 <= every <= 3600:
        raise UserError(f"--every must be between 0.2 and 3600 seconds, not {every:g}", "for example --every 2")
    if run.replace(".", "", 1).isdigit() and not Path(run).exists():
        raise UserError(f"run {run} does not exist", f"to update every {run} seconds: --watch --every {run}")


def _folder(runs: str, profile: Profile | None) -> str:
    """Return the folder that contains the run folders: from --runs, from the profile, or ./runs."""
    if runs:
        return runs
    return profile.folders.runs if profile else "runs"


def _show_live_page(slurm: Connection, folder: str, run: str, *, everybody: bool, every_s: float) -> None:
    """Show the live page until the user quits it. Raises UserError for a cluster behind SSH."""
    if slurm.remote:
        raise UserError(
            "--watch reads files of the runs every few seconds, which is not supported over SSH",
            f"run it on the cluster: `ssh -t {slurm} recipes status --watch`",
        )
    from superpod.cli.runs import status_page

    status_page.show(Path(folder), run, slurm, everybody=everybody, every_s=every_s)


def _can_redraw() -> bool:
    """Return whether the terminal can show a live page; print a note if not."""
    from rich.console import Console

    from superpod.launch.display.progress_bar import can_redraw

    if can_redraw(Console()):
        return True
    print("note: --watch needs a terminal that can be redrawn; the table is printed once instead", file=sys.stderr)
    return False


def _list_runs(
    slurm: Connection, profile: Profile | None, run: str, runs: str
) -> tuple[list[ListedRun], Mirror | None]:
    """Return the runs to show and, for a cluster behind SSH, the local copy of their folders (otherwise None)."""
    from superpod.reports import sweep
    from superpod.reports.runs import run_list
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.status import mirror as mirrors

    folder = _folder(runs, profile)
    if slurm.remote:
        mirror = mirrors.fetch(slurm, _remote_folder(run) or folder)
        me = slurm.run(["id", "-un"]).strip()
        copy = _local_copy(run, mirror)
        if run and sweep.is_sweep(copy):
            remote = [run_list.inspect_run(path) for _, path in sweep.read_members(copy)]
        else:
            remote = [run_list.inspect_run(copy)] if run else run_list.list_runs(mirror.path)
        users = [mirror.users.get(one.run.path, "?") for one in remote]
        runs_and_users = zip(remote, users, strict=True)
        return [dataclasses.replace(one, user=user, mine=user in (me, "?")) for one, user in runs_and_users], mirror
    if not run:
        return run_list.list_runs(Path(folder)), None
    if sweep.is_sweep(Path(run)):
        return [run_list.inspect_run(path) for _, path in sweep.read_members(Path(run))], None
    listed_run = run_list.inspect_run(Path(run))
    if listed_run.problem:
        RunFolder.open(run)  # raises UserError with the specific reason
    return [listed_run], None


def _remote_folder(run: str) -> str:
    """Return the folder of runs that contains a run on a cluster behind SSH; "" for no run or `last`.

    Raises:
        UserError: `run` is not a path RUNS/RECIPE/RUN.
    """
    from superpod.reports.runs import run_list

    if run in ("", run_list.LAST):
        return ""
    if len(Path(run).parents) < 2:
        raise UserError(f"{run} is not the path of a run, RUNS/RECIPE/RUN", "pass the path on the cluster, or `last`")
    return str(Path(run).parents[1])


def _local_copy(run: str, mirror: Mirror) -> Path:
    """Return the local copy of a run on a cluster behind SSH; `last` is the newest. Raises UserError without runs."""
    from superpod.reports.runs import run_list

    if run != run_list.LAST:
        return mirror.path / Path(run).parent.name / Path(run).name
    runs = run_list.list_runs(mirror.path)
    if not runs:
        raise UserError(f"{mirror.remote} contains no run", "name a run, or pass --runs DIR")
    print(f"last is {mirror.remote_path(runs[-1].run.path)}", file=sys.stderr)
    return runs[-1].run.path


def _with_remote_paths(view: RunView, mirror: Mirror) -> RunView:
    """Return the view with paths of the local copy in its messages replaced by paths on the cluster."""
    message, alarm, *resumed = (
        mirror.with_remote_paths(view.run.path, text) for text in (view.message, view.alarm, *view.resumed)
    )
    return dataclasses.replace(view, message=message, alarm=alarm, resumed=tuple(resumed))


def _facts(view: RunView, mirror: Mirror | None) -> dict[str, object]:
    path = mirror.remote_path(view.run.path) if mirror else str(view.run.path)
    facts = dataclasses.asdict(view)
    return {**facts, "jobs_unknown": view.jobs_unknown or "", "run": path, "recipe": view.run.recipe}


def _print_table(views: list[RunView], *, with_users: bool) -> None:
    """Print a row per run, or a few lines per run in a narrow terminal, and the messages of runs."""
    width = None if not sys.stdout.isatty() else tables.width()
    run_rows.show(views, with_users=with_users, width=width)
    for line in run_rows.messages(views):
        print(line)
    if not views:
        print("no runs")


def _print_notes(views: list[RunView], other_count: int) -> None:
    """Print the number of hidden runs, and whether Slurm's state is missing, on stderr."""
    from superpod.slurm.status import run_views

    if other_count:
        print(f"{counted(other_count, 'run')} of other users not shown; use --all to show them", file=sys.stderr)
    if any(view.jobs_unknown is run_views.JobsUnknown.NO_ANSWER for view in views):
        print(f"{run_views.JobsUnknown.NO_ANSWER}: these states are from the run folders only", file=sys.stderr)
