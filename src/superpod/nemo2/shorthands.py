"""Overrides with a shorthand for a configuration: `log.wandb=PROJECT` and `resume.restore_config=CHECKPOINT`.

The options `--wandb` and `--from` add these overrides, so that they apply to every command and every later attempt.
Imports NeMo-Run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run as run

WANDB, START = "log.wandb", "resume.restore_config"
"""Paths of the overrides with a shorthand."""


def add_wandb(partial: run.Partial, project: str) -> None:
    """Set the Weights & Biases project of a recipe's logger, and add a logger if the recipe has none.

    The run id comes from the run folder (wandb_id.py), the log folder from the attempt (`NeMoLogger`). wandb reads its
    API key from the environment of the ranks.
    """
    import nemo_run as run
    from lightning.pytorch.loggers import WandbLogger

    if partial.log.wandb is None:
        partial.log.wandb = run.Config(WandbLogger, name=partial.log.name)
    partial.log.wandb.project = project


def start_from(partial: run.Partial, checkpoint: str) -> None:
    """Let a recipe start from the weights of a NeMo checkpoint, in any layout; the optimizer state is not loaded."""
    import nemo_run as run
    from nemo import lightning as nl

    if partial.resume.restore_config is None:
        partial.resume.restore_config = run.Config(nl.RestoreConfig, path=checkpoint)
        # As in fine-tuning, the checkpoint may lack the _extra_state of Transformer Engine's layers.
        partial.trainer.strategy.ckpt_load_strictness = "log_all"
    partial.resume.restore_config.path = checkpoint


SHORTHANDS: dict[str, Callable[[run.Partial, str], None]] = {WANDB: add_wandb, START: start_from}
"""Path -> function that applies the shorthand to a recipe."""


def find(override: str) -> Callable[[run.Partial, str], None] | None:
    """Return the function in `SHORTHANDS` that applies an override; None if its value is not a shorthand."""
    path, _, value = override.partition("=")
    is_plain = re.fullmatch(r"(?!(None|null)$)[^\s(){}=][^(){}]*", value)
    return SHORTHANDS.get(path) if is_plain else None
