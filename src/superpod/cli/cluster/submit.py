"""`recipes submit`: check a recipe against a cluster and queue it."""

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
    check_request,
    connect_and_query,
    refuse_webhook,
    resolve_request,
    slurm_submit,
)
from superpod.cli.options.profile_option import NSYS_ON_NODES, ProfileOptions, with_profile
from superpod.cli.options.request_options import Build, Name, Overrides
from superpod.cli.options.sample_options import TuningOptions
from superpod.cli.options.shared_options import spread
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.cli.options.wandb_option import Wandb, with_wandb
from superpod.errors import UserError
from superpod.launch.model_check import require_built

if TYPE_CHECKING:
    from superpod.launch.finetuning.finetune import Task
    from superpod.requests.request import Request
    from superpod.slurm.preflight.dependency import Dependency
    from superpod.slurm.preflight.preflight import Claim
    from superpod.slurm.profiles.live_cluster import LiveCluster
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection
    from superpod.slurm.submission.submit import QueuedJobs, Submission

Attempts = Annotated[
    int | None,
    typer.Option("--attempts", min=1, max=50, help="Number of jobs to queue now. Default: from the profile."),
]
After = Annotated[
    list[str] | None,
    typer.Option(
        "--after", metavar="JOB[:TYPE]", help="Start after this job; TYPE: afterok (default), afterany, ... Repeatable."
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep", metavar="PATH=V1,V2", help="Submit one run per value; if repeated, one per combination of values."
    ),
]
DataOrSamples = Annotated[
    list[str] | None,
    typer.Option(
        "--data", help="Data folder; with --model, a sample file or folder, repeatable; FILE:0.3 sets its weight."
    ),
]
ArrayLimit = Annotated[
    int,
    typer.Option(
        "--array-limit", min=0, help="Maximum number of runs of a sweep at once, as in sbatch --array=...%N; 0 = all."
    ),
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
    resume: Annotated[
        str, typer.Option("--resume", help="Folder of the run to resume, even if it was stopped or cancelled.")
    ] = "",
    build: Build = True,
) -> None:
    """Check a recipe against a cluster and queue it, with further jobs that resume it after each time limit."""
    from superpod.cli.cluster import finetune_submit
    from superpod.cli.cluster.submit_resume import ResumeOptions, resume_run
    from superpod.slurm.preflight import dependency, preflight
    from superpod.slurm.submission import sweep as sweeps

    waits = [dependency.parse(text) for text in after or []]
    overrides = samples.with_steps(with_wandb(overrides, wandb, elsewhere=bool(wandb) and _is_remote(cluster)))
    if resume:
        new_run_options = {
            "--data": data,
            "--runs": runs,
            "--sweep": sweep or array_limit,
            "--model": model or samples.first_changed_option(),
            "--profile": profiling.profile,
        }
        _refuse_with_resume(size.given_options() | new_run_options)
        resume_run(ResumeOptions(name, cluster, resume, tuple(overrides or ()), time, attempts, waits, dry_run, build))
        return
    combinations = sweeps.combine(sweeps.parse_axes(sweep or [], array_limit))
    folder = None if model else _data_folder(data)
    requests, profile = _requests(name, cluster, overrides, combinations, size, folder, time, runs, waits, profiling)
    task = finetune_submit.finetune_task(model, dataclasses.replace(samples, data=data), requests, profile)
    is_deferred = any(request.deferred_data for request in requests)
    count = attempts or profile.chain.attempts
    job = preflight.job_size(requests[0], profile, time=time, attempts=count, members=len(requests))
    slurm, live = connect_and_query(profile, runs, None if is_deferred else folder, job)
    claim = preflight.claim(requests[0], profile, live, job, runs)
    preflight.refuse_claim(claim)  # before NeMo is imported; all runs of a sweep claim the same resources
    dependencies = [str(wait) for wait in dependency.unmet_dependencies(waits, slurm)]
    if is_deferred and not dependencies:
        raise UserError(
            f"--data {folder} does not exist, although {', '.join(after or [])} has ended", "see the output of that job"
        )
    submissions = _submissions(requests, combinations, profile, runs, time, live, count, task)
    with finetune_submit.discard_on_failure(submissions[0]):
        require_built([submission.run for submission in submissions], build=build)
    notes = _notes(claim, requests[0], dependencies, slurm, may_use_mock_data=not model)
    for note in [*submissions[0].other_gpu_note, *notes]:
        print(f"# note: {note}" if dry_run else f"note   {note}")
    if dry_run:
        for member, submission in zip(combinations, submissions, strict=True):
            _print_dry_run(submission, count, member, dependencies)
        if not sweep:
            print(slurm_submit().script(submissions[0]), end="")
        finetune_submit.discard(submissions[0])
        return
    if sweep:
        _queue_sweep(slurm, list(zip(combinations, submissions, strict=True)), count, dependencies, array_limit)
        return
    with finetune_submit.discard_on_failure(submissions[0]):
        run, jobs = slurm_submit().start(submissions[0], slurm, count, dependencies)
    _print_queued(submissions[0], run, jobs, dependencies, cluster if slurm.remote else "")


