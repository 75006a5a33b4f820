"""Recipes by words of their names, as `recipes list` and `recipes prove` take them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from superpod.collection import registry
from superpod.collection.registry import Recipe, models, recipes
from superpod.errors import UserError, cut, did_you_mean


def matching(words: Sequence[str]) -> list[Recipe]:
    """The recipes whose names contain all words; every recipe without words.

    Raises:
        UserError: there is none; the hint has what the words may mean.
    """
    known = recipes()
    if not all(word.strip() for word in words):
        raise UserError("a word is empty, and every name contains it", "leave it out; `recipes list` shows the models")
    if chosen := [recipe for name, recipe in known.items() if all(word in name for word in words)]:
        return chosen
    from superpod.collection.facts import names

    strange = [word for word in words if not any(word in name for name in known)]
    if "fp16" in strange:
        bf16 = next((name for name in known if "bf16" in name and all(w in name or w in strange for w in words)), "")
        registry.refuse_fp16(f"{bf16.removesuffix('_bf16')}_fp16")
    if not strange:
        _refuse_absent(words)
        raise UserError(f"no recipe's name contains {' and '.join(words)} together", "leave one of them out")
    parts = sorted({part for name in known for part in name.split("_")})
    hint = did_you_mean(strange[0], [*models(), *parts]) or names.near(strange[0])
    hint = hint or "`recipes list` shows the models"
    raise UserError(f"no recipe's name contains {cut(strange[0])}", hint)


def _refuse_absent(words: Sequence[str]) -> None:
    """Do nothing, unless the words name a model and what cannot run in any layout of it.

    Raises:
        UserError: with the rule, as for the recipe's whole name.
    """
    from superpod.collection.facts import absent  # the planner, and numpy with it

    every = recipes().values()
    kinds = [dict.fromkeys(getattr(r, key) for r in every) for key in ("task", "gpu", "precision")]
    for model in [word for word in words if word in models()]:
        for parts in itertools.product(*kinds):
            name = "_".join([model, *parts])
            if all(word in name for word in words):
                absent.refuse(name)
