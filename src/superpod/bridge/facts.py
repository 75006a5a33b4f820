"""What the supported version of Megatron-Bridge has: fields of its configuration, architectures and recipes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "megatron.bridge"
"""Import path. Megatron-Bridge moves into Megatron-LM under the same name (Megatron-Bridge issue 6172)."""

STACK_FILE = Path(__file__).with_name("stack.json")


@cache
def stack() -> dict[str, Any]:
    """Return the contents of stack.json.

    Keys: `versions` (package -> version), `fields` (section -> names of fields), `architectures` (Hugging Face class
    names), `recipes` and `perf_recipes` (functions that return a `ConfigContainer`), `userbuffers` (names of tuned
    userbuffer configurations).
    """
    return json.loads(STACK_FILE.read_text())


def version() -> str:
    """Return the version of Megatron-Bridge that stack.json describes."""
    return stack()["versions"]["megatron-bridge"]


def has_field(section: str, name: str) -> bool:
    """Return whether a section of `ConfigContainer`, such as `train`, has the field."""
    return name in stack()["fields"][section]