def _is_remote(cluster: str) -> bool:
    """Return whether a cluster is behind SSH."""
    from superpod.slurm.profiles import profiles

    return bool(profiles.load(cluster).login.host)


def _notes(
    claim: Claim, request: Request, dependencies: Sequence[str], slurm: Connection, *, may_use_mock_data: bool
) -> list[str]:
    """Return notes on a submission: expected waits, unchecked settings, and ignored environment variables."""
    from superpod.requests import deferred
    from superpod.slurm.preflight import inherited, preflight
    from superpod.slurm.profiles.checked_profiles import unchecked_findings

    notes = [f"{note.message}; {note.hint}" for note in (*preflight.notes(claim), *unchecked_findings(claim.cluster))]
    if request.deferred_data:
        notes.append(deferred.deferred_data_note(request, dependencies))
    if may_use_mock_data:
        notes += request.mock_data_notes
    if request.profile.startswith("nsys"):
        notes.append(NSYS_ON_NODES)
    ignored = "" if slurm.remote else inherited.ignored_note(os.environ)
    if ignored:
        notes.append(ignored)
    return notes


def _data_folder(data: Sequence[str] | None) -> Path | None:
    """Return the data folder from --data. Raises UserError for more than one, which only --model supports."""
    if not data:
        return None
    if len(data) > 1:
        raise UserError(f"--data is given {len(data)} times", "pass one data folder; several sample files need --model")
    return Path(data[0])


def _print_queued(submission: Submission, run: str, jobs: QueuedJobs, dependencies: list[str], remote: str) -> None:
    """Print what was queued; `remote` is the cluster if it is behind SSH, else ""."""
    print(f"run    {run}")
    print(f"jobs   {jobs}: each continues where the previous one ended")
    if jobs.shortfall:
        print(f"note   {jobs.shortfall}")
    warning = slurm_submit().chain_warning(submission, len(jobs.ids))
    if warning:
        print(f"chain  {warning}; `recipes top-up` queues more")
    _print_dependencies(dependencies)
    print(f"proof  {_proof(submission)}")
    command = f"recipes status {shlex.quote(run)}"
    if remote:
        command += f" --cluster {shlex.quote(remote)}"
    print(f"watch  {command}")


_REFUSED_WITH_RESUME = {
    "--data": "a resumed run keeps its data, because its checkpoints store the position in it",
    "--runs": "a resumed run keeps its folder",
    "--sweep": "a sweep starts new runs",
    "--model": "a resumed run keeps its model and samples",
    "--profile": "profiling is set when a run is submitted",
}


