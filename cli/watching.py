"""`recipes status`, `logs`, `cancel` and `history`: runs on a cluster, from their folders and from Slurm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.node.run_folder import RunFolder
    from superpod.slurm.connection import Connection
    from superpod.slurm.watch import Seen

Run = Annotated[str, typer.Argument(help="A run folder.")]
Cluster = Annotated[str, typer.Option("--cluster", help="The profile whose runs are meant.")]
STYLE = {"done": "green", "failed": "red", "stalled": "red", "cancelled": "yellow", "running": "cyan", "saving": "cyan"}


def status(
    run: Annotated[str, typer.Argument(help="A run folder; default: every run of the cluster.")] = "",
    cluster: Cluster = "",
    runs: Annotated[str, typer.Option("--runs", help="The folder of runs; default: the profile's.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    top_up: Annotated[bool, typer.Option("--top-up/--no-top-up", help="Queue the attempts that a run lacks.")] = True,
) -> None:
    """Show runs: state, step, loss, tokens/s, MFU, time left, attempt, checkpoint; queue missing attempts."""
    from superpod.slurm import watch

    way, folders = _found(run, cluster, runs)
    seen = watch.of_folder(folders, way)
    if as_json:
        import json

        print(json.dumps([_facts(each) for each in seen], indent=1))
    else:
        _table(seen)
    if top_up:
        for each in seen:
            _top_up(each, way)


def _found(run: str, cluster: str, runs: str) -> tuple[Connection, list[RunFolder]]:
    """The way to Slurm, and the runs that are meant."""
    from superpod.node import guard
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import connection, mirror, profiles

    profile = profiles.load(cluster) if cluster else None
    way = connection.of(profile) if profile else connection.Connection()
    folder = runs or (profile.folders.runs if profile else "runs")
    if way.remote:
        local = mirror.fetch(way, str(Path(run).parents[1]) if run else folder)
        return way, [RunFolder.open(local / Path(run).parent.name / Path(run).name)] if run else guard.runs_of(local)
    if run:
        return way, [RunFolder.open(run)]
    if not Path(folder).is_dir():
        raise UserError(f"there is no folder for runs at {folder}", "name a run, --runs DIR, or --cluster PROFILE")
    return way, guard.runs_of(Path(folder))


def _facts(seen: Seen) -> dict:
    import dataclasses

    return {**dataclasses.asdict(seen), "run": str(seen.run.path), "recipe": seen.run.recipe}


def _table(found: list[Seen]) -> None:
    from rich.table import Table
    from rich.text import Text

    from superpod.cli import tables

    head = ("run", "state", "step", "loss", "tokens/s", "MFU", "left", "attempt", "checkpoint")
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for s in found:
        steps = f"{s.step}/{s.max_steps}" if s.max_steps else str(s.step)
        saved = f"step {s.checkpoint_step}, {_ago(s.checkpoint_age_s)} ago" if s.checkpoint_step else "-"
        table.add_row(
            f"{s.run.recipe}/{s.run.path.name}",
            Text(s.state, style=STYLE.get(s.state, "")),
            steps,
            "-" if s.loss is None else f"{s.loss:.4f}",
            "-" if s.tokens_per_s is None else f"{s.tokens_per_s:,.0f}",
            "-" if s.mfu is None else f"{s.mfu:.1%}",
            _ago(s.eta_s),
            s.attempt or "-",
            saved,
        )
    tables.show(table)
    for s in found:
        for words in (s.message, s.alarm):
            if words:
                print(f"{s.run.path.name}: {words}")
    if not found:
        print("no run there")


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _top_up(seen: Seen, way: Connection) -> None:
    """Queue what a run lacks to go on by itself; its profile says how many attempts."""
    from superpod.node.files import read_json
    from superpod.node.first_step import excluded
    from superpod.node.guard import CHAIN
    from superpod.slurm import submit, watch

    chain = read_json(seen.run.path / CHAIN)
    if chain is None or way.remote:
        return  # run on this machine, or by a plain sbatch: its user queues it
    lacks = watch.wants_attempts(seen, int(seen.run.facts.get("attempts", 1)))
    if lacks and seen.jobs is not None and watch.queue(way) is not None:
        jobs = submit.queue(way, str(seen.run.path), lacks, excluded(seen.run))
        submit.note(seen.run, jobs)
        print(f"{seen.run.path.name}: queued {len(jobs)} more: {', '.join(jobs)}")


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Of this rank; default: rank 0, and what failed.")] = None,
    all_ranks: Annotated[bool, typer.Option("--all", help="Of every rank on every node.")] = False,
    attempt: Annotated[str, typer.Option("--attempt", help="Of this attempt; default: all of them, in order.")] = "",
    lines: Annotated[int, typer.Option("-n", "--lines", help="The last lines of each file; 0 = all.")] = 0,
) -> None:
    """Print what the ranks of a run have said, over all nodes and all attempts."""
    from superpod.lifecycle.logs import Reader
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import connection, watch

    folder = RunFolder.open(run)
    reader = Reader(folder, rank=rank, all_ranks=all_ranks, attempt=attempt, tail=lines)
    way = connection.Connection()
    while True:
        for line in reader.new():
            print(line)
        ended = watch.of_folder([folder], way)[0].state in ("done", "failed", "cancelled")
        if not follow or ended:
            break
        time.sleep(1)
    for line in reader.new():
        print(line)


def cancel(run: Run, cluster: Cluster = "") -> None:
    """End a run: its job is stopped, the attempts behind it are taken out of the queue, and none is added."""
    from superpod.node import guard
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import connection, profiles
    from superpod.slurm.submit import job_name

    way = connection.of(profiles.load(cluster)) if cluster else connection.Connection()
    if way.remote:
        way.run(["sh", "-c", 'cat >"$0/stop"', run], stdin=b'{"reason": "cancelled by the user"}')
    else:
        folder = RunFolder.open(run)
        if folder.done:
            raise UserError(f"{run} is done", "there is nothing to cancel")
        guard.stop(folder, "cancelled by the user")
    way.run(["scancel", f"--name={job_name(str(Path(run).absolute()))}"])
    print(f"cancelled {run}")


def history(run: Run) -> None:
    """List the attempts of a run: when, where, how far, and how each ended."""
    from rich.table import Table

    from superpod.cli import tables
    from superpod.node.run_folder import RunFolder

    folder = RunFolder.open(run)
    head = ("attempt", "job", "began", "took", "nodes", "to step", "checkpoint", "state", "why")
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for attempt in folder.attempts:
        found = attempt.result
        began = float(found.get("started") or 0)
        took = float(found.get("ended") or attempt.heartbeat().get("t") or began) - began
        nodes = found.get("nodes") or []
        table.add_row(
            attempt.name,
            str(found.get("job", "")) + (f" (restart {found['restarts']})" if found.get("restarts") else ""),
            time.strftime("%m-%d %H:%M:%S", time.localtime(began)),
            _ago(took),
            nodes[0] if len(nodes) == 1 else f"{nodes[0]} +{len(nodes) - 1}" if nodes else "-",
            str(found.get("last_step", "-")),
            str(found.get("checkpoint") or "-"),
            str(found.get("state", "?")),
            str(found.get("message", "")),
        )
    tables.show(table)
