"""Report fine-tuning recipes whose initial weights NeMo cannot import. Used by `list`, `check` and every run."""

from __future__ import annotations

from superpod.collection.registry import Recipe


def explain(recipe: Recipe) -> tuple[str, str]:
    """Return why a recipe has no initial weights, and the next step; ("", "") if it has them or does not need any."""
    m = recipe.model
    if recipe.task == "pretrain" or m.family == "tiny":
        return "", ""
    if m.not_imported:
        return f"NeMo 2.7.3 cannot import {m.hf}: {m.not_imported}", m.import_instead
    if not m.hf:
        return (
            f"{m.name} is fine-tuned from random weights, because NeMo cannot import weights for it",
            "`recipes export` the recipe, and set resume.restore_config to a RestoreConfig with your checkpoint",
        )
    return "", ""
