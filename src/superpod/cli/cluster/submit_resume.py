"""`recipes submit --resume RUN`: more attempts of a run, with another time limit or other overrides where given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.cli.cluster.submit_checks import (
    facts_of,
    refuse_time,
    refuse_unmet,
    refuse_webhook,
    resolved,
    slurm_submit,
)
from superpod.cli.running.validated import require_built
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.preflight.dependency import Dependency
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection
    from superpod.slurm.submission.submit import Submission

MOST_LINES = 20
"""Changed fields that are printed; the rest is counted."""


@dataclass(frozen=True)
class Continuation:
    """What `--resume` was given."""

    recipe: str
    cluster: str
    folder: str
    overrides: tuple[str, ...]
    time: str
    attempts: int | None
    waits: Sequence[Dependency]
    dry_run: bool
    build: bool = True


def go_on(how: Continuation) -> None:
    """Queue attempts of an existing run.

    Raises:
        UserError: the run is elsewhere, done, in the queue or of another recipe; or what a change would break.
    """
    from superpod.requests import run_environment
    from superpod.runtime.attempts import guard
    from superpod.runtime.checkpoints import resume as checkpoint
    from superpod.runtime.health.first_step import excluded
    from superpod.slurm.preflight import dependency
    from superpod.slurm.profiles import profiles
    from superpod.slurm.submission import connection, resume
    from superpod.slurm.submission.top_up import queueing

    refuse_time(how.time)
    profile = profiles.load(how.cluster)
    refuse_webhook(profile)
    slurm = connection.connect(profile)
    run = _run_of(how, slurm)
    decided = checkpoint.decide_by_sizes(run)
    dependencies = [str(wait) for wait in dependency.unmet(how.waits, slurm)]
    if how.time and not how.overrides:
        _refuse_time_limit(run, how, profile)
    submission = _submission(run, how, profile) if how.overrides else None
    count = how.attempts or profile.chain.attempts
    if how.dry_run:
        print(f"# {count} attempts of {how.time or resume.read_time_limit(run)} would be queued")
        return
    with queueing(run), run_environment.restored_variables(run):
        _refuse_queued(run, slurm)  # another command may have queued some while NeMo built the recipe
        with resume.restored_on_failure(run):
            if submission:
                resume.rewrite(run, submission)
            elif how.time:
                resume.set_time(run, how.time)
            guard.allow_resume(run)
            try:
                jobs = slurm_submit().queue(slurm, str(run.path), count, excluded(run), dependencies)
            except BaseException:  # Ctrl-C: a job that is queued already would meet the files as they were
                slurm_submit().unqueue(slurm, [str(run.path)])
                raise
        slurm_submit().note(run, jobs.ids)
    print(f"jobs   {jobs}: the run continues from step {decided.step}")
    if jobs.shortfall:
        print(f"note   {jobs.shortfall}")
    if decided.damaged or decided.lost_steps:
        print(f"note   it {decided.words}")
    if dependencies:
        print(f"waits  for {', '.join(dependencies)}")


def _run_of(how: Continuation, slurm: Connection) -> RunFolder:
    """The run to continue. What stands against it is refused before NeMo is imported."""
    from superpod.requests import resume_changes
    from superpod.runtime.runs import owner
    from superpod.runtime.runs.run_folder import RunFolder

    if slurm.remote:
        raise UserError("--resume works only where the run folder is", "log in to the cluster first")
    run = RunFolder.open(how.folder)
    owner.refuse_others(run.path, "let it go on", root_may=False)
    owner.refuse_unsafe(run.path)
    if run.recipe != how.recipe:
        raise UserError(f"{how.folder} is a run of {run.recipe}, not of {how.recipe}")
    if "finetune" in run.facts and how.overrides:
        raise UserError(
            f"{how.folder} is a fine-tuning: its samples are packed and its steps are set for what it was submitted as",
            "leave out the changes, or submit a new run",
        )
    if run.has_pending_export:
        _refuse_queued(run, slurm)
        return run  # the next job exports
    if run.done and not how.overrides:
        step = run.facts.get("max_steps", 0)
        raise UserError(f"{how.folder} is done at step {step}", f"give it more steps: trainer.max_steps={2 * step}")
    for change in resume_changes.find_changes(run, how.overrides):
        if change.words:
            print(f"note   {change}")
    _refuse_queued(run, slurm)
    return run


def _refuse_queued(run: RunFolder, slurm: Connection) -> None:
    from superpod.runtime.runs.run_state import State
    from superpod.slurm.status import run_views

    seen = run_views.summarize_runs([run], slurm)[0]
    if seen.state is State.UNREADABLE:
        raise UserError(f"{run.path} cannot be read: {seen.message}", "mend it first: its jobs are not known either")
    if seen.jobs is None:
        raise UserError("Slurm's controller does not answer, so nobody knows what is queued", "try again later")
    if queued := seen.jobs:
        jobs = " ".join(job.id for job in queued)
        raise UserError(
            f"{run.path} has jobs in the queue: {jobs}",
            f"`recipes cancel` first; another limit alone: scontrol update JobId={queued[0].id} TimeLimit=...",
        )


def _refuse_time_limit(run: RunFolder, how: Continuation, profile: Cluster) -> None:
    """Refuse a time limit that the cluster does not allow, or that leaves no time beside the last save."""
    from superpod.slurm.preflight import preflight
    from superpod.slurm.preflight.limits import JobSize
    from superpod.slurm.profiles.profile_values import seconds

    if 2 * profile.chain.save_s > seconds(how.time):
        raise UserError(
            f"--time {how.time} leaves too little before chain.save_s {profile.chain.save_s}", "a longer --time"
        )
    runs, facts = str(run.path.parents[1]), run.facts
    count = how.attempts or profile.chain.attempts
    size = JobSize(int(facts.get("nodes", 1)), int(facts.get("gpus_per_node", 1)), how.time, count)
    _, live = facts_of(profile, runs, None, size)
    refuse_unmet(preflight.Claim(profile, live, size, runs))


def _submission(run: RunFolder, how: Continuation, profile: Cluster) -> Submission:
    """The run with its changes, checked as a new submission is; prints what changes."""
    from superpod.collection import installed
    from superpod.requests.request import Request
    from superpod.slurm.preflight import preflight
    from superpod.slurm.submission import resume

    before, request = Request.from_run(run), Request.from_run(run, how.overrides)
    request.check()
    installed.require("changing a run that goes on, field by field,")
    runs = str(run.path.parents[1])
    time, count = how.time or resume.read_time_limit(run), how.attempts or profile.chain.attempts
    size = preflight.job_size(request, profile, time=time, attempts=count)
    _, live = facts_of(profile, runs, request.data, size)
    refuse_unmet(preflight.claim(request, profile, live, size, runs))
    after = resolved(request)
    resume.refuse_incompatible(resolved(before), after)
    require_built([after], build=how.build)
    if run.done and after.max_steps <= int(run.facts.get("max_steps", 0)):
        steps = run.facts["max_steps"]
        raise UserError(f"{run.path} is done at step {steps}", f"give it more steps: trainer.max_steps={2 * steps}")
    submission = slurm_submit().Submission(after, profile, runs, time)
    preflight.refuse(preflight.Case(submission, live, attempts=count))
    for line in submission.other_gpu_note:
        print(f"note   {line}")
    changed = resume.changed_lines(run, after)
    for line in changed[:MOST_LINES]:
        print(f"change {line}")
    if len(changed) > MOST_LINES:
        print(f"change ... and {len(changed) - MOST_LINES} more fields: compare recipe.txt before and after")
    return submission
