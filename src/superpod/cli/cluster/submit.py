"""`recipes submit`: check a recipe against a cluster and queue it. `recipes render` shares its options."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.cluster.finetune_submit import Model
from superpod.cli.cluster.submit_checks import (
    AttemptTime,
    SharedRuns,
    TargetCluster,
    checked,
    facts_of,
    refuse_webhook,
    resolved,
    slurm_submit,
)
from superpod.cli.options.profile_option import NSYS_ON_NODES, ProfileOptions, with_profile
from superpod.cli.options.request_options import Build, Name, Overrides
from superpod.cli.options.sample_options import TuningOptions
from superpod.cli.options.shared_options import spread
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.cli.options.wandb_option import Wandb, with_wandb
from superpod.cli.running.validated import require_built
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.launch.finetune import Task
    from superpod.requests.request import Request
    from superpod.slurm.preflight.dependency import Dependency
    from superpod.slurm.preflight.preflight import Claim
    from superpod.slurm.profiles.live_cluster import LiveCluster
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection
    from superpod.slurm.submission.submit import QueuedJobs, Submission

Attempts = Annotated[
    int | None, typer.Option("--attempts", min=1, max=50, help="Jobs to queue at once; default: the profile's.")
]
After = Annotated[
    list[str] | None,
    typer.Option("--after", metavar="JOB[:TYPE]", help="Wait for this job to end well, or afterany, ...; repeatable."),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="PATH=V1,V2", help="A run for every value; repeatable: every combination."),
]
DataOrSamples = Annotated[
    list[str] | None,
    typer.Option("--data", help="Data folder; with --model samples, NAME:0.3 weighs. May be repeated."),
]
ArrayLimit = Annotated[
    int, typer.Option("--array-limit", min=0, help="Runs of a sweep at once, as sbatch --array=...%N; 0 = all.")
]


@with_profile
@with_size
@spread(TuningOptions, "samples")
def submit(
    name: Name,
    cluster: TargetCluster,
    overrides: Overrides = None,
    *,
    size: SizeOptions,
    data: DataOrSamples = None,
    time: AttemptTime = "",
    runs: SharedRuns = "",
    attempts: Attempts = None,
    after: After = None,
    sweep: Sweep = None,
    array_limit: ArrayLimit = 0,
    model: Model = "",
    samples: TuningOptions,
    wandb: Wandb = "",
    profiling: ProfileOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print everything; queue nothing.")] = False,
    resume: Annotated[str, typer.Option("--resume", help="Continue this run, even if stopped or cancelled.")] = "",
    build: Build = True,
) -> None:
    """Check a recipe against a cluster and queue it, with further attempts that continue it."""
    from superpod.cli.cluster import finetune_submit
    from superpod.cli.cluster.submit_resume import Continuation, go_on
    from superpod.slurm.preflight import dependency, preflight
    from superpod.slurm.submission import sweep as sweeps

    waits = [dependency.parse(text) for text in after or []]
    overrides = samples.with_steps(with_wandb(overrides, wandb, elsewhere=bool(wandb) and _is_far(cluster)))
    if resume:
        beside = (data, runs, sweep or array_limit, model or samples.given(), profiling.profile)
        _refuse_beside_resume(size.given() | dict(zip(BESIDE_RESUME, beside, strict=True)))
        go_on(Continuation(name, cluster, resume, tuple(overrides or ()), time, attempts, waits, dry_run, build))
        return
    swept = sweeps.combine(sweeps.parse_axes(sweep or [], array_limit))
    folder = None if model else _data_folder(data)
    requests, profile = _requests(name, cluster, overrides, swept, size, folder, time, runs, waits, profiling)
    task = finetune_submit.task_of(model, dataclasses.replace(samples, data=data), requests, profile)
    is_deferred = any(request.deferred_data for request in requests)
    count = attempts or profile.chain.attempts
    job = preflight.job_size(requests[0], profile, time=time, attempts=count, members=len(requests))
    slurm, live = facts_of(profile, runs, None if is_deferred else folder, job)
    claim = preflight.claim(requests[0], profile, live, job, runs)
    preflight.refuse_claim(claim)  # before NeMo is imported: a member of a sweep differs in what is built only
    dependencies = [str(wait) for wait in dependency.unmet(waits, slurm)]
    if is_deferred and not dependencies:
        raise UserError(f"--data {folder} does not exist, and {', '.join(after or [])} has ended", "look at its output")
    submissions = _submissions(requests, swept, profile, runs, time, live, count, task)
    with finetune_submit.discarded_on_failure(submissions[0]):
        require_built([submission.run for submission in submissions], build=build)
    notes = _notes(claim, requests[0], dependencies, slurm, on_mock_data=not model)
    for words in [*submissions[0].other_gpu_note, *notes]:
        print(f"# note: {words}" if dry_run else f"note   {words}")
    if dry_run:
        for member, submission in zip(swept, submissions, strict=True):
            _print_everything(submission, count, member, dependencies)
        if not sweep:
            print(slurm_submit().script(submissions[0]), end="")
        finetune_submit.discard(submissions[0])
        return
    if sweep:
        _queue_sweep(slurm, list(zip(swept, submissions, strict=True)), count, dependencies, array_limit)
        return
    with finetune_submit.discarded_on_failure(submissions[0]):
        run, jobs = slurm_submit().start(submissions[0], slurm, count, dependencies)
    _print_queued(submissions[0], run, jobs, dependencies, cluster if slurm.remote else "")


def _is_far(cluster: str) -> bool:
    """Whether a cluster is behind SSH."""
    from superpod.slurm.profiles import profiles

    return bool(profiles.load(cluster).login.host)


def _notes(
    claim: Claim, request: Request, dependencies: Sequence[str], slurm: Connection, *, on_mock_data: bool
) -> list[str]:
    """What to know of a submission: what makes it wait, what nobody has checked, what is trusted, what is not used."""
    from superpod.requests import deferred
    from superpod.slurm.preflight import inherited, preflight
    from superpod.slurm.profiles.checked_profiles import unchecked_findings

    notes = [f"{note.message}; {note.hint}" for note in (*preflight.notes(claim), *unchecked_findings(claim.cluster))]
    notes += [deferred.deferred_data_note(request, dependencies)] if request.deferred_data else []
    notes += request.mock_data_notes if on_mock_data else []
    notes += [NSYS_ON_NODES] if request.profile.startswith("nsys") else []
    ignored = "" if slurm.remote else inherited.ignored_note(os.environ)
    return [*notes, *filter(None, [ignored])]


def _data_folder(data: Sequence[str] | None) -> Path | None:
    """The one folder that training takes; of samples there may be several, which `--model` says."""
    if data and len(data) > 1:
        raise UserError(f"--data is given {len(data)} times", "one data folder; several files of samples need --model")
    return Path(data[0]) if data else None


def _print_queued(submission: Submission, run: str, jobs: QueuedJobs, dependencies: list[str], far: str) -> None:
    """What was queued; `far` is the cluster to ask for it, where that is not this machine's."""
    print(f"run    {run}")
    print(f"jobs   {jobs}: each continues where the one before it ended")
    if jobs.shortfall:
        print(f"note   {jobs.shortfall}")
    if short := slurm_submit().outlook(submission, len(jobs.ids)):
        print(f"chain  {short}; `recipes top-up` queues more")
    _print_dependencies(dependencies)
    print(f"proof  {_proof(submission)}")
    print(f"watch  recipes status {shlex.quote(run)}" + (f" --cluster {shlex.quote(far)}" if far else ""))


