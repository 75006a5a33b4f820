"""`recipes submit RECIPE --model FOLDER --data SAMPLES`: submit a fine-tuning run to a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.cli.options.sample_options import TuningOptions
    from superpod.launch.finetuning.finetune import Task
    from superpod.requests.request import Request
    from superpod.slurm.profiles.live_cluster import LiveCluster
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.submit import Submission

Model = Annotated[
    str,
    typer.Option("--model", "--hf", help="Hugging Face folder of the model to fine-tune on the samples in --data."),
]


def finetune_task(model: str, samples: TuningOptions, requests: Sequence[Request], profile: Cluster) -> Task | None:
    """Return the fine-tuning task for a command line, checked without NeMo; None if `model` is empty.

    Args:
        model: Hugging Face folder.
        samples: the same sample options as in `recipes finetune`.
        requests: the requests of the command line; only one is supported, not a sweep.
        profile: cluster to submit to, which must not be behind SSH.

    Raises:
        UserError: the command line is not supported here or by `recipes finetune`.
    """
    from superpod.launch.finetuning import finetune, tuning_overrides
    from superpod.slurm.script import batch_script

    if not model:
        option = samples.first_changed_option()
        if option:
            raise UserError(f"{option} applies only to fine-tuning", f"add --model, or leave out {option}")
        return None
    if not samples.data:
        raise UserError("--model needs --data, the samples to fine-tune on", "see `recipes finetune --help`")
    if len(requests) > 1:
        raise UserError("--sweep does not support --model", "submit the runs one by one")
    if profile.login.host:
        raise UserError(
            f"--model: the model and samples are on this machine, but {profile.name} is behind SSH",
            "log in to the cluster and run the command there",
        )
    (request,) = requests
    tuning_overrides.refuse_reserved(request.overrides)
    folder = finetune.model_folder(model).absolute()
    if profile.container.image:
        problem = batch_script.mount_problem(str(folder))
        if problem:
            raise UserError(problem, "move the model")
    task = samples.task(str(folder))
    finetune.check(request.recipe, task, request.overrides, request.size())
    return task


def finetune_submission(
    request: Request, task: Task, profile: Cluster, live: LiveCluster, runs: str, time: str, attempts: int
) -> Submission:
    """Pack the samples of a fine-tuning run and return its submission, checked against the cluster.

    Raises:
        UserError: as in `cluster_job.resolve_finetuning`, or preflight refuses the submission; its packed samples are
            then removed.
    """
    from superpod.cli import tables
    from superpod.collection import installed
    from superpod.common.quiet import silence_libraries
    from superpod.launch.display.progress_bar import spinner
    from superpod.launch.finetuning import cluster_job
    from superpod.slurm.preflight import preflight
    from superpod.slurm.submission import submit as slurm_submit

    installed.require("submitting a fine-tuning run")

    def note(line: str) -> None:
        print(line, file=sys.stderr)

    message = "building the recipe with NeMo and packing the samples"
    with silence_libraries() as terminal, spinner(tables.console(terminal), message):
        run = cluster_job.resolve_finetuning(request, task, Path(runs or profile.folders.runs), note)
    submission = slurm_submit.Submission(run, profile, runs, time)
    with discard_on_failure(submission):
        preflight.refuse(preflight.Case(submission, live, attempts=attempts))
    return submission


def discard(submission: Submission) -> None:
    """Remove the packed samples of a fine-tuning run that is not submitted."""
    from superpod.launch.finetuning import cluster_job

    cluster_job.discard_samples(submission.run)


@contextmanager
def discard_on_failure(submission: Submission) -> Iterator[None]:
    """Call `discard` if the body of the `with` statement raises an exception."""
    try:
        yield
    except BaseException:
        discard(submission)
        raise
