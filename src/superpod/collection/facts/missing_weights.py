"""Fine-tuning recipes that do not find the weights they are meant to start from: said in list, check and every run."""

from __future__ import annotations

from superpod.collection.registry import Recipe


def of(recipe: Recipe) -> tuple[str, str]:
    """Why a recipe does not find its weights, and the next move; ("", "") where it does, or needs none."""
    m = recipe.model
    if recipe.task == "pretrain" or m.family == "tiny":
        return "", ""
    if m.not_imported:
        return f"NeMo 2.7.3 does not import {m.hf}: {m.not_imported}", m.import_instead
    if not m.hf:
        return (
            f"{m.name} is fine-tuned from random weights: no Hugging Face weights that NeMo imports are known for it",
            "`recipes export` the recipe, and give resume a RestoreConfig of your checkpoint",
        )
    return "", ""
