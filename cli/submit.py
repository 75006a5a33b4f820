"""`recipes submit`: check a recipe against a cluster and queue it. `recipes render` shares its options."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.request_options import Data, Name, Nodes, Overrides, request_of
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.lifecycle.request import Request
    from superpod.lifecycle.resolve import ResolvedRun
    from superpod.slurm.connection import Connection
    from superpod.slurm.dependency import Dependency
    from superpod.slurm.live_cluster import LiveCluster
    from superpod.slurm.preflight import Claim
    from superpod.slurm.profiles import Cluster
    from superpod.slurm.submit import Submission

TargetCluster = Annotated[str, typer.Option("--cluster", help="A profile: dgx_h100, ..., or the path of a TOML file.")]
AttemptTime = Annotated[
    str, typer.Option("--time", help="Time limit of one attempt, as Slurm writes it; default: the profile's.")
]
SharedRuns = Annotated[str, typer.Option("--runs", help="Folder of the run folders; default: the profile's.")]
After = Annotated[
    list[str] | None,
    typer.Option("--after", metavar="JOB[:TYPE]", help="Wait for this job to end well, or afterany, ...; repeatable."),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="PATH=V1,V2", help="A run for every value; repeatable: every combination."),
]


def submit(
    name: Name,
    cluster: TargetCluster,
    overrides: Overrides = None,
    num_nodes: Nodes = None,
    data: Data = None,
    time: AttemptTime = "",
    runs: SharedRuns = "",
    attempts: Annotated[int, typer.Option("--attempts", help="Jobs to queue at once; 0 = the profile's.")] = 0,
    after: After = None,
    sweep: Sweep = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print everything; queue nothing.")] = False,
    resume: Annotated[str, typer.Option("--resume", help="Continue this run, even if stopped or cancelled.")] = "",
) -> None:
    """Check a recipe against a cluster and queue it, with further attempts that continue it."""
    from superpod.cli.submit_resume import Continuation, go_on
    from superpod.slurm import dependency, inherited, preflight
    from superpod.slurm import sweep as sweeps
    from superpod.slurm.checked import unproven

    waits = [dependency.parse(text) for text in after or []]
    if resume:
        _refuse_beside_resume({"--nodes": num_nodes, "--data": data, "--runs": runs, "--sweep": sweep})
        go_on(Continuation(name, cluster, resume, tuple(overrides or ()), time, attempts, waits, dry_run))
        return
    swept = sweeps.members(sweeps.axes(sweep or []))
    requests, profile = _requests(name, cluster, overrides, swept, num_nodes, data, time, runs, waits)
    slurm, live = facts_of(profile, runs, data)
    count = attempts or profile.chain.attempts
    claim = preflight.claim(requests[0], profile, live, time=time, runs=runs, attempts=count, members=len(requests))
    preflight.refuse_claim(claim)  # before NeMo is imported: a member of a sweep differs in what is built only
    notes = [*preflight.notes(claim), *unproven(profile)]
    dependencies = [str(wait) for wait in dependency.unmet(waits, slurm)]
    submissions = _submissions(requests, swept, profile, runs, time, live, count)
    ignored = "" if slurm.remote else inherited.note(os.environ)
    for words in [*(f"{note.message}; {note.hint}" for note in notes), *filter(None, [ignored])]:
        print(f"# note: {words}" if dry_run else f"note   {words}")
    if dry_run:
        for member, submission in zip(swept, submissions, strict=True):
            _print_everything(submission, count, member, dependencies)
        if not sweep:
            print(slurm_submit().script(submissions[0]), end="")
        return
    if sweep:
        _queue_sweep(slurm, list(zip(swept, submissions, strict=True)), count, dependencies)
        return
    run, jobs = slurm_submit().start(submissions[0], slurm, count, dependencies)
    print(f"run    {run}")
    print(f"jobs   {jobs}: each continues where the one before it ended")
    if jobs.shortfall:
        print(f"note   {jobs.shortfall}")
    if short := slurm_submit().outlook(submissions[0], len(jobs.ids)):
        print(f"chain  {short}; `recipes top-up` queues more")
    _print_dependencies(dependencies)
    print(f"proof  {_proof(submissions[0])}")
    print(f"watch  recipes status {shlex.quote(run)}" + (f" --cluster {shlex.quote(cluster)}" if slurm.remote else ""))


def slurm_submit() -> ModuleType:
    """slurm/submit.py, imported when it is needed."""
    from superpod.slurm import submit

    return submit


_REASONS = {
    "--nodes": "a run keeps its size when it continues",
    "--data": "a run keeps its data, whose position its checkpoints hold",
    "--runs": "a run stays in its folder",
    "--sweep": "a sweep is made of new runs",
}


def _refuse_beside_resume(options: dict[str, object]) -> None:
    for option, value in options.items():
        if value:
            raise UserError(f"{option} with --resume: {_REASONS[option]}", f"leave out {option}, or start a new run")


def _requests(
    name: str,
    cluster: str,
    overrides: list[str] | None,
    swept: list[tuple[str, ...]],
    num_nodes: int | None,
    data: Path | None,
    time: str,
    runs: str,
    waits: Sequence[Dependency],
) -> tuple[list[Request], Cluster]:
    """The request of every member, checked without NeMo, and the profile."""
    if data and waits and not data.exists():
        raise UserError(
            f"--data {data} does not exist yet, and a recipe is built from its data: vocabulary, splits, documents",
            f"let the submission itself wait: sbatch --dependency={waits[0]} --wrap 'recipes submit ...'",
        )
    results = [checked(name, cluster, [*(overrides or []), *member], num_nodes, data, time, runs) for member in swept]
    refuse_webhook(results[0][1])
    return [request for request, _ in results], results[0][1]


def facts_of(profile: Cluster, runs: str, data: Path | None) -> tuple[Connection, LiveCluster]:
    """The connection to a cluster, and its live facts. One that does not answer is reported before NeMo is imported."""
    from superpod.slurm import connection, live_cluster, preflight

    slurm = connection.of(profile)
    python = slurm_submit().python_of(profile) if not profile.container.image else ""
    paths = preflight.paths(profile, data.absolute() if data else None)
    return slurm, live_cluster.ask(slurm, profile, runs or profile.folders.runs, paths, python)


def refuse_unmet(wanted: Claim) -> None:
    """Refuse, before NeMo is imported, what the cluster cannot give; print what makes a job wait there.

    Raises:
        UserError: with every finding.
    """
    from superpod.slurm import preflight

    preflight.refuse_claim(wanted)
    for note in preflight.notes(wanted):
        print(f"note: {note.message}" + (f"\n  next: {note.hint}" if note.hint else ""), file=sys.stderr)


def _submissions(
    requests: list[Request],
    swept: list[tuple[str, ...]],
    profile: Cluster,
    runs: str,
    time: str,
    live: LiveCluster,
    attempts: int,
) -> list[Submission]:
    """Every member resolved and checked against the cluster; refused together where any is."""
    from superpod.slurm import preflight, sweep

    if len(requests) == 1:
        submission = slurm_submit().Submission(resolved(requests[0]), profile, runs, time)
        preflight.refuse(preflight.Case(submission, live, attempts=attempts))
        return [submission]
    submissions, refused = [], []
    for number, (member, request) in enumerate(zip(swept, requests, strict=True), 1):
        try:
            which = f": run {number} of {len(requests)}"
            submission = slurm_submit().Submission(resolved(request, which), profile, runs, time)
            preflight.refuse(preflight.Case(submission, live, attempts=attempts))
            submissions.append(submission)
        except UserError as error:
            next_move = f"\n  next: {error.hint}" if error.hint else ""
            refused.append(f"{' '.join(member)}: {error}{next_move}")
    if refused:
        raise UserError(f"{len(refused)} of {len(requests)} runs of the sweep are refused\n" + "\n".join(refused))
    sweep.refuse_room(submissions, live.runs_free)
    return submissions


def _queue_sweep(
    slurm: Connection, members: list[tuple[tuple[str, ...], Submission]], count: int, dependencies: list[str]
) -> None:
    from superpod.slurm import sweep

    folder, jobs = sweep.queue(slurm, members, count, dependencies)
    print(f"sweep  {folder}: {len(members)} runs")
    for (overrides, _), (run, queued) in zip(members, jobs.items(), strict=True):
        print(f"run    {run}  {' '.join(overrides)}  jobs {queued}")
    if short := [queued.shortfall for queued in jobs.values() if queued.shortfall]:
        print(f"note   {len(short)} of {len(jobs)} runs have fewer jobs: {short[0]}; `recipes top-up` queues more")
    _print_dependencies(dependencies)
    print(f"proof  {_proof(members[0][1])}")
    print(f"table  recipes report {shlex.quote(folder)}")


def _print_dependencies(dependencies: list[str]) -> None:
    if dependencies:
        print(f"waits  for {', '.join(dependencies)}")


def _proof(submission: Submission) -> str:
    """How far the recipe was proven."""
    from superpod.recipes.facts import proof_level
    from superpod.recipes.registry import find

    run = submission.run
    return proof_level.sentence(find(submission.recipe), run.nodes, run.request.overrides)


def _print_everything(
    submission: Submission, attempts: int, member: Sequence[str] = (), dependencies: Sequence[str] = ()
) -> None:
    """Print what a submission would do as comments, so that the whole output is still a script."""
    from superpod.slurm.preflight import START_S

    run, cluster, step = submission.run, submission.cluster, submission.run.step_time_s
    degrees = {name: getattr(run.layout, name) for name in ("tp", "pp", "cp", "ep")}
    if member:
        print(f"# run of the sweep: {' '.join(member)}")
    print(f"# proof: {_proof(submission)}")
    print(f"# preflight: no problem found; {run.nodes} nodes x {run.gpus_per_node} GPUs of {cluster.name}")
    print(f"# layout: {', '.join(f'{name} {value}' for name, value in degrees.items())}")
    print(f"# checkpoint: {run.checkpoint_bytes / 2**30:,.1f} GiB, every {run.save_every} steps")
    if step and not cluster.declared_only:
        print(f"# steps: {run.max_steps} of {step:.2f} s take {run.max_steps * step / 3600:,.1f} h,")
        print(f"#   plus {START_S} s to start an attempt, which may take {submission.time or cluster.slurm.time}")
    if short := slurm_submit().outlook(submission, attempts):
        print(f"# chain: {short}: --attempts or --time")
    print(f"# run folder: {submission.folder}/{submission.recipe}/TIME-ID; jobs queued at once: {attempts}")
    if dependencies:
        print(f"# waits for: {', '.join(dependencies)}")
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

    refuse_time(time)
    if runs and not runs.startswith("/"):
        raise UserError(f"--runs {runs}: every node must find this folder", "give an absolute path on a shared disk")
    profile = profiles.load(cluster)
    request = request_of(name, overrides, data, num_nodes)
    preflight.refuse_other_gpu(request, profile)
    return request, profile


def refuse_webhook(profile: Cluster) -> None:
    """Refuse a webhook that no job could reach: a variable that is not set here, a file that others can read.

    Raises:
        UserError: with what is wrong, and never with the address.
    """
    from superpod.node import notify

    table = profile.notify
    if profile.login.host:
        if table.webhook_env:
            hint = f"write the address into a file of mode 0600 on {profile.login.host}: notify.webhook_file"
            raise UserError("notify.webhook_env: a variable of this shell does not travel over SSH", hint)
        return
    if table.webhook_env and profile.chain.self_submit:
        hint = "write the address into a file of mode 0600: notify.webhook_file"
        raise UserError("notify.webhook_env: jobs that jobs submit (chain.self_submit) do not get this variable", hint)
    _, problem = notify.address(table.webhook_env, table.webhook_file, os.environ)
    if problem:
        raise UserError(f"[notify] of {profile.name}: {problem}", "docs/slurm.md, Messages; or leave the key out")


def refuse_time(time: str) -> None:
    """Refuse a time limit that is none of Slurm's; '' is no limit. Raises UserError."""
    from superpod.slurm import profiles

    if time:
        try:
            profiles.seconds(time)
        except ValueError as error:
            raise UserError(str(error), "write it like 4:00:00 or 1-12:00:00") from None


def resolved(request: Request, which: str = "") -> ResolvedRun:
    """The request resolved. The first time NeMo builds it, which takes so long that it is shown, with `which`."""
    from rich.console import Console

    from superpod.cli.progress import waiting
    from superpod.lifecycle.quiet import quietly
    from superpod.lifecycle.resolve import is_cached, resolve_cached

    with quietly() as terminal:  # also where the cache has it: a torn file is built again
        if is_cached(request):
            return resolve_cached(request)
        with waiting(Console(file=terminal), f"building the recipe with NeMo (10 to 20 s, once){which}"):
            return resolve_cached(request)
