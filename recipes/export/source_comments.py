"""Why a value is what it is, in the words of the source line that set it: `show --why` for the reader of a file."""

from __future__ import annotations

import io
import os
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import fiddle as fdl

from superpod.recipes.flatten import ROOT, set_at

if TYPE_CHECKING:
    from superpod.recipes.registry import Recipe

TOOLS = re.compile(r"(noqa|fmt|type|ruff|pyright|isort)\s*:")
"""What tools read in comments."""


def why(config: fdl.Buildable, field: str) -> str:
    """The comment on an argument: what stands beside the line that set it or above it; a layout file's line itself."""
    place = set_at(config, field)
    if (found := _file(place)) is None:
        return place if place == "command line" else ""
    path, line = found
    said = _comments(path).get(line, "")
    if path.suffix == ".toml":
        return f"{place.rpartition(':')[0]}, line {line}" + (f": {said}" if said else "")
    return said


def about(value: object) -> str:
    """The comment on a configuration as a whole: what is said of the line that its first argument was made with."""
    if not isinstance(value, fdl.Buildable):
        return ""
    changes = [value.__argument_history__.get(field) for field in value.__arguments__]
    if not changes or not changes[0]:
        return ""
    made = changes[0][0].location
    path = Path(made.filename)
    return _comments(path).get(made.line_number, "") if _is_ours(path) and path.suffix == ".py" else ""


def table(recipe: Recipe) -> str:
    """The comment on the recipe's table in its layout file, or ""."""
    lines = recipe.source.read_text(encoding="utf-8").splitlines()
    header = f"[{recipe.table}]"
    return _comments(recipe.source).get(lines.index(header) + 1, "") if header in lines else ""


def sources(value: object) -> list[str]:
    """Files that set the arguments of a configuration, or of those in a list, in the order of their names."""
    nodes = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, fdl.Buildable)]
    places = [set_at(node, field) for node in nodes for field in map(str, node.__arguments__)]
    return sorted({place.rpartition(":")[0] for place in places if _file(place)})


def _is_ours(path: Path) -> bool:
    return path.is_file() and Path(os.path.realpath(path)).is_relative_to(ROOT / "recipes")


def _file(place: str) -> tuple[Path, int] | None:
    """The file and line of `recipes/partial.py:64`, where it is one of this project's."""
    name, _, line = place.rpartition(":")
    for folder in (ROOT, ROOT.parent):  # the repository's top, or superpod/ where it is installed
        if line.isdigit() and name and (folder / name).is_file():
            return folder / name, int(line)
    return None


@cache
def _comments(path: Path) -> dict[int, str]:
    """What is said of each line: by a comment at its end, else by the comment lines right above it."""
    text = path.read_text(encoding="utf-8")
    found = dict(_of_python(text)) if path.suffix == ".py" else dict(_of_toml(text))
    code = text.splitlines()
    alone = {n for n in found if code[n - 1].lstrip().startswith("#")}
    said = {n: words for n, words in found.items() if n not in alone}
    for n in range(1, len(code) + 1):
        above = n - 1
        while above in alone:
            above -= 1
        if n not in found and above < n - 1:
            said[n] = " ".join(found[k] for k in range(above + 1, n))
    return said


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
    return [(n, words) for n, words in marked if words]