def _refuse_with_resume(options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value:
            reason = _REFUSED_WITH_RESUME.get(option, "a resumed run keeps its size")
            raise UserError(f"{option} conflicts with --resume: {reason}", f"leave out {option}, or start a new run")


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
    """Return the request of each run, checked without NeMo, and the cluster profile."""
    from superpod.requests import deferred

    deferred_data = data if waits and deferred.is_deferred(data) else None
    existing_data = None if deferred_data else data
    results = [
        check_request(name, cluster, [*(overrides or []), *member], size, existing_data, time, runs) for member in swept
    ]
    profile = results[0][1]
    refuse_webhook(profile)
    profiling_text = profiling.check_on_cluster(profile)
    requests = [dataclasses.replace(request, profile=profiling_text) for request, _ in results]
    if deferred_data:
        requests = [deferred.with_deferred_data(request, deferred_data) for request in requests]
    return requests, profile


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
    """Resolve each run and check it against the cluster. Raises UserError that lists the problems of all runs."""
    from superpod.cli.cluster import finetune_submit
    from superpod.slurm.preflight import preflight
    from superpod.slurm.submission import sweep

    if task:
        return [finetune_submit.finetune_submission(requests[0], task, profile, live, runs, time, attempts)]
    if len(requests) == 1:
        submission = slurm_submit().Submission(resolve_request(requests[0]), profile, runs, time)
        preflight.refuse(preflight.Case(submission, live, attempts=attempts))
        return [submission]
    submissions, refused = [], []
    for number, (member, request) in enumerate(zip(swept, requests, strict=True), 1):
        try:
            which = f": run {number} of {len(requests)}"
            submission = slurm_submit().Submission(resolve_request(request, which), profile, runs, time)
            preflight.refuse(preflight.Case(submission, live, attempts=attempts))
            submissions.append(submission)
        except UserError as error:
            hint = f"\n  next: {error.hint}" if error.hint else ""
            refused.append(f"{' '.join(member)}: {error}{hint}")
    if refused:
        summary = f"{len(refused)} of {len(requests)} runs of the sweep cannot be submitted"
        raise UserError("\n".join([summary, *refused]))
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
    limit = f", {array_limit} at once" if array_limit else ""
    print(f"sweep  {folder}: {len(members)} runs{limit}")
    for (overrides, _), (run, queued) in zip(members, jobs.items(), strict=True):
        print(f"run    {run}  {' '.join(overrides)}  jobs {queued}")
    shortfalls = [queued.shortfall for queued in jobs.values() if queued.shortfall]
    if shortfalls:
        first = shortfalls[0]
        print(f"note   {len(shortfalls)} of {len(jobs)} runs have fewer jobs: {first}; `recipes top-up` queues more")
    _print_dependencies(dependencies)
    print(f"proof  {_proof(members[0][1])}")
    print(f"table  recipes report {shlex.quote(folder)}")


def _print_dependencies(dependencies: list[str]) -> None:
    if dependencies:
        print(f"dependency  {', '.join(dependencies)}")


def _proof(submission: Submission) -> str:
    """Describe the recipe's proof level in a sentence."""
    from superpod.collection.facts import proof_level
    from superpod.collection.registry import find

    run = submission.run
    return proof_level.sentence(find(submission.recipe), run.nodes, run.request.changes())


def _print_dry_run(
    submission: Submission, attempts: int, member: Sequence[str] = (), dependencies: Sequence[str] = ()
) -> None:
    """Print what a submission would do, as comments, so that the output remains a valid script."""
    from superpod.slurm.preflight.preflight import START_S

    run, cluster, step = submission.run, submission.cluster, submission.step_time_s
    degrees = {name: getattr(run.layout, name) for name in ("tp", "pp", "cp", "ep")}
    if member:
        print(f"# run of the sweep: {' '.join(member)}")
    print(f"# proof: {_proof(submission)}")
    print(f"# preflight: no problem found; {run.nodes} nodes x {run.gpus_per_node} GPUs on {cluster.name}")
    print(f"# layout: {', '.join(f'{name} {value}' for name, value in degrees.items())}")
    print(f"# checkpoint: {run.checkpoint_bytes / 2**30:,.1f} GiB, every {run.save_every} steps")
    if step and not cluster.declared_only:
        print(f"# steps: {run.max_steps} of {step:.2f} s take {run.max_steps * step / 3600:,.1f} h,")
        print(f"#   plus {START_S} s to start each attempt, whose limit is {submission.time or cluster.slurm.time}")
    warning = slurm_submit().chain_warning(submission, attempts)
    if warning:
        print(f"# chain: {warning}: raise --attempts or --time")
    print(f"# run folder: {submission.folder}/{submission.recipe}/TIME-ID; jobs queued at once: {attempts}")
    if dependencies:
        print(f"# dependency: {', '.join(dependencies)}")
    print("#" + "-" * 100)
