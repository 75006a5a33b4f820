"""Overrides of a word that stand for a whole configuration: `log.wandb=PROJECT` and `resume.restore_config=CHECKPOINT`.

The options `--wandb` and `--from` write them, so that every verb and every later attempt has them. Imports NeMo-Run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run as run

WANDB, START = "log.wandb", "resume.restore_config"


def add_wandb(partial: run.Partial, project: str) -> None:
    """Log to Weights & Biases too, in `project`; a logger that the recipe has already gets the project.

    Its run id is the run folder's (wandb_id.py), its folder the attempt's (`NeMoLogger`), and its key is read by
    wandb from the environment of the ranks.
    """
    import nemo_run as run
    from lightning.pytorch.loggers import WandbLogger

    if partial.log.wandb is None:
        partial.log.wandb = run.Config(WandbLogger, name=partial.log.name)
    partial.log.wandb.project = project


def start_from(partial: run.Partial, checkpoint: str) -> None:
    """Start from the weights of a NeMo checkpoint, saved under whatever layout; its optimizer's state is not taken."""
    import nemo_run as run
    from nemo import lightning as nl

    if partial.resume.restore_config is None:
        partial.resume.restore_config = run.Config(nl.RestoreConfig, path=checkpoint)
        partial.trainer.strategy.ckpt_load_strictness = "log_all"  # as in fine-tuning: no Transformer Engine's state
    partial.resume.restore_config.path = checkpoint


SHORTHANDS: dict[str, Callable[[run.Partial, str], None]] = {WANDB: add_wandb, START: start_from}


def meant(override: str) -> Callable[[run.Partial, str], None] | None:
    """What an override of this kind does to a recipe; None for any other, and for forms that NeMo-Run reads itself."""
    path, _, value = override.partition("=")
    plain = re.fullmatch(r"(?!(None|null)$)[^\s(){}=][^(){}]*", value)
    return SHORTHANDS.get(path) if plain else None
