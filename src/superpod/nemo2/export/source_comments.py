"""Comments for an exported file: why a value is what it is, as the source line that set the value says it."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import fiddle as fdl

from superpod.common import package_files
from superpod.nemo2.export.flatten import set_at

if TYPE_CHECKING:
    from superpod.collection.registry import Recipe

TOOLS = re.compile(r"(noqa|fmt|type|ruff|pyright|isort)\s*:")
"""Comments that are for tools, not for readers."""


def why(config: fdl.Buildable, field: str) -> str:
    """The comment beside or above the line that set an argument; "" where the line has none."""
    location = _file(set_at(config, field))
    return _comments(location[0]).get(location[1], "") if location else ""


def about(value: object) -> str:
    """The comment on a configuration as a whole: the one on the line that gave it its first argument."""
    if not isinstance(value, fdl.Buildable):
        return ""
    changes = [value.__argument_history__.get(field) for field in value.__arguments__]
    if not changes or not changes[0]:
        return ""
    location = changes[0][0].location  # fiddle keeps every assignment, the oldest first
    path = Path(location.filename)
    return _comments(path).get(location.line_number, "") if _is_ours(path) and path.suffix == ".py" else ""


def table(recipe: Recipe) -> str:
    """The comment on the recipe's lines in its layout file, or ""."""
    return _comments(recipe.source).get(recipe.line, "")


def _is_ours(path: Path) -> bool:
    return path.is_file() and package_files.name_of(path) is not None


def _file(place: str) -> tuple[Path, int] | None:
    """The file and line of a place such as `nemo2/build/partial.py:64`; None unless the file is this project's."""
    name, _, line = place.rpartition(":")
    path = package_files.find(name) if line.isdigit() else None
    return (path, int(line)) if path else None


@cache
def _comments(path: Path) -> dict[int, str]:
    """The comment on each line (from 1): at its end, else the comment lines directly above it."""
    text = path.read_text(encoding="utf-8")
    comments = dict(_of_python(text)) if path.suffix == ".py" else dict(_of_toml(text))
    code = text.splitlines()
    whole_lines = {n for n in comments if code[n - 1].lstrip().startswith("#")}
    by_line = {n: comment for n, comment in comments.items() if n not in whole_lines}
    for n in range(1, len(code) + 1):
        above = n - 1
        while above in whole_lines:
            above -= 1
        if n not in comments and above < n - 1:
            by_line[n] = " ".join(comments[k] for k in range(above + 1, n))
    return by_line


def _of_python(text: str) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        (token.start[0], token.string.lstrip("# ").strip())
        for token in tokens
        if token.type == tokenize.COMMENT and not TOOLS.match(token.string.lstrip("# "))
    ]


def _of_toml(text: str) -> list[tuple[int, str]]:
    """Comments of a layout file, whose strings hold no #."""
    marked = [(n, line.partition("#")[2].strip()) for n, line in enumerate(text.splitlines(), 1) if "#" in line]
    return [(n, comment) for n, comment in marked if comment]
