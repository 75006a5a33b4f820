"""Callbacks for arguments that name a model or a recipe: they accept any spelling and print how it is interpreted."""

from __future__ import annotations

import sys


def normalize_name(value: str) -> str:
    """Return the name of the model or recipe that `value` spells (`names.translate`); print a note if it differs."""
    from superpod.collection.facts import names

    return _with_note(value, names.translate(value))


def normalize_words(values: list[str] | None) -> list[str] | None:
    """Normalize each search word that names a model; leave other words unchanged."""
    from superpod.collection.facts import names

    if not values:
        return values
    return [_with_note(value, names.translate_word(value)) for value in values]


def _with_note(value: str, name: str) -> str:
    if name != value:
        print(f"note: {value} is interpreted as {name}", file=sys.stderr)
    return name
