"""Detect misspelt fields in overrides without importing NeMo.

`override_fields.json` lists the fields per section; `scripts/override_fields.py` generates it from the classes of NeMo
and Megatron. A name that is not similar to any of them is left to NeMo, because a recipe may have a different class
there.
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
MIN_SIMILARITY = 0.75
"""Minimum similarity (`difflib`) of a misspelt name to the intended one."""


@cache
def fields() -> Mapping[str, Sequence[str]]:
    """Return the field names by section, such as `trainer.strategy`."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def path_of(override: str) -> str:
    """Return the path of an override such as `path=value` or `path*=value`, with any of NeMo-Run's operators."""
    return override.partition("=")[0].rstrip(" +-*/|&")


def refuse_misspelt(override: str) -> None:
    """Raise UserError if the path of an override contains a misspelt field; the hint has the most similar names."""
    path = path_of(override)
    parts = [re.sub(r"\[.*", "", part) for part in path.split(".")]
    for depth in range(1, len(parts)):
        section, name = ".".join(parts[:depth]), parts[depth]
        known_fields = list(fields().get(section, ()))
        if (
            known_fields
            and name not in known_fields
            and difflib.get_close_matches(name, known_fields, n=1, cutoff=MIN_SIMILARITY)
        ):
            raise UserError(f"override {path}: {section} has no field {name!r}", did_you_mean(name, known_fields))
