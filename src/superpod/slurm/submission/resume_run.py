"""`recipes submit --resume RUN`: queues more attempts of a run, optionally with a new time limit or overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.errors import UserError, counted
from superpod.launch.model_check import require_built
from superpod.slurm.preflight import preflight
from superpod.slurm.preflight.limits import JobSize
from superpod.slurm.profiles import profiles
from superpod.slurm.profiles.profile_values import seconds
from superpod.slurm.submission import connection, resume
from superpod.slurm.submission import submit as slurm_submit
from superpod.slurm.submission.request_checks import (
    connect_and_query,
    refuse_missing_resources,
    refuse_time,
    refuse_webhook,
    resolve_request,
)

if TYPE_CHECKING:
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.preflight.dependency import Dependency
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection
    from superpod.slurm.submission.submit import Submission

MAX_LINES = 20
"""Maximum number of changed fields to print."""


@dataclass(frozen=True)
class ResumeOptions:
    """Options of a `submit --resume` command line."""

    recipe: str
    cluster: str
    folder: str
    overrides: tuple[str, ...]
    time: str
    attempts: int | None
    waits: Sequence[Dependency]
    dry_run: bool
    build: bool = True


def resume_run(options: ResumeOptions) -> list[str]:
    """Queue attempts of an existing run, and return lines about the queued jobs to print.

    Raises:
        UserError: the run is on another machine, done, queued or of a different recipe, or a change is not possible.
    """
    from superpod.requests import restored_environment
    from superpod.runtime.attempts import guard
    from superpod.runtime.checkpoints import resume as checkpoint
    from superpod.runtime.health.node_checks import excluded_nodes
    from superpod.slurm.preflight import dependency
    from superpod.slurm.submission.top_up import queue_lock

    refuse_time(options.time)
    profile = profiles.load(options.cluster)
    refuse_webhook(profile)
    slurm = connection.connect(profile)
    run = _open_run(options, slurm)
    # File names and sizes are enough here, because the job reads the files before its ranks start.
    decision = checkpoint.decide_by_sizes(run)
    dependencies = [str(wait) for wait in dependency.unmet_dependencies(options.waits, slurm)]
    if options.time and not options.overrides:
        _refuse_time_limit(run, options, profile)
    submission = _changed_submission(run, options, profile) if options.overrides else None
    count = options.attempts or profile.chain.attempts
    if options.dry_run:
        time = options.time or resume.read_time_limit(run)
        return [f"# would queue {counted(count, 'attempt')} with a time limit of {time}"]
    with queue_lock(run), restored_environment.restored_variables(run):
        _refuse_queued(run, slurm)  # another command may have queued jobs while NeMo built the recipe
        with resume.restore_on_failure(run):
            if submission:
                resume.rewrite(run, submission)
            elif options.time:
                resume.set_time(run, options.time)
            guard.allow_resume(run)
            try:
                jobs = slurm_submit.queue(slurm, str(run.path), count, excluded_nodes(run), dependencies)
            except BaseException:  # the files are restored, so jobs that are already queued must not start
                slurm_submit.unqueue(slurm, [str(run.path)])
                raise
        slurm_submit.append_jobs(run, jobs.ids)
    lines = [f"jobs   {jobs}; the run resumes from step {decision.step}"]
    if jobs.shortfall:
        lines.append(f"note   {jobs.shortfall}")
    if decision.damaged or decision.lost_steps:
        lines.append(f"note   it {decision.message}")
    if dependencies:
        lines.append(f"dependency  {', '.join(dependencies)}")
    return lines


def _open_run(options: ResumeOptions, slurm: Connection) -> RunFolder:
    """Return the run to resume after the checks that need no NeMo. Raises UserError if one fails."""
    from superpod.requests import resume_changes
    from superpod.runtime.runs import owner
    from superpod.runtime.runs.run_folder import RunFolder

    if slurm.remote:
        raise UserError("--resume requires access to the run folder", "log in to the cluster and retry")
    run = RunFolder.open(options.folder)
    owner.refuse_others(run.path, "resume it", root_may=False)
    owner.refuse_unsafe(run.path)
    if run.recipe != options.recipe:
        raise UserError(f"{options.folder} is a run of {run.recipe}, not of {options.recipe}")
    if "finetune" in run.facts and options.overrides:
        raise UserError(
            f"{options.folder} is a fine-tuning run, whose packed samples and number of steps cannot be changed",
            "leave out the overrides, or submit a new run",
        )
    if run.has_pending_export:
        _refuse_queued(run, slurm)
        return run  # the next job exports the checkpoint
    if run.done and not options.overrides:
        step = run.facts.get("max_steps", 0)
        raise UserError(f"{options.folder} is done at step {step}", f"to train longer: trainer.max_steps={2 * step}")
    for change in resume_changes.find_changes(run, options.overrides):
        if change.note:
            print(f"note   {change}")
    _refuse_queued(run, slurm)
    return run


def _refuse_queued(run: RunFolder, slurm: Connection) -> None:
    """Raise UserError if a run has jobs in the queue, or its jobs are unknown."""
    from superpod.runtime.runs.run_state import State
    from superpod.slurm.status import run_views

    view = run_views.summarize_runs([run], slurm)[0]
    if view.state is State.UNREADABLE:
        raise UserError(f"{run.path} cannot be read: {view.message}", "repair the run folder first")
    if view.jobs is None:
        raise UserError("Slurm's controller does not answer, so the queued jobs are unknown", "try again later")
    if view.jobs:
        jobs = " ".join(job.id for job in view.jobs)
        raise UserError(
            f"{run.path} has jobs in the queue: {jobs}",
            "cancel them with `recipes cancel`, or change only their time limit with "
            f"`scontrol update JobId={view.jobs[0].id} TimeLimit=...`",
        )


def _refuse_time_limit(run: RunFolder, options: ResumeOptions, profile: Cluster) -> None:
    """Raise UserError if the cluster does not allow the new time limit, or it is less than twice chain.save_s."""
    if 2 * profile.chain.save_s > seconds(options.time):
        raise UserError(
            f"--time {options.time} must be at least 2 x chain.save_s ({profile.chain.save_s} s)",
            "pass a longer --time",
        )
    runs, facts = str(run.path.parents[1]), run.facts
    count = options.attempts or profile.chain.attempts
    size = JobSize(int(facts.get("nodes", 1)), int(facts.get("gpus_per_node", 1)), options.time, count)
    _, live = connect_and_query(profile, runs, None, size)
    refuse_missing_resources(preflight.Claim(profile, live, size, runs))


def _changed_submission(run: RunFolder, options: ResumeOptions, profile: Cluster) -> Submission:
    """Return the submission of a changed run after the checks of a new one, and print the changes.

    Raises:
        UserError: a check fails, or the changes are incompatible with the checkpoints.
    """
    from superpod.collection import installed
    from superpod.requests.request import Request

    before, request = Request.from_run(run), Request.from_run(run, options.overrides)
    request.check()
    installed.require("changing a resumed run")
    runs = str(run.path.parents[1])
    time, count = options.time or resume.read_time_limit(run), options.attempts or profile.chain.attempts
    size = preflight.job_size(request, profile, time=time, attempts=count)
    _, live = connect_and_query(profile, runs, request.data, size)
    refuse_missing_resources(preflight.Claim(profile, live, size, runs, request.data))
    after = resolve_request(request)
    resume.refuse_incompatible(resolve_request(before), after)
    require_built([after], build=options.build)
    if run.done and after.max_steps <= int(run.facts.get("max_steps", 0)):
        steps = run.facts["max_steps"]
        raise UserError(f"{run.path} is done at step {steps}", f"to train longer: trainer.max_steps={2 * steps}")
    submission = slurm_submit.Submission(after, profile, runs, time)
    preflight.refuse(preflight.findings(preflight.Case(submission, live, attempts=count)))
    for line in submission.other_gpu_note:
        print(f"note   {line}")
    changed = resume.changed_lines(run, after)
    for line in changed[:MAX_LINES]:
        print(f"change {line}")
    if len(changed) > MAX_LINES:
        print(f"change {counted(len(changed) - MAX_LINES, 'more field')}; compare recipe.txt before and after")
    return submission
