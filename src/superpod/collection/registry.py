"""Finds recipes by name. The recipes themselves, and what declares them: declarations.py."""

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
    layout_files,
    model,
    models,
    nemo,
    read,
    recipe_facts,
    recipes,
    recipes_of,
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
    """The recipe of that name.

    Raises:
        UserError: naming the closest ones when there is none.
    """
    from superpod.collection.facts import absent  # numpy, which listing recipes does not need

    for m in models().values():  # its own file is enough
        if name.startswith(m.name) and name in (own := recipes_of(m)):
            return own[name]
    if name in models():
        raise UserError(f"{name} is a model, not a recipe", f"`recipes list {name}` shows its recipes")
    refuse_fp16(name)
    absent.refuse(name)
    if (ours := names.read(name)) != name:
        return find(ours)
    raise UserError(
        f"no recipe is called {cut(name)}", did_you_mean(name, list(recipes())) or "`recipes list` shows all"
    )


def refuse_fp16(name: str) -> None:
    """Do nothing, unless `name` is that of a recipe of ours with fp16 in place of bf16.

    Raises:
        UserError: naming the recipe, and the option.
    """
    bf16 = f"{name.removesuffix('_fp16')}_bf16"
    if name.endswith("_fp16") and bf16 in recipes():
        raise UserError(
            f"no recipe is written for fp16: NeMo 2.7.3 has no loss scale that works, and {name} would lose small "
            "gradients",
            f"{bf16}, which every GPU here trains in; or, knowing that, {bf16} with=fp16",
        )
