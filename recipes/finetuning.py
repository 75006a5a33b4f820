"""What differs between fine-tuning and pretraining: where it starts, and what it adapts."""

from __future__ import annotations

import nemo_run as run
from nemo import lightning as nl
from nemo.collections import llm

from superpod.recipes.registry import ADAPTERS, Recipe, adapted

CLASSES = {"lora": "LoRA", "dora": "DoRA"}
"""Task -> class of `llm.peft`; rank 32 is their default."""


def apply(partial: run.Partial, recipe: Recipe) -> None:
    """Start from imported Hugging Face weights, validate often, and add the task's adapters."""
    partial.tokenizer = "data"  # the data module's, as in pretraining; real data brings the model's own
    if recipe.model.hf:
        weights = f"nemo://{recipe.model.hf}"  # where llm.import_ckpt puts them, under NEMO_HOME
        partial.resume.restore_config = run.Config(nl.RestoreConfig, path=weights)
    partial.trainer.val_check_interval = 50
    partial.optim.config.adam_beta2 = 0.98  # a thousand steps are too few to average over two hundred
    if recipe.task in ADAPTERS:
        partial.peft = run.Config(
            getattr(llm.peft, CLASSES[recipe.task]), target_modules=list(adapted(recipe.shape, recipe.task))
        )
        # NeMo's own recipes: the fused loss does not work together with adapters.
        partial.model.config.cross_entropy_loss_fusion = False
