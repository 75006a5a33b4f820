"""Committed results: JSON files in which git shows what has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from superpod.common import atomic_file


def write(path: Path, value: Any, *, levels: int) -> None:
    """Write `value` as a JSON document atomically: so many levels have a line for each item, and deeper ones none."""
    atomic_file.write(path, _item(value, levels, "") + "\n")


def _item(value: Any, levels: int, indent: str) -> str:
    if not levels or not value or not isinstance(value, dict | list):
        return json.dumps(value, default=str)
    inner = f"{indent} "
    if isinstance(value, dict):
        rows = [f"{json.dumps(str(key))}: {_item(item, levels - 1, inner)}" for key, item in value.items()]
        first, last = "{", "}"
    else:
        rows = [_item(item, levels - 1, inner) for item in value]
        first, last = "[", "]"
    lines = ",\n".join(f"{inner}{row}" for row in rows)
    return f"{first}\n{lines}\n{indent}{last}"
