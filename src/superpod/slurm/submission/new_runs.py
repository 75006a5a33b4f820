"""Checks new runs of `recipes submit` against a cluster, resolves them, and builds their models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.launch.model_check import require_built
from superpod.slurm.preflight import dependency, inherited, preflight
from superpod.slurm.submission import finetuning, request_checks, sweep
from superpod.slurm.submission.submit import Submission

if TYPE_CHECKING:
    from superpod.launch.finetuning.finetune import Task
    from superpod.requests.request import Request
    from superpod.slurm.preflight.dependency import Dependency
    from superpod.slurm.preflight.preflight import Claim
    from superpod.slurm.profiles.live_cluster import LiveCluster
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection

NSYS_ON_NODES = "nsys must be on the PATH of the ranks, or they are not profiled; it cannot be checked here"


@dataclass(frozen=True)
class SubmitOptions:
    """Options of a command line that submits new runs."""

    profile: Cluster
    combinations: Sequence[tuple[str, ...]] = ((),)
    """additional overrides of each run; several for a sweep"""
    runs: str = ""
    """folder for runs; "" = that of the profile"""
    time: str = ""
    """time limit per attempt; "" = that of the profile"""
    attempts: int | None = None
    """number of jobs to queue per run; None = that of the profile"""
    after: Sequence[str] = ()
    """jobs to wait for, as JOB or JOB:TYPE"""
    build: bool = True
    """build the models of three ranks first if overrides change the recipe"""

    @property
    def waits(self) -> list[Dependency]:
        """The jobs to wait for."""
        return [dependency.parse(text) for text in self.after]

    @property
    def count(self) -> int:
        """The number of jobs to queue per run."""
        return self.attempts or self.profile.chain.attempts

    def submission(self, request: Request, live: LiveCluster, label: str = "") -> Submission:
        """Return the submission of a request, after checking it against the cluster.

        `label` is appended to the progress message (see `resolve_request`). Raises UserError if a check fails.
        """
        submission = Submission(request_checks.resolve_request(request, label), self.profile, self.runs, self.time)
        preflight.refuse(preflight.findings(preflight.Case(submission, live, attempts=self.count)))
        return submission


@dataclass(frozen=True)
class CheckedRuns:
    """Runs that passed all checks and can be queued."""

    submissions: list[Submission]
    slurm: Connection
    dependencies: list[str]
    """sbatch dependencies, such as afterok:123, that are not met yet"""
    notes: list[str]


def check_runs(requests: Sequence[Request], task: Task | None, options: SubmitOptions) -> CheckedRuns:
    """Check new runs against the cluster and build their models if necessary. Queues nothing.

    Args:
        requests: one request per combination of overrides, which have passed `request_checks.check_request`.
        task: the model and the samples of a fine-tuning run; None for other runs.
        options: the other options of the command line.

    Raises:
        UserError: a run cannot be submitted.
    """
    profile, first = options.profile, requests[0]
    job = preflight.job_size(first, profile, time=options.time, attempts=options.count, members=len(requests))
    data = None if first.deferred_data else first.data
    slurm, live = request_checks.connect_and_query(profile, options.runs, data, job)
    claim = preflight.Claim(profile, live, job, options.runs or profile.folders.runs, first.data)
    # Before NeMo is imported; all runs of a sweep claim the same resources.
    preflight.refuse(preflight.claim_findings(claim))
    dependencies = [str(wait) for wait in dependency.unmet_dependencies(options.waits, slurm)]
    if first.deferred_data and not dependencies:
        raise UserError(
            f"--data {first.data} does not exist, although --after {', '.join(options.after)} is met",
            "see the output of that job",
        )
    submissions = _submissions(requests, task, live, options)
    with finetuning.discard_on_failure(submissions[0]):
        require_built([submission.run for submission in submissions], build=options.build)
    notes = _notes(claim, first, dependencies, slurm, may_use_mock_data=task is None)
    return CheckedRuns(submissions, slurm, dependencies, [*submissions[0].other_gpu_note, *notes])


def _submissions(
    requests: Sequence[Request], task: Task | None, live: LiveCluster, options: SubmitOptions
) -> list[Submission]:
    """Return the submission of each run. Raises UserError with the problems of all runs that cannot be submitted."""
    if task:
        return [finetuning.finetune_submission(requests[0], task, live, options)]
    if len(requests) == 1:
        return [options.submission(requests[0], live)]
    submissions, refused = [], []
    for number, (member, request) in enumerate(zip(options.combinations, requests, strict=True), 1):
        try:
            submissions.append(options.submission(request, live, f": run {number} of {len(requests)}"))
        except UserError as error:
            hint = f"\n  next: {error.hint}" if error.hint else ""
            refused.append(f"{' '.join(member)}: {error}{hint}")
    if refused:
        summary = f"{len(refused)} of {len(requests)} runs of the sweep cannot be submitted"
        raise UserError("\n".join([summary, *refused]))
    sweep.require_disk_space(submissions, live.runs_free)
    return submissions


def _notes(
    claim: Claim, request: Request, dependencies: Sequence[str], slurm: Connection, *, may_use_mock_data: bool
) -> list[str]:
    """Return notes on a submission: reservations, unchecked settings, and ignored environment variables."""
    from superpod.requests import deferred
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
