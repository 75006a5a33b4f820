"""`recipes render` and the other verbs for a cluster with Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.lifecycle.exported import Exported
    from superpod.slurm.submit import Wanted

Name = Annotated[str, typer.Argument(help="A recipe's name, from `recipes list`.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes, such as trainer.max_steps=10.")]
Cluster = Annotated[str, typer.Option("--cluster", help="A profile: dgx_h100, ..., or the path of a TOML file.")]
Nodes = Annotated[int | None, typer.Option("--nodes", help="Size; default: its smallest.")]
Data = Annotated[Path | None, typer.Option(help="A folder made by `recipes data`; default: mock data.")]
Time = Annotated[str, typer.Option("--time", help="Limit of one attempt, as Slurm writes it; default: the profile's.")]
Runs = Annotated[str, typer.Option("--runs", help="Where run folders are kept; default: the profile's.")]


def render(
    name: Name,
    cluster: Cluster,
    overrides: Overrides = None,
    num_nodes: Nodes = None,
    data: Data = None,
    time: Time = "",
    runs: Runs = "",
) -> None:
    """Print a plain sbatch script that trains a recipe on a cluster: sbatch job.sbatch."""
    from superpod.slurm.submit import script

    wanted = wanted_of(name, cluster, overrides, num_nodes, data, time, runs)
    print(script(wanted, exported_of(wanted)), end="")


def submit(
    name: Name,
    cluster: Cluster,
    overrides: Overrides = None,
    num_nodes: Nodes = None,
    data: Data = None,
    time: Time = "",
    runs: Runs = "",
    attempts: Annotated[int, typer.Option("--attempts", help="Jobs queued at once; 0 = as the profile says.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print everything; queue nothing.")] = False,
    resume: Annotated[str, typer.Option("--resume", help="Go on with this run, stopped or cancelled ones too.")] = "",
) -> None:
    """Check a recipe against a cluster and queue it, with the attempts that it will go on in."""
    from superpod.slurm import connection, live_cluster, preflight
    from superpod.slurm import submit as submission

    if resume:
        _go_on(name, cluster, resume, attempts, [*(overrides or []), *filter(None, [num_nodes, data, time, runs])])
        return
    wanted = wanted_of(name, cluster, overrides, num_nodes, data, time, runs)
    way = connection.of(wanted.cluster)
    exported = exported_of(wanted)
    python = submission.python_of(wanted.cluster) if not wanted.cluster.container.image else ""
    answers = live_cluster.ask(way, wanted.cluster, wanted.folder, preflight.paths(wanted), python)
    preflight.refuse(preflight.Case(wanted, exported, answers))
    count = attempts or wanted.cluster.chain.attempts
    if dry_run:
        _say_everything(wanted, exported, count)
        print(submission.script(wanted, exported), end="")
        return
    run = submission.new_run(wanted, exported, way)
    jobs = submission.queue(way, run, count)
    submission.remember(way, run, jobs)
    print(f"run    {run}")
    print(f"jobs   {', '.join(jobs)}: each goes on where the one before it ended")
    print(f"watch  recipes status {_quoted(run)}" + (f" --cluster {_quoted(cluster)}" if way.remote else ""))


def _go_on(name: str, cluster: str, folder: str, attempts: int, changes: list) -> None:
    """Queue attempts of a run that is there, as it was submitted."""
    from superpod.node import guard
    from superpod.node.first_step import excluded
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import connection, profiles, watch
    from superpod.slurm import submit as submission

    profile = profiles.load(cluster)
    way = connection.of(profile)
    if way.remote:
        raise UserError("--resume works where the run folder is", "log in to the cluster for it")
    run = RunFolder.open(folder)
    seen = watch.of_folder([run], way)[0]
    if changes:
        raise UserError("a run goes on as it was submitted", "leave out changes, or start a new run")
    if run.recipe != name or run.done:
        raise UserError(f"{folder} is {'done' if run.done else f'a run of {run.recipe}, not of {name}'}")
    if seen.jobs:
        raise UserError(f"{folder} has jobs in the queue: {', '.join(j.id for j in seen.jobs)}", "`recipes status`")
    guard.let_go_on(run)
    jobs = submission.queue(way, str(run.path), attempts or profile.chain.attempts, excluded(run))
    submission.note(run, jobs)
    print(f"jobs   {', '.join(jobs)}: the run goes on from step {seen.checkpoint_step}")


def _say_everything(wanted: Wanted, exported: Exported, attempts: int) -> None:
    """What a submission would do, as comments, so that the whole is still a script."""
    from superpod.slurm.preflight import START_S

    layout = exported.plan["layouts"][0]
    step = layout["step_time_s"]
    print(f"# preflight: nothing to object; {exported.nodes} nodes x {exported.gpus} GPUs of {wanted.cluster.name}")
    print(f"# layout: {', '.join(f'{k} {v}' for k, v in layout['layout'].items() if k in ('tp', 'pp', 'cp', 'ep'))}")
    print(f"# checkpoint: {layout['checkpoint_bytes'] / 2**30:,.1f} GiB, every {exported.save_every} steps")
    if step and not wanted.cluster.declared_only:
        print(
            f"# steps: {exported.max_steps} of {step:.2f} s are {exported.max_steps * step / 3600:,.1f} h of training,"
        )
        print(f"#   and {START_S} s more an attempt; attempts of {wanted.time or wanted.cluster.slurm.time}")
    print(f"# run folder: {wanted.folder}/{wanted.job.recipe}/TIME-ID; jobs queued at once: {attempts}")
    print("#" + "-" * 100)


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


def wanted_of(
    name: str,
    cluster: str,
    overrides: list[str] | None,
    num_nodes: int | None,
    data: Path | None,
    time: str,
    runs: str,
) -> Wanted:
    """What the words of a command line ask for, checked as far as that needs no NeMo."""
    from superpod.launchers import local
    from superpod.slurm import profiles
    from superpod.slurm.submit import Wanted, absolute

    if time:
        try:
            profiles.seconds(time)
        except ValueError as wrong:
            raise UserError(str(wrong), "write it like 4:00:00 or 1-12:00:00") from None
    if runs and not runs.startswith("/"):
        raise UserError(f"--runs {runs}: every node must find it", "give an absolute path on a shared disk")
    job = local.Job(name, overrides or [], absolute(data), num_nodes)
    profile = profiles.load(cluster)
    local.check(job)
    return Wanted(job, profile, runs, time)


def exported_of(wanted: Wanted) -> Exported:
    """The recipe as a file; the first time NeMo builds it, which is said."""
    import sys

    from superpod.lifecycle import exported
    from superpod.lifecycle.quiet import quietly

    if exported.is_known(wanted.job):
        return exported.export(wanted.job)
    with quietly() as terminal:
        if sys.stderr.isatty():
            print("building the recipe with NeMo (10 to 20 s, once)", file=terminal, flush=True)
        return exported.export(wanted.job)
