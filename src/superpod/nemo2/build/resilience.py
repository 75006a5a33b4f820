"""Checkpoints and resume: how much a stopped run loses, and how it continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.layout_text import SAVES
from superpod.collection.registry import Recipe
from superpod.nemo2.planned_job import job
from superpod.planner import predict
from superpod.planner.planned_job import PlannedJob

if TYPE_CHECKING:
    import nemo_run as run

LOST_AT_MOST_S = 30 * 60
"""Seconds of training that a crash may cost. A save delays training by a second or two, a crash repeats the steps
since the last one; at the few failures a day of thousands of GPUs (arXiv:2407.21783, section 3.3.4), half an hour
keeps the sum of both small."""

CADENCES = (10, 20, 50, 100, 200, 500, 1000)
"""Steps between checkpoints, to choose from: round numbers that divide a thousand."""


def apply(partial: run.Partial, recipe: Recipe, num_nodes: int) -> None:
    """Checkpoint in the background, keep the three newest, and resume from the newest complete one."""
    import nemo_run as run
    from nemo import lightning as nl

    from superpod.nemo2.build.layout import set_by

    strategy = partial.trainer.strategy
    strategy.ckpt_async_save = True
    strategy.ckpt_assume_constant_structure = True  # the save plan is made once, not at every save
    strategy.ckpt_parallel_save = True
    strategy.ckpt_parallel_load = True
    partial.log.ckpt = run.Config(
        nl.ModelCheckpoint,
        monitor="step",
        mode="max",
        save_top_k=3,
        save_last="link",  # a link to the newest, not a second copy
        save_optim_on_train_end=True,  # without it a finished run cannot be continued
        filename="{step}-{consumed_samples}",
    )
    with set_by(recipe, SAVES, num_nodes):
        partial.log.ckpt.every_n_train_steps = save_every(recipe, num_nodes)
    partial.resume = run.Config(nl.AutoResume, resume_if_exists=True, resume_ignore_no_checkpoint=True)


def save_every(recipe: Recipe, num_nodes: int | None = None) -> int:
    """Steps between checkpoints of a recipe at a size (default: its smallest). Needs no NeMo.

    A declared size has them in its layout file, so that a recipe does not move when the planner learns better; one that
    is planned on the spot takes what the planner expects of it.
    """
    size = recipe.nodes[0] if num_nodes is None else num_nodes
    return recipe.saves[size] if size in recipe.saves else planned(job(recipe, size))


def planned(run: PlannedJob) -> int:
    """Steps between checkpoints of a run, by the planner's step time."""
    return cadence(predict.one(run).step_time_s)


def cadence(step_time_s: float | None) -> int:
    """Steps between checkpoints for a predicted step time in seconds; None = unknown, taken as 20 s."""
    fitting = [steps for steps in CADENCES if steps * (step_time_s or 20) <= LOST_AT_MOST_S]
    return max(fitting, default=CADENCES[0])
