"""Checkpoints and resume: what a run loses when it is stopped, and how it goes on."""

from __future__ import annotations

import nemo_run as run
from nemo import lightning as nl


def apply(partial: run.Partial) -> None:
    """Checkpoint in the background, keep the three newest, and resume from the newest complete one."""
    strategy = partial.trainer.strategy
    strategy.ckpt_async_save = True
    strategy.ckpt_assume_constant_structure = True  # the save plan is made once, not at every save
    strategy.ckpt_parallel_save = True
    strategy.ckpt_parallel_load = True
    partial.log.ckpt = run.Config(
        nl.ModelCheckpoint,
        # The measured steps of these models take 12 to 20 s, so a crash costs half an hour at most.
        every_n_train_steps=100,
        monitor="step",
        mode="max",
        save_top_k=3,
        save_last="link",  # a link to the newest, not a second copy
        save_optim_on_train_end=True,  # without it a finished run cannot be continued
        filename="{step}-{consumed_samples}",
    )
    partial.resume = run.Config(nl.AutoResume, resume_if_exists=True, resume_ignore_no_checkpoint=True)
