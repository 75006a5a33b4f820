"""`recipes submit RECIPE --model FOLDER --data SAMPLES`: a fine-tuning on a cluster, from its model to its folder."""

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
    from superpod.launch.finetune import Task
    from superpod.requests.request import Request
    from superpod.slurm.profiles.live_cluster import LiveCluster
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.submit import Submission

Model = Annotated[
    str,
    typer.Option("--model", "--hf", help="Hugging Face folder to fine-tune, on samples of --data."),
]
SHOWN = "a fine-tuning of --model"


def task_of(model: str, samples: TuningOptions, requests: Sequence[Request], profile: Cluster) -> Task | None:
    """The task of a command line, checked without NeMo; None where it names no model.

    Args:
        model: a Hugging Face folder.
        samples: which samples, and how they are read, as `recipes finetune` takes them.
        requests: the one run of it.
        profile: the cluster.

    Raises:
        UserError: no data, a sweep, a cluster behind SSH, or as `recipes finetune`.
    """
    from superpod.launch import finetune, finetune_overrides
    from superpod.slurm.script import batch_script

    if not model:
        if option := samples.given():
            raise UserError(f"{option} is of a fine-tuning", "give --model, or leave it out")
        return None
    if not samples.data:
        raise UserError("--model needs --data: the samples to fine-tune on", "see `recipes finetune --help`")
    if len(requests) > 1:
        raise UserError(f"--sweep of {SHOWN} is not made", "submit them one by one")
    if profile.login.host:
        raise UserError(
            f"{SHOWN}: model and samples are here, but {profile.name} is behind SSH", "log in to the cluster first"
        )
    (request,) = requests
    finetune_overrides.refuse_own(request.overrides)
    folder = finetune.model_folder(model).absolute()
    if profile.container.image and (problem := batch_script.mount_problem(str(folder))):
        raise UserError(problem, "move the model")
    task = samples.task(str(folder))
    finetune.check(request.recipe, task, request.overrides, request.size())
    return task


def submission(
    request: Request, task: Task, profile: Cluster, live: LiveCluster, runs: str, time: str, attempts: int
) -> Submission:
    """The fine-tuning as a job, its samples packed, checked against the cluster.

    Raises:
        UserError: as `finetune_job.resolved`, or what preflight refuses; no samples are left then.
    """
    from superpod.cli import tables
    from superpod.cli.running.progress import waiting
    from superpod.collection import installed
    from superpod.common.quiet import quietly
    from superpod.launch import finetune_job
    from superpod.slurm.preflight import preflight
    from superpod.slurm.submission import submit as slurm_submit

    installed.require("submitting a fine-tuning")

    def note(line: str) -> None:
        print(line, file=sys.stderr)

    with quietly() as terminal, waiting(tables.console(terminal), "building the recipe with NeMo, packing the samples"):
        run = finetune_job.resolve_finetuning(request, task, Path(runs or profile.folders.runs), note)
    made = slurm_submit.Submission(run, profile, runs, time)
    try:
        preflight.refuse(preflight.Case(made, live, attempts=attempts))
    except BaseException:
        finetune_job.discard_samples(run)
        raise
    return made


def discard(made: Submission) -> None:
    """Remove the packed samples of a fine-tuning that is not submitted."""
    from superpod.launch import finetune_job

    finetune_job.discard_samples(made.run)


@contextmanager
def discarded_on_failure(made: Submission) -> Iterator[None]:
    """Remove them where what happens inside fails."""
    try:
        yield
    except BaseException:
        discard(made)
        raise
