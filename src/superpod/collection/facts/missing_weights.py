"""Fine-tuning recipes whose initial weights NeMo cannot import; `list`, `check` and every run report them."""

from __future__ import annotations

from superpod.collection.registry import Recipe


def explain(recipe: Recipe) -> tuple[str, str]:
    """Return why a recipe has no initial weights, and the next step; ("", "") if it has or needs none."""
    m = recipe.model
    if recipe.task == "pretrain" or m.family == "tiny":
        return "", ""
    if m.not_imported:
        return f"NeMo 2.7.3 does not import {m.hf}: {m.not_imported}", m.import_instead
    if not m.hf:
        return (
            f"{m.name} is fine-tuned from random weights, because NeMo can import no weights for it",
            "`recipes export` it, and set resume.restore_config to a RestoreConfig of your checkpoint",
        )
    return "", ""
