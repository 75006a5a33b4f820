"""Submits a fine-tuning run: checks its model and samples, packs the samples, and removes them if it is not queued."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.launch.display import consoles

if TYPE_CHECKING:
    from superpod.launch.finetuning.finetune import Task
    from superpod.requests.request import Request
    from superpod.slurm.profiles.live_cluster import LiveCluster
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.new_runs import SubmitOptions
    from superpod.slurm.submission.submit import Submission


def check_task(task: Task, requests: Sequence[Request], profile: Cluster) -> Task:
    """Return a fine-tuning task with the absolute path of its model, after the checks that need no NeMo.

    Args:
        task: the model and data of the command line.
        requests: requests of the command line; a sweep is not supported.
        profile: cluster to submit to; a cluster behind SSH is not supported.

    Raises:
        UserError: the model, the samples or an override is invalid, or the combination is not supported.
    """
    from superpod.launch.finetuning import finetune, tuning_overrides
    from superpod.slurm.script import batch_script

    if len(requests) > 1:
        raise UserError("--sweep does not support --model", "submit the runs one by one")
    if profile.login.host:
        raise UserError(
            f"--model: the model and samples are on this machine, but {profile.name} is behind SSH",
            "log in to the cluster and run the command there",
        )
    (request,) = requests
    tuning_overrides.refuse_reserved(request.overrides)
    folder = finetune.model_folder(task.model).absolute()
    if profile.container.image:
        problem = batch_script.mount_problem(str(folder))
        if problem:
            raise UserError(problem, "move the model to another folder")
    task = replace(task, model=str(folder))
    finetune.check(request.recipe, task, request.overrides, request.size())
    return task


def finetune_submission(request: Request, task: Task, live: LiveCluster, options: SubmitOptions) -> Submission:
    """Pack the samples of a fine-tuning run and return its submission, after checking it against the cluster.

    Raises:
        UserError: see `cluster_job.resolve_finetuning`; or preflight refuses the submission, and the packed samples are
            removed.
    """
    from superpod.collection import installed
    from superpod.common.quiet import silence_libraries
    from superpod.launch.display.progress_bar import spinner
    from superpod.launch.finetuning import cluster_job
    from superpod.slurm.preflight import preflight
    from superpod.slurm.submission import submit as slurm_submit

    installed.require("submitting a fine-tuning run")

    def note(line: str) -> None:
        print(line, file=sys.stderr)

    profile = options.profile
    runs = Path(options.runs or profile.folders.runs)
    message = "building the recipe with NeMo and packing the samples"
    with silence_libraries() as terminal, spinner(consoles.console(terminal), message):
        run = cluster_job.resolve_finetuning(request, task, runs, note)
    submission = slurm_submit.Submission(run, profile, options.runs, options.time)
    with discard_on_failure(submission):
        preflight.refuse(preflight.findings(preflight.Case(submission, live, attempts=options.count)))
    return submission


def discard(submission: Submission) -> None:
    """Remove the packed samples of a fine-tuning run that is not submitted."""
    from superpod.launch.finetuning import cluster_job

    cluster_job.discard_samples(submission.run)


@contextmanager
def discard_on_failure(submission: Submission) -> Iterator[None]:
    """Remove the packed samples of a submission if the body of the `with` statement raises an exception."""
    try:
        yield
    except BaseException:
        discard(submission)
        raise
