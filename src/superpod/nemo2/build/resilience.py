"""Set how a recipe saves checkpoints and resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.layout_text import SAVES
from superpod.collection.registry import Recipe
from superpod.collection.save_interval import save_every

if TYPE_CHECKING:
    import nemo_run as run


def apply(partial: run.Partial, recipe: Recipe, num_nodes: int) -> None:
    """Let a recipe save asynchronously, keep the three newest checkpoints, and resume from the newest complete one."""
    import nemo_run as run
    from nemo import lightning as nl

    from superpod.nemo2.build.layout import record_source

    strategy = partial.trainer.strategy
    strategy.ckpt_async_save = True
    strategy.ckpt_assume_constant_structure = True  # plan the save once instead of at every save
    strategy.ckpt_parallel_save = True
    strategy.ckpt_parallel_load = True
    partial.log.ckpt = run.Config(
        nl.ModelCheckpoint,
        monitor="step",
        mode="max",
        save_top_k=3,
        save_last="link",  # a link to the newest checkpoint, not a second copy
        save_optim_on_train_end=True,  # otherwise, a finished run could not be extended
        filename="{step}-{consumed_samples}",
    )
    with record_source(recipe, SAVES, num_nodes):
        partial.log.ckpt.every_n_train_steps = save_every(recipe, num_nodes)
    partial.resume = run.Config(nl.AutoResume, resume_if_exists=True, resume_ignore_no_checkpoint=True)
