"""`recipes status`: runs, from their folders and from Slurm. It changes nothing, whoever calls it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.options.request_options import AsJson, Cluster, newest_in
from superpod.cli.runs import run_rows
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.reports.runs.run_list import ListedRun
    from superpod.slurm.profiles.profile_schema import Cluster as Profile
    from superpod.slurm.status.mirror import Mirror
    from superpod.slurm.status.run_views import RunView
    from superpod.slurm.submission.connection import Connection

BAD = ("failed", "stalled", "unreadable")
"""States with which `--exit-code` ends with 1."""

Watch = Annotated[
    bool, typer.Option("--watch", help="Stay, as a page that refreshes; q or Ctrl-C leaves, arrows choose a run.")
]
Every = Annotated[
    float, typer.Option("--every", metavar="SECONDS", help="With --watch: seconds between two looks at the files.")
]


def status(
    run: Annotated[
        str,
        typer.Argument(help="A run, a sweep or `last`; default: all your runs of the cluster."),
    ] = "",
    cluster: Cluster = "",
    runs: Annotated[str, typer.Option("--runs", help="The folder of runs; default: the profile's.")] = "",
    everybody: Annotated[bool, typer.Option("--all", help="The runs of all users.")] = False,
    as_json: AsJson = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 1 if a run shown has failed, is stalled or cannot be read.")
    ] = False,
    watch_it: Watch = False,
    every: Every = 2.0,
    prometheus: Annotated[
        Path | None,
        typer.Option(
            "--prometheus", metavar="FILE.prom", help="Write the numbers for node_exporter's textfile folder."
        ),
    ] = None,
) -> None:
    """Show runs: state, step, loss, tokens/s, MFU, time left, attempt, checkpoint. Changes nothing."""
    from superpod.slurm.profiles import profiles
    from superpod.slurm.status import run_views
    from superpod.slurm.submission import connection

    if watch_it:
        _refuse_together(run, every, as_json, exit_code, prometheus)
    profile = profiles.load(cluster) if cluster else None
    slurm = connection.connect(profile) if profile else connection.Connection()
    if run and not slurm.remote:
        run = newest_in(_folder(runs, profile), run)
    if watch_it and _is_page():
        _show_page(slurm, _folder(runs, profile), run, everybody=everybody, every_s=every)
        return
    listed, mirror = _listed(slurm, profile, run, runs)
    shown = [one for one in listed if run or everybody or one.mine]
    seen = run_views.summarize_runs(
        [one.run for one in shown if not one.problem], slurm, mirror.users if mirror else None
    )
    by_path = {view.run.path: view for view in seen}
    views = [by_path.get(one.run.path) or run_views.unreadable_view(one.run, one.problem) for one in shown]
    views = [dataclasses.replace(view, user=one.user) for view, one in zip(views, shown, strict=True)]
    views = [_of_there(view, mirror) for view in views] if mirror else views
    if prometheus:
        from superpod.slurm.status import prometheus as metrics

        metrics.write(prometheus, views)
    if as_json:
        import json

        print(json.dumps([_facts(view, mirror) for view in views], indent=1))
    else:
        _print_table(views, with_users=everybody)
    _print_notes(views, len(listed) - len(shown))
    if exit_code and any(view.state in BAD for view in views):
        raise typer.Exit(1)


def _refuse_together(run: str, every: float, as_json: bool, exit_code: bool, prometheus: Path | None) -> None:
    """Raise UserError for what a page that stays has no use for."""
    single = {"--json": as_json, "--exit-code": exit_code, "--prometheus": prometheus}
    once = [name for name, given in single.items() if given]
    if once:
        raise UserError(f"--watch stays, and {once[0]} is for one look", "leave one of the two out")
    if not 0.2 <= every <= 3600:
        raise UserError(f"--every is {every:g}; it is 0.2 to 3600 seconds", "--every 2")
    if run.replace(".", "", 1).isdigit() and not Path(run).exists():
        raise UserError(f"there is no run {run}", f"for a look every {run} seconds: --watch --every {run}")


def _folder(runs: str, profile: Profile | None) -> str:
    """The folder of runs: as given, else the profile's."""
    return runs or (profile.folders.runs if profile else "runs")


