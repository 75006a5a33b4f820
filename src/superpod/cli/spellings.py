"""Callbacks of arguments that name a model or a recipe: read once, in any spelling, and said where it is another."""

from __future__ import annotations

import sys


def model_or_recipe(value: str) -> str:
    """Our name for it (`names.read`); what was read as what goes to stderr."""
    from superpod.collection.facts import names

    return _with_note(value, names.read(value))


def words(values: list[str] | None) -> list[str] | None:
    """The same for words of names, of which some may be no model's."""
    from superpod.collection.facts import names

    return [_with_note(value, names.read_word(value)) for value in values] if values else values


def _with_note(value: str, name: str) -> str:
    if name != value:
        print(f"note: {value} is read as {name}", file=sys.stderr)
    return name
