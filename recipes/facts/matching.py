"""Recipes by words of their names, as `recipes list` and `recipes prove` take them."""

from __future__ import annotations

from collections.abc import Sequence

from superpod.errors import UserError, did_you_mean
from superpod.recipes.registry import Recipe, models, recipes


def matching(words: Sequence[str]) -> list[Recipe]:
    """The recipes whose names contain all words; every recipe without words.

    Raises:
        UserError: there is none; the hint has what the words may mean.
    """
    known = recipes()
    if chosen := [recipe for name, recipe in known.items() if all(word in name for word in words)]:
        return chosen
    strange = [word for word in words if not any(word in name for name in known)]
    if not strange:
        raise UserError(f"no recipe's name contains {' and '.join(words)} together", "leave one of them out")
    parts = sorted({part for name in known for part in name.split("_")})
    hint = did_you_mean(strange[0], [*models(), *parts]) or "`recipes list` shows the models"
    raise UserError(f"no recipe's name contains {strange[0]!r}", hint)