def _show_page(slurm: Connection, folder: str, run: str, *, everybody: bool, every_s: float) -> None:
    """The page that refreshes, until its reader leaves. Raises UserError behind SSH."""
    if slurm.remote:
        raise UserError(
            "--watch reads the files of runs every few seconds, and these lie behind SSH",
            f"there: ssh -t {slurm} recipes status --watch",
        )
    from superpod.cli.runs import status_page

    status_page.show(Path(folder), run, slurm, everybody=everybody, every_s=every_s)


def _is_page() -> bool:
    """Whether there is a terminal to draw in; says so where not, and the table is printed once."""
    from rich.console import Console

    from superpod.cli.running.progress import draws

    if draws(Console()):
        return True
    print("note: --watch needs a terminal that can be drawn over; this is one look", file=sys.stderr)
    return False


def _listed(slurm: Connection, profile: Profile | None, run: str, runs: str) -> tuple[list[ListedRun], Mirror | None]:
    """The runs to choose from, and the copy that they lie in where the cluster is behind SSH."""
    from superpod.reports import sweep
    from superpod.reports.runs import run_list
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.status import mirror as mirrors

    folder = _folder(runs, profile)
    if slurm.remote:
        mirror = mirrors.fetch(slurm, _folder_of(run) or folder)
        me = slurm.run(["id", "-un"]).strip()
        copy = _copy_of(run, mirror)
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


def _folder_of(run: str) -> str:
    """The folder of runs that a run behind SSH lies in; '' where none is named. Raises UserError."""
    from superpod.reports.runs import run_list

    if run in ("", run_list.LAST):
        return ""
    if len(Path(run).parents) < 2:
        raise UserError(f"{run} is no run there: a run lies at RUNS/RECIPE/RUN", "give its whole path, or `last`")
    return str(Path(run).parents[1])


def _copy_of(run: str, mirror: Mirror) -> Path:
    """Where a run of there, or the newest, lies in the copy. Raises UserError."""
    from superpod.reports.runs import run_list

    if run != run_list.LAST:
        return mirror.path / Path(run).parent.name / Path(run).name
    runs = run_list.below(mirror.path)
    if not runs:
        raise UserError(f"there is no run in {mirror.remote}", "name a run, or --runs DIR")
    print(f"last is {mirror.remote_path(runs[-1].run.path)}", file=sys.stderr)
    return runs[-1].run.path


def _of_there(view: RunView, mirror: Mirror) -> RunView:
    """A copy's row, with the paths of the run itself in all that it says."""
    message, alarm, *resumed = (
        mirror.with_remote_paths(view.run.path, text) for text in (view.message, view.alarm, *view.resumed)
    )
    return dataclasses.replace(view, message=message, alarm=alarm, resumed=tuple(resumed))


def _facts(view: RunView, mirror: Mirror | None) -> dict[str, object]:
    path = mirror.remote_path(view.run.path) if mirror else str(view.run.path)
    facts = dataclasses.asdict(view)
    return {**facts, "jobs_unknown": view.jobs_unknown or "", "run": path, "recipe": view.run.recipe}


def _print_table(views: list[RunView], *, with_users: bool) -> None:
    """A row a run; in a terminal that is too narrow for the columns, some lines a run. Pipes get the columns."""
    width = None if not sys.stdout.isatty() else tables.width()
    run_rows.show(views, with_users=with_users, width=width)
    for line in run_rows.messages(views):
        print(line)
    if not views:
        print("no runs")


def _print_notes(views: list[RunView], others: int) -> None:
    """What the table does not show, on stderr."""
    from superpod.slurm.status import run_views

    if others:
        print(f"{others} runs of other users: --all shows them", file=sys.stderr)
    if any(view.jobs_unknown is run_views.JobsUnknown.NO_ANSWER for view in views):
        print(f"{run_views.JobsUnknown.NO_ANSWER}: these states are from the run folders alone", file=sys.stderr)
