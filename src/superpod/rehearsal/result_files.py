"""Writes results that are committed: JSON files with readable diffs, and generated sections of Markdown pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from superpod.common import atomic_file


def write(path: Path, value: Any, *, levels: int) -> None:
    """Write `value` as JSON atomically, with one line per item in the first `levels` levels of nesting."""
    atomic_file.write(path, _format_item(value, levels, "") + "\n")


def _format_item(value: Any, levels: int, indent: str) -> str:
    if not levels or not value or not isinstance(value, dict | list):
        return json.dumps(value, default=str)
    inner_indent = f"{indent} "
    if isinstance(value, dict):
        rows = [
            f"{json.dumps(str(key))}: {_format_item(item, levels - 1, inner_indent)}" for key, item in value.items()
        ]
        first, last = "{", "}"
    else:
        rows = [_format_item(item, levels - 1, inner_indent) for item in value]
        first, last = "[", "]"
    lines = ",\n".join(f"{inner_indent}{row}" for row in rows)
    return f"{first}\n{lines}\n{indent}{last}"


def replace_section(page: str, begin: str, end: str, text: str) -> str:
    """Return the text of a page with the section between the marker lines `begin` and `end` replaced by `text`."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"
