"""`recipes submit`: check a recipe against a cluster and queue it. `recipes render` shares its options."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.request_options import Data, Name, Nodes, Overrides, request_of
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.lifecycle.request import Request
    from superpod.lifecycle.resolve import ResolvedRun
    from superpod.slurm.profiles import Cluster
    from superpod.slurm.submit import Submission

TargetCluster = Annotated[str, typer.Option("--cluster", help="A profile: dgx_h100, ..., or the path of a TOML file.")]
AttemptTime = Annotated[
    str, typer.Option("--time", help="Time limit of one attempt, as Slurm writes it; default: the profile's.")
]
SharedRuns = Annotated[str, typer.Option("--runs", help="Folder of the run folders; default: the profile's.")]


def submit(
    name: Name,
    cluster: TargetCluster,
    overrides: Overrides = None,
    num_nodes: Nodes = None,
    data: Data = None,
    time: AttemptTime = "",
    runs: SharedRuns = "",
    attempts: Annotated[int, typer.Option("--attempts", help="Jobs to queue at once; 0 = the profile's.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print everything; queue nothing.")] = False,
    resume: Annotated[str, typer.Option("--resume", help="Continue this run, even if stopped or cancelled.")] = "",
) -> None:
    """Check a recipe against a cluster and queue it, with further attempts that continue it."""
    from superpod.slurm import connection, live_cluster, preflight
    from superpod.slurm import submit as slurm_submit

    if resume:
        _resume(name, cluster, resume, attempts, [*(overrides or []), *filter(None, [num_nodes, data, time, runs])])
        return
    request, profile = checked(name, cluster, overrides, num_nodes, data, time, runs)
    slurm = connection.of(profile)
    python = slurm_submit.python_of(profile) if not profile.container.image else ""
    paths = preflight.paths(profile, request.data)
    # A cluster that does not answer is told before NeMo is imported.
    live = live_cluster.ask(slurm, profile, runs or profile.folders.runs, paths, python)
    submission = slurm_submit.Submission(resolved(request), profile, runs, time)
    preflight.refuse(preflight.Case(submission, live))
    count = attempts or profile.chain.attempts
    if dry_run:
        _print_everything(submission, count)
        print(slurm_submit.script(submission), end="")
        return
    run = slurm_submit.new_run(submission, slurm)
    jobs = slurm_submit.queue(slurm, run, count)
    slurm_submit.remember(slurm, run, jobs)
    print(f"run    {run}")
    print(f"jobs   {', '.join(jobs)}: each continues where the one before it ended")
    print(f"proof  {_proof(submission)}")
    print(f"watch  recipes status {shlex.quote(run)}" + (f" --cluster {shlex.quote(cluster)}" if slurm.remote else ""))


def _resume(name: str, cluster: str, folder: str, attempts: int, changes: list[object]) -> None:
    """Queue attempts of an existing run, as it was submitted."""
    from superpod.node import guard
    from superpod.node.first_step import excluded
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import connection, profiles, watch
    from superpod.slurm import submit as slurm_submit

    profile = profiles.load(cluster)
    slurm = connection.of(profile)
    if slurm.remote:
        raise UserError("--resume works only where the run folder is", "log in to the cluster first")
    run = RunFolder.open(folder)
    view = watch.views([run], slurm)[0]
    if changes:
        raise UserError("a run continues as it was submitted", "leave out changes, or start a new run")
    if run.recipe != name or run.done:
        raise UserError(f"{folder} is {'done' if run.done else f'a run of {run.recipe}, not of {name}'}")
    if view.jobs:
        raise UserError(f"{folder} has jobs in the queue: {', '.join(j.id for j in view.jobs)}", "`recipes status`")
    guard.allow_resume(run)
    jobs = slurm_submit.queue(slurm, str(run.path), attempts or profile.chain.attempts, excluded(run))
    slurm_submit.note(run, jobs)
    print(f"jobs   {', '.join(jobs)}: the run continues from step {view.checkpoint_step}")


def _proof(submission: Submission) -> str:
    """How far the recipe was proven."""
    from superpod.recipes.facts import proof_level
    from superpod.recipes.registry import find

    run = submission.run
    return proof_level.sentence(find(submission.recipe), run.nodes, run.request.overrides)


def _print_everything(submission: Submission, attempts: int) -> None:
    """Print what a submission would do as comments, so that the whole output is still a script."""
    from superpod.slurm.preflight import START_S

    run, cluster, step = submission.run, submission.cluster, submission.run.step_time_s
    degrees = {name: getattr(run.layout, name) for name in ("tp", "pp", "cp", "ep")}
    print(f"# proof: {_proof(submission)}")
    print(f"# preflight: no problem found; {run.nodes} nodes x {run.gpus_per_node} GPUs of {cluster.name}")
    print(f"# layout: {', '.join(f'{name} {value}' for name, value in degrees.items())}")
    print(f"# checkpoint: {run.checkpoint_bytes / 2**30:,.1f} GiB, every {run.save_every} steps")
    if step and not cluster.declared_only:
        print(f"# steps: {run.max_steps} of {step:.2f} s take {run.max_steps * step / 3600:,.1f} h,")
        print(f"#   plus {START_S} s to start an attempt, which may take {submission.time or cluster.slurm.time}")
    print(f"# run folder: {submission.folder}/{submission.recipe}/TIME-ID; jobs queued at once: {attempts}")
    print("#" + "-" * 100)


def checked(
    name: str,
    cluster: str,
    overrides: list[str] | None,
    num_nodes: int | None,
    data: Path | None,
    time: str,
    runs: str,
) -> tuple[Request, Cluster]:
    """What a command line asks for, and where. What can be refused without NeMo and without the cluster is refused.

    Raises:
        UserError: with what is wrong, or what the cluster's GPU cannot run.
    """
    from superpod.slurm import preflight, profiles

    if time:
        try:
            profiles.seconds(time)
        except ValueError as error:
            raise UserError(str(error), "write it like 4:00:00 or 1-12:00:00") from None
    if runs and not runs.startswith("/"):
        raise UserError(f"--runs {runs}: every node must find this folder", "give an absolute path on a shared disk")
    profile = profiles.load(cluster)
    request = request_of(name, overrides, data, num_nodes)
    preflight.refuse_other_gpu(request, profile)
    return request, profile


def resolved(request: Request) -> ResolvedRun:
    """The request resolved. The first time, NeMo builds it, which takes long enough for a message on a terminal."""
    from superpod.lifecycle.quiet import quietly
    from superpod.lifecycle.resolve import is_cached, resolve_cached

    with quietly() as terminal:  # also where the cache has it: a torn file is built again
        if sys.stderr.isatty() and not is_cached(request):
            print("building the recipe with NeMo (10 to 20 s, once)", file=terminal, flush=True)
        return resolve_cached(request)