_REASONS = {
    **dict.fromkeys(
        ("--nodes", "--seq", "--gbs", "--batch-tokens", "--layout"), "a run keeps its size when it continues"
    ),
    "--data": "a run keeps its data, whose position its checkpoints hold",
    "--runs": "a run stays in its folder",
    "--sweep": "a sweep is made of new runs",
    "--model": "a run keeps its model and its samples",
    "--profile": "the profile of a run is decided when it starts",
}


BESIDE_RESUME = ("--data", "--runs", "--sweep", "--model", "--profile")


def _refuse_beside_resume(options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value:
            raise UserError(f"{option} with --resume: {_REASONS[option]}", f"leave out {option}, or start a new run")


def _requests(
    name: str,
    cluster: str,
    overrides: list[str] | None,
    swept: list[tuple[str, ...]],
    size: SizeOptions,
    data: Path | None,
    time: str,
    runs: str,
    waits: Sequence[Dependency],
    profiling: ProfileOptions,
) -> tuple[list[Request], Cluster]:
    """The request of every member, checked without NeMo, and the profile."""
    from superpod.requests import deferred

    to_be_made = data if waits and deferred.is_deferred(data) else None
    known = None if to_be_made else data
    results = [checked(name, cluster, [*(overrides or []), *member], size, known, time, runs) for member in swept]
    refuse_webhook(results[0][1])
    profile = profiling.require_there(results[0][1])
    requests = [dataclasses.replace(request, profile=profile) for request, _ in results]
    if to_be_made:
        requests = [deferred.with_deferred_data(request, to_be_made) for request in requests]
    return requests, results[0][1]


def _submissions(
    requests: list[Request],
    swept: list[tuple[str, ...]],
    profile: Cluster,
    runs: str,
    time: str,
    live: LiveCluster,
    attempts: int,
    task: Task | None = None,
) -> list[Submission]:
    """Every member resolved and checked against the cluster; refused together where any is."""
    from superpod.cli.cluster import finetune_submit
    from superpod.slurm.preflight import preflight
    from superpod.slurm.submission import sweep

    if task:
        return [finetune_submit.submission(requests[0], task, profile, live, runs, time, attempts)]
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
    sweep.require_disk_space(submissions, live.runs_free)
    return submissions


def _queue_sweep(
    slurm: Connection,
    members: list[tuple[tuple[str, ...], Submission]],
    count: int,
    dependencies: list[str],
    array_limit: int,
) -> None:
    from superpod.slurm.submission import sweep

    folder, jobs = sweep.queue(slurm, members, count, dependencies, array_limit)
    print(f"sweep  {folder}: {len(members)} runs" + (f", {array_limit} at once" if array_limit else ""))
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
    from superpod.collection.facts import proof_level
    from superpod.collection.registry import find

    run = submission.run
    return proof_level.sentence(find(submission.recipe), run.nodes, run.request.changes())


def _print_everything(
    submission: Submission, attempts: int, member: Sequence[str] = (), dependencies: Sequence[str] = ()
) -> None:
    """Print what a submission would do as comments, so that the whole output is still a script."""
    from superpod.slurm.preflight.preflight import START_S

    run, cluster, step = submission.run, submission.cluster, submission.step_time_s
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
