"""`recipes submit`: check a recipe against a cluster and queue it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.profile_option import ProfileOptions, with_profile
from superpod.cli.options.request_options import (
    AttemptTime,
    Build,
    Name,
    Overrides,
    SharedRuns,
    TargetCluster,
    make_request,
)
from superpod.cli.options.sample_options import TuningOptions
from superpod.cli.options.shared_options import spread
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.cli.options.wandb_option import Wandb, with_wandb
from superpod.errors import UserError, counted
from superpod.slurm.profiles import profiles

if TYPE_CHECKING:
    from superpod.launch.finetuning.finetune import Task
    from superpod.requests.request import Request
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.new_runs import CheckedRuns, SubmitOptions
    from superpod.slurm.submission.submit import QueuedJobs, Submission

Model = Annotated[
    str,
    typer.Option("--model", "--hf", help="Hugging Face folder of a model to fine-tune on the samples in --data."),
]
Attempts = Annotated[
    int | None,
    typer.Option("--attempts", min=1, max=50, help="Number of jobs to queue now. Default: from the profile."),
]
After = Annotated[
    list[str] | None,
    typer.Option(
        "--after", metavar="JOB[:TYPE]", help="Start after this job. TYPE: afterok, afterany, ... Repeatable."
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="PATH=V1,V2", help="Submit one run per value; if repeated, one per combination."),
]
DataOrSamples = Annotated[
    list[str] | None,
    typer.Option("--data", help="Data folder. With --model: samples (FILE:0.3 sets the weight of a file), repeatable."),
]
ArrayLimit = Annotated[
    int,
    typer.Option("--array-limit", min=0, help="Maximum number of concurrent runs, like sbatch --array=...%N; 0 = all."),
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the checks and the script; queue nothing.")] = False,
    resume: Annotated[str, typer.Option("--resume", help="Run folder to resume, even if stopped or cancelled.")] = "",
    build: Build = True,
) -> None:
    """Check a recipe against a cluster, and queue a job that trains it and further jobs that resume it."""
    from superpod.slurm.preflight import dependency
    from superpod.slurm.submission import finetuning, new_runs, request_checks
    from superpod.slurm.submission import submit as slurm_submit
    from superpod.slurm.submission import sweep as sweeps
    from superpod.slurm.submission.resume_run import ResumeOptions, resume_run

    waits = [dependency.parse(text) for text in after or []]
    is_remote = bool(wandb) and bool(profiles.load(cluster).login.host)
    overrides = samples.with_steps(with_wandb(overrides, wandb, is_remote=is_remote))
    if resume:
        new_run_options = {
            "--data": data,
            "--runs": runs,
            "--sweep": sweep or array_limit,
            "--model": model or samples.first_changed_option(),
            "--profile": profiling.profile,
        }
        _refuse_with_resume(size.given_options() | new_run_options)
        resumed = ResumeOptions(name, cluster, resume, tuple(overrides), time, attempts, waits, dry_run, build)
        print("\n".join(resume_run(resumed)))
        return
    combinations = sweeps.combine(sweeps.parse_axes(sweep or [], array_limit))
    folder = None if model else _data_folder(data)
    profile = request_checks.load_profile(cluster, time, runs)
    options = new_runs.SubmitOptions(profile, combinations, runs, time, attempts, tuple(after or ()), build)
    requests = _requests(name, overrides, folder, size, options, profiling)
    task = finetune_task(model, dataclasses.replace(samples, data=data), requests, profile)
    checked = new_runs.check_runs(requests, task, options)
    submission = checked.submissions[0]
    for note in checked.notes:
        print(f"# note: {note}" if dry_run else f"note   {note}")
    if dry_run:
        for member, one in zip(combinations, checked.submissions, strict=True):
            _print_dry_run(one, options.count, member, checked.dependencies)
        if not sweep:
            print(slurm_submit.script(submission), end="")
        finetuning.discard(submission)
        return
    if sweep:
        _queue_sweep(checked, options, array_limit)
        return
    with finetuning.discard_on_failure(submission):
        run, jobs = slurm_submit.start(submission, checked.slurm, options.count, checked.dependencies)
    _print_queued(submission, run, jobs, checked.dependencies, cluster if checked.slurm.remote else "")


def _requests(
    name: str,
    overrides: list[str],
    data: Path | None,
    size: SizeOptions,
    options: SubmitOptions,
    profiling: ProfileOptions,
) -> list[Request]:
    """Return the request of each run of a command line, after the checks that need no NeMo.

    Raises:
        UserError: a check fails.
    """
    from superpod.requests import deferred
    from superpod.slurm.submission import request_checks

    deferred_data = data if options.waits and deferred.is_deferred(data) else None
    requests = []
    for member in options.combinations:
        request = make_request(name, [*overrides, *member], None if deferred_data else data, size)
        request_checks.check_request(request, options.profile)
        requests.append(request)
    request_checks.refuse_webhook(options.profile)
    profiling_text = profiling.check_on_cluster(options.profile)
    requests = [dataclasses.replace(request, profile=profiling_text) for request in requests]
    if deferred_data:
        requests = [deferred.with_deferred_data(request, deferred_data) for request in requests]
    return requests


def finetune_task(model: str, samples: TuningOptions, requests: Sequence[Request], profile: Cluster) -> Task | None:
    """Return the fine-tuning task for a command line, after the checks that need no NeMo; None if `model` is "".

    Args:
        model: Hugging Face folder.
        samples: sample options of the command line.
        requests: requests of the command line; a sweep is not supported.
        profile: cluster to submit to; a cluster behind SSH is not supported.

    Raises:
        UserError: an option is missing, or is not supported in this combination.
    """
    from superpod.slurm.submission import finetuning

    if not model:
        option = samples.first_changed_option()
        if option:
            raise UserError(f"{option} applies only to fine-tuning", f"add --model, or leave out {option}")
        return None
    if not samples.data:
        raise UserError("--model requires --data, the samples to fine-tune on", "see `recipes finetune --help`")
    return finetuning.check_task(samples.task(model), requests, profile)


def _data_folder(data: Sequence[str] | None) -> Path | None:
    """Return the data folder from --data; None without --data. Raises UserError for several without --model."""
    if not data:
        return None
    if len(data) > 1:
        raise UserError(f"--data is given {len(data)} times", "pass it once, or add --model to fine-tune on samples")
    return Path(data[0])


def _print_queued(submission: Submission, run: str, jobs: QueuedJobs, dependencies: list[str], remote: str) -> None:
    """Print the run folder, the jobs and the next commands; `remote` is the cluster profile if behind SSH, else ""."""
    from superpod.slurm.submission import submit as slurm_submit

    print(f"run    {run}")
    print(f"jobs   {jobs}; each resumes from the last checkpoint of the previous one")
    if jobs.shortfall:
        print(f"note   {jobs.shortfall}")
    warning = slurm_submit.chain_warning(submission, len(jobs.ids))
    if warning:
        print(f"chain  {warning}; `recipes top-up` queues more jobs")
    _print_dependencies(dependencies)
    print(f"proof  {_proof(submission)}")
    command = f"recipes status {shlex.quote(run)}"
    if remote:
        command += f" --cluster {shlex.quote(remote)}"
    print(f"watch  {command}")


_REFUSED_WITH_RESUME = {
    "--data": "a resumed run keeps its data, because its checkpoints contain the position in the data",
    "--runs": "a resumed run keeps its folder",
    "--sweep": "a sweep starts new runs",
    "--model": "a resumed run keeps its model and samples",
    "--profile": "profiling is set when a run is submitted",
}


def _refuse_with_resume(options: Mapping[str, object]) -> None:
    """Raise UserError if one of the options has a value."""
    for option, value in options.items():
        if value:
            reason = _REFUSED_WITH_RESUME.get(option, "a resumed run keeps its size")
            raise UserError(f"{option} conflicts with --resume: {reason}", f"leave out {option}, or start a new run")


def _queue_sweep(checked: CheckedRuns, options: SubmitOptions, array_limit: int) -> None:
    """Queue the runs of a sweep and print their folders and jobs."""
    from superpod.slurm.submission import sweep

    members = list(zip(options.combinations, checked.submissions, strict=True))
    folder, jobs = sweep.queue(checked.slurm, members, options.count, checked.dependencies, array_limit)
    limit = f", {array_limit} at a time" if array_limit else ""
    print(f"sweep  {folder}: {counted(len(members), 'run')}{limit}")
    for (overrides, _), (run, queued) in zip(members, jobs.items(), strict=True):
        print(f"run    {run}  {' '.join(overrides)}  jobs {queued}")
    shortfalls = [queued.shortfall for queued in jobs.values() if queued.shortfall]
    if shortfalls:
        print(
            f"note   {len(shortfalls)} of {len(jobs)} runs have fewer jobs than needed: {shortfalls[0]}; "
            "`recipes top-up` queues more"
        )
    _print_dependencies(checked.dependencies)
    print(f"proof  {_proof(checked.submissions[0])}")
    print(f"table  recipes report {shlex.quote(folder)}")


def _print_dependencies(dependencies: list[str]) -> None:
    if dependencies:
        print(f"dependency  {', '.join(dependencies)}")


def _proof(submission: Submission) -> str:
    """Return a sentence about the proof level of the submitted recipe."""
    from superpod.collection.facts import proof_level
    from superpod.collection.registry import find

    run = submission.run
    return proof_level.sentence(find(submission.recipe), run.nodes, run.request.changes())


def _print_dry_run(submission: Submission, attempts: int, member: Sequence[str], dependencies: Sequence[str]) -> None:
    """Print the layout, duration and jobs of a submission as comments, so that the output remains a valid script."""
    from superpod.slurm.preflight.preflight import START_S
    from superpod.slurm.submission import submit as slurm_submit

    run, cluster, step = submission.run, submission.cluster, submission.step_time_s
    degrees = {name: getattr(run.layout, name) for name in ("tp", "pp", "cp", "ep")}
    if member:
        print(f"# run of the sweep: {' '.join(member)}")
    print(f"# proof: {_proof(submission)}")
    print(f"# preflight passed: {counted(run.nodes, 'node')} x {run.gpus_per_node} GPUs on {cluster.name}")
    print(f"# layout: {', '.join(f'{name} {value}' for name, value in degrees.items())}")
    print(f"# checkpoint: {run.checkpoint_bytes / 2**30:,.1f} GiB, every {run.save_every} steps")
    if step and not cluster.declared_only:
        print(f"# steps: {run.max_steps} of {step:.2f} s take {run.max_steps * step / 3600:,.1f} h,")
        print(f"#   plus {START_S} s to start each attempt, whose limit is {submission.time or cluster.slurm.time}")
    warning = slurm_submit.chain_warning(submission, attempts)
    if warning:
        print(f"# chain: {warning}: raise --attempts or --time")
    print(f"# run folder: {submission.folder}/{submission.recipe}/TIME-ID; {counted(attempts, 'job')} to queue")
    if dependencies:
        print(f"# dependency: {', '.join(dependencies)}")
    print("#" + "-" * 100)
