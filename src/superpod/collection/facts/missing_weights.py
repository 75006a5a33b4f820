"""Explain why NeMo cannot import the initial weights of a fine-tuning recipe."""

from __future__ import annotations

from superpod.collection.registry import Recipe


def explain(recipe: Recipe) -> tuple[str, str]:
    """Return (problem, next step) if NeMo cannot import the initial weights of a recipe, else ("", "")."""
    m = recipe.model
    if recipe.task == "pretrain" or m.family == "tiny":
        return "", ""
    if m.not_imported:
        return f"NeMo 2.7.3 cannot import {m.hf}: {m.not_imported}", m.import_instead
    if not m.hf:
        return (
            f"{m.name} is fine-tuned from random weights, because NeMo cannot import weights for it",
            "export it with `recipes export`, and set resume.restore_config to a RestoreConfig with your checkpoint",
        )
    return "", ""
