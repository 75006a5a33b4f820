"""Find recipes by name. declarations.py defines and reads them."""

from __future__ import annotations

from superpod.collection.declarations import (
    ADAPTERS,
    LAYOUTS,
    PRECISIONS,
    TASKS,
    Model,
    Need,
    Recipe,
    Task,
    families,
    is_recipe,
    layout_files,
    model,
    models,
    nemo,
    read,
    recipe_facts,
    recipes,
    recipes_for,
    sequence,
    shape_for,
)
from superpod.collection.facts import names
from superpod.errors import UserError, cut, did_you_mean

__all__ = [
    "ADAPTERS",
    "LAYOUTS",
    "PRECISIONS",
    "TASKS",
    "Model",
    "Need",
    "Recipe",
    "Task",
    "families",
    "find",
    "is_recipe",
    "layout_files",
    "model",
    "models",
    "nemo",
    "read",
    "recipe_facts",
    "recipes",
    "refuse_fp16",
    "sequence",
    "shape_for",
]


def find(name: str) -> Recipe:
    """Find a recipe by name, in this project's or Hugging Face's spelling.

    Raises:
        UserError: there is no such recipe; the hint has the closest names.
    """
    from superpod.collection.facts import absent  # imports numpy, which `recipes list` does not need

    for m in models().values():
        if name.startswith(m.name):  # read only the layout file of this model
            candidates = recipes_for(m)
            if name in candidates:
                return candidates[name]
    if name in models():
        raise UserError(f"{name} is a model, not a recipe", f"`recipes list {name}` lists its recipes")
    refuse_fp16(name)
    absent.refuse(name)
    canonical = names.translate(name)
    if canonical != name:
        return find(canonical)
    hint = did_you_mean(name, list(recipes())) or "`recipes list` lists all recipes"
    raise UserError(f"there is no recipe {cut(name)}", hint)


def refuse_fp16(name: str) -> None:
    """Refuse a recipe name with fp16 in place of bf16; all other names are ignored.

    Raises:
        UserError: the hint has the bf16 recipe and the option `with=fp16`.
    """
    bf16 = f"{name.removesuffix('_fp16')}_bf16"
    if name.endswith("_fp16") and bf16 in recipes():
        raise UserError(
            "there are no recipes for fp16: loss scaling does not work in NeMo 2.7.3, so small gradients would "
            "underflow to zero",
            f"use {bf16}, which all GPUs support; to train in fp16 nevertheless: {bf16} with=fp16",
        )
