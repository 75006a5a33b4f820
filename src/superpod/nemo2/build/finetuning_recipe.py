"""Set the fields in which fine-tuning differs from pretraining: initial weights, adapters, validation interval."""

from __future__ import annotations

import nemo_run as run
from nemo import lightning as nl
from nemo.collections import llm

from superpod.collection.facts.adapters import adapter_rank, adapter_targets
from superpod.collection.registry import ADAPTERS, Recipe

ADAPTER_CLASSES = {"lora": "LoRA", "dora": "DoRA"}
"""Task -> adapter class in `llm.peft`."""

VALIDATION_SHARE = 0.05
"""Maximum share of a run's time spent in validation."""


def apply(partial: run.Partial, recipe: Recipe) -> None:
    """Set a fine-tuning recipe's initial weights (imported from Hugging Face), validation interval and adapters."""
    partial.tokenizer = "data"  # the tokenizer of the data module; a data folder has the model's own
    if recipe.model.hf:
        weights = f"nemo://{recipe.model.hf}"  # where llm.import_ckpt writes them, in NEMO_HOME
        partial.resume.restore_config = run.Config(nl.RestoreConfig, path=weights)
    partial.trainer.strategy.ckpt_load_strictness = "log_all"  # weights imported without TE have no _extra_state
    if partial.trainer.strategy.context_parallel_size > 1:
        # NeMo asserts both (api.py:1081-1090): the mean is undefined on a rank whose tokens are all masked.
        partial.model.config.calculate_per_token_loss = True
        partial.trainer.strategy.ddp.average_in_collective = False
    trainer = partial.trainer
    trainer.val_check_interval = validation_interval(trainer.max_steps, trainer.limit_val_batches, recipe.task)
    partial.optim.config.adam_beta2 = 0.98  # as in NeMo: an average over 50 steps
    if recipe.task in ADAPTERS:
        rank = adapter_rank(recipe.shape)
        partial.peft = run.Config(
            getattr(llm.peft, ADAPTER_CLASSES[recipe.task]),
            target_modules=list(adapter_targets(recipe.shape, recipe.task)),
            dim=rank,
            alpha=2 * rank,
        )
        partial.model.config.cross_entropy_loss_fusion = False  # the fused loss does not work with adapters


def validation_interval(steps: int, batches: int, task: str) -> int:
    """Return the number of steps between validations of `batches` global batches, in a run of `steps` steps.

    Validation takes at most `VALIDATION_SHARE` of the time. A batch takes one forward pass: a third of a training step,
    or half of one with adapters, because frozen weights have no gradients. The interval divides `steps`, so that a run
    ends with a validation.
    """
    steps_per_batch = 1 / 2 if task in ADAPTERS else 1 / 3
    shortest = min(steps, batches * steps_per_batch / VALIDATION_SHARE)
    return next(n for n in range(1, steps + 1) if steps % n == 0 and n >= shortest)
