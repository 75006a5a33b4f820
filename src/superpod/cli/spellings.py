"""Callbacks that normalize the spelling of model and recipe names in arguments, and print a note if it changes."""

from __future__ import annotations

import sys

from superpod.collection.facts import names


def normalize_name(value: str) -> str:
    """Return the canonical name of a model or recipe (see `names.translate`); print a note if `value` differs."""
    return _note_change(value, names.translate(value))


def normalize_words(values: list[str] | None) -> list[str] | None:
    """Replace each search word that names a model by the model's canonical name; other words are unchanged."""
    if not values:
        return values
    return [_note_change(value, names.translate_word(value)) for value in values]


def _note_change(value: str, name: str) -> str:
    """Return `name`; print a note if it differs from `value`."""
    if name != value:
        print(f"note: {value} is interpreted as {name}", file=sys.stderr)
    return name
