"""Checkpoints and resume: what a run loses when it is stopped, and how it goes on."""

from __future__ import annotations

import nemo_run as run
from nemo import lightning as nl

from superpod.planner import predict
from superpod.recipes.planned_job import job
from superpod.recipes.registry import Recipe

LOST_AT_MOST_S = 30 * 60
"""Seconds of training that a crash may cost: the least of a save's cost, a second or two behind the training, and of
what is computed twice, at the few failures a day that thousands of GPUs have (arXiv:2407.21783, section 3.3.4)."""

CADENCES = (10, 20, 50, 100, 200, 500, 1000)
"""Steps between checkpoints, to choose from: what a person remembers, and what divides a thousand."""


def apply(partial: run.Partial, recipe: Recipe, num_nodes: int) -> None:
    """Checkpoint in the background, keep the three newest, and resume from the newest complete one."""
    strategy = partial.trainer.strategy
    strategy.ckpt_async_save = True
    strategy.ckpt_assume_constant_structure = True  # the save plan is made once, not at every save
    strategy.ckpt_parallel_save = True
    strategy.ckpt_parallel_load = True
    partial.log.ckpt = run.Config(
        nl.ModelCheckpoint,
        every_n_train_steps=cadence(predict.one(job(recipe, num_nodes)).step_time_s),
        monitor="step",
        mode="max",
        save_top_k=3,
        save_last="link",  # a link to the newest, not a second copy
        save_optim_on_train_end=True,  # without it a finished run cannot be continued
        filename="{step}-{consumed_samples}",
    )
    partial.resume = run.Config(nl.AutoResume, resume_if_exists=True, resume_ignore_no_checkpoint=True)


def cadence(step_time_s: float | None) -> int:
    """Steps between checkpoints for a predicted step time, seconds; None = not known."""
    fitting = [steps for steps in CADENCES if steps * (step_time_s or 20) <= LOST_AT_MOST_S]
    return max(fitting, default=CADENCES[0])
