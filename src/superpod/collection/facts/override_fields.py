"""The fields that an override may name, as far as they are known without NeMo: a misspelling is refused at once.

`override_fields.json` has them by section, from NeMo's and Megatron's own classes (`scripts/override_fields.py` writes
it). A name that is near none of them is left to NeMo: a recipe may have another class there.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from superpod.errors import UserError, did_you_mean

FILE = Path(__file__).with_name("override_fields.json")
NEAR = 0.75
"""How alike a misspelling and the name that was meant are, by difflib."""


@cache
def fields() -> Mapping[str, Sequence[str]]:
    """Section -> the names of its fields."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def path_of(override: str) -> str:
    """The path of `path=value`, whichever of NeMo-Run's operators stands before the equals sign."""
    return override.partition("=")[0].rstrip(" +-*/|&")


def refuse_misspelt(override: str) -> None:
    """Refuse a `path=value` in which a part is nearly a known field.

    Raises:
        UserError: with the names that are near.
    """
    path = path_of(override)
    parts = [re.sub(r"\[.*", "", part) for part in path.split(".")]
    for depth in range(1, len(parts)):
        section, name = ".".join(parts[:depth]), parts[depth]
        known = list(fields().get(section, ()))
        if known and name not in known and difflib.get_close_matches(name, known, n=1, cutoff=NEAR):
            raise UserError(f"override {path}: {section} has no field {name!r}", did_you_mean(name, known))
