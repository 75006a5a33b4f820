"""Checkpoints and resume: how much a stopped run loses, and how it continues."""

from __future__ import annotations

import nemo_run as run
from nemo import lightning as nl

from superpod.planner import predict
from superpod.recipes.planned_job import job
from superpod.recipes.registry import Recipe

LOST_AT_MOST_S = 30 * 60
"""Seconds of training that a crash may cost. A save delays training by a second or two, a crash repeats the steps
since the last one; at the few failures a day of thousands of GPUs (arXiv:2407.21783, section 3.3.4), half an hour
keeps the sum of both small."""

CADENCES = (10, 20, 50, 100, 200, 500, 1000)
"""Steps between checkpoints, to choose from: round numbers that divide a thousand."""


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
    """Steps between checkpoints for a predicted step time in seconds; None = unknown, taken as 20 s."""
    fitting = [steps for steps in CADENCES if steps * (step_time_s or 20) <= LOST_AT_MOST_S]
    return max(fitting, default=CADENCES[0])
