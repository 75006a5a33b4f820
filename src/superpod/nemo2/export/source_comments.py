"""Find comments for an exported file on the source lines that set its values."""

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
"""Start of comments that address tools."""


def argument_comment(config: fdl.Buildable, field: str) -> str:
    """Return the comment on or above the line that set an argument, or ""."""
    name, _, line = find_setter(config, field).rpartition(":")
    path = package_files.find(name) if line.isdigit() else None
    return _read_comments(path).get(int(line), "") if path else ""


def configuration_comment(value: object) -> str:
    """Return the comment on the line that set the first argument of a configuration, or ""."""
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
    """Return the comment on the recipe's lines in its layout file, or ""."""
    return _read_comments(recipe.source).get(recipe.line, "")


@cache
def _read_comments(path: Path) -> dict[int, str]:
    """Return {line number from 1: comment}: the comment at the end of the line, or on the lines directly above it."""
    text = path.read_text(encoding="utf-8")
    comments = dict(_python_comments(text) if path.suffix == ".py" else _toml_comments(text))
    code = text.splitlines()
    comment_lines = {n for n in comments if code[n - 1].lstrip().startswith("#")}
    by_line = {n: comment for n, comment in comments.items() if n not in comment_lines}
    for n in range(1, len(code) + 1):
        line_above = n - 1
        while line_above in comment_lines:
            line_above -= 1
        if n not in comments and line_above < n - 1:
            by_line[n] = " ".join(comments[k] for k in range(line_above + 1, n))
    return by_line


def _python_comments(text: str) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        (token.start[0], token.string.lstrip("# ").strip())
        for token in tokens
        if token.type == tokenize.COMMENT and not TOOLS.match(token.string.lstrip("# "))
    ]


def _toml_comments(text: str) -> list[tuple[int, str]]:
    """List the comments of a layout file, whose strings never contain #."""
    comments = [(n, line.partition("#")[2].strip()) for n, line in enumerate(text.splitlines(), 1)]
    return [(n, comment) for n, comment in comments if comment]
