"""Find recipes by words in their names, for `recipes list` and `recipes prove`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from superpod.collection import registry
from superpod.collection.registry import Recipe, models, recipes
from superpod.errors import UserError, cut, did_you_mean


def find_recipes(words: Sequence[str]) -> list[Recipe]:
    """Return the recipes whose names contain all words. Raises UserError with similar names if there are none."""
    all_recipes = recipes()
    if not all(word.strip() for word in words):
        raise UserError("a search word is empty", "omit it; `recipes list` lists the models")
    matching_recipes = [recipe for name, recipe in all_recipes.items() if all(word in name for word in words)]
    if matching_recipes:
        return matching_recipes
    from superpod.collection.facts import names

    unknown = [word for word in words if not any(word in name for name in all_recipes)]
    if "fp16" in unknown:
        bf16 = next(
            (name for name in all_recipes if "bf16" in name and all(w in name or w in unknown for w in words)), ""
        )
        registry.refuse_fp16(f"{bf16.removesuffix('_bf16')}_fp16")
    if not unknown:
        _refuse_absent(words)
        raise UserError(f"no recipe name contains all of {', '.join(words)}", "omit one of them")
    parts = sorted({part for name in all_recipes for part in name.split("_")})
    hint = did_you_mean(unknown[0], [*models(), *parts]) or names.suggest_ids(unknown[0])
    raise UserError(f"no recipe name contains {cut(unknown[0])}", hint or "`recipes list` lists the models")


def _refuse_absent(words: Sequence[str]) -> None:
    """Raise UserError if the words name a model with a task, GPU or precision that no layout supports."""
    from superpod.collection.facts import absent  # imports the planner and numpy

    all_recipes = recipes().values()
    values = [dict.fromkeys(getattr(recipe, key) for recipe in all_recipes) for key in ("task", "gpu", "precision")]
    for model in [word for word in words if word in models()]:
        for parts in itertools.product(*values):
            name = "_".join([model, *parts])
            if all(word in name for word in words):
                absent.refuse_absent_recipe(name)
