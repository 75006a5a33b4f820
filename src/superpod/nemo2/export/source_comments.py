"""Find the comments on the source lines that set a recipe's values, for an exported file."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import fiddle as fdl

from superpod.common import package_files
from superpod.nemo2.export.flatten import find_setter

if TYPE_CHECKING:
    from superpod.collection.registry import Recipe

TOOLS = re.compile(r"(noqa|fmt|type|ruff|pyright|isort)\s*:")
"""Start of a comment for a tool."""


def argument_comment(config: fdl.Buildable, field: str) -> str:
    """Return the comment on or above the line that set an argument of `config`; "" if there is none."""
    name, _, line = find_setter(config, field).rpartition(":")
    path = package_files.find(name) if line.isdigit() else None
    return _read_comments(path).get(int(line), "") if path else ""


def configuration_comment(value: object) -> str:
    """Return the comment on the line that set the first argument of a configuration; "" if there is none."""
    if not isinstance(value, fdl.Buildable):
        return ""
    changes = [value.__argument_history__.get(field) for field in value.__arguments__]
    if not changes or not changes[0]:
        return ""
    location = changes[0][0].location  # fiddle keeps every assignment, the oldest first
    path = Path(location.filename)
    is_project_source = path.suffix == ".py" and path.is_file() and package_files.display_name(path) is not None
    return _read_comments(path).get(location.line_number, "") if is_project_source else ""


def recipe_comment(recipe: Recipe) -> str:
    """Return the comment on a recipe in its layout file; "" if there is none."""
    return _read_comments(recipe.source).get(recipe.line, "")


@cache
def _read_comments(path: Path) -> dict[int, str]:
    """Return {line number, from 1: comment at the end of the line or on the lines directly above it}."""
    text = path.read_text(encoding="utf-8")
    comments = _python_comments(text) if path.suffix == ".py" else _toml_comments(text)
    by_line: dict[int, str] = {}
    above: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        comment = comments.get(number, "")
        if comment and line.lstrip().startswith("#"):
            above.append(comment)
            continue
        comment = comment or " ".join(above)
        if comment:
            by_line[number] = comment
        above = []
    return by_line


def _python_comments(text: str) -> dict[int, str]:
    """Return {line number: comment} for Python source, without comments for tools."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string.lstrip("# ").strip() for token in tokens if token.type == tokenize.COMMENT}
    return {number: comment for number, comment in comments.items() if not TOOLS.match(comment)}


def _toml_comments(text: str) -> dict[int, str]:
    """Return {line number: comment} for a layout file, whose strings never contain #."""
    return {number: line.partition("#")[2].strip() for number, line in enumerate(text.splitlines(), 1)}
