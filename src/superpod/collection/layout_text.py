"""The form of layout files: which recipes share layouts, and the whole layout of each size on a line of its own.

    [[layouts]]
    recipes = ["pretrain_h100_fp8ds", "pretrain_h100_fp8cs"]
    nodes.1 = { tp = 2, sp = true, gbs = 512, save_every = 100 }
    nodes.2 = { cp = 2, gbs = 512, save_every = 200 }

No line inherits from another: a field that it leaves out has the default of `planner.layout.Layout`. `save_every` is no
field of it, but the steps between two checkpoints of the recipes there: a number, so that a recipe stays as it is when
the planner learns better.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from superpod.errors import UserError, did_you_mean
from superpod.planner.formats.files import parse_toml, text_of
from superpod.planner.layout import Layout

KEYS = ("recipes", "nodes", "task", "gpu", "precision", "gpus_per_node")
"""Keys of a `[[layouts]]` table. Task, GPU and precision follow from a recipe's name, but for the tiny models."""
SAVES, MOST_STEPS = "save_every", 10**6
"""The key of a size's line that is no field of a layout, and its largest value."""
WIDTH = 120
EXAMPLE = "nodes.4 = { tp = 2, gbs = 512 }"


@dataclass(frozen=True)
class Group:
    """One `[[layouts]]` table: recipes that are laid out alike."""

    recipes: tuple[str, ...]
    """Their names without the model."""
    layouts: dict[int, Layout]
    """Whole layout at each number of nodes."""
    saves: dict[int, int]
    """Steps between two checkpoints at each number of nodes, where the line gives them."""
    where: str
    """`file:line`, for messages."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of task, gpu, precision and gpus_per_node, those that the table gives."""


@dataclass
class Place:
    """Lines of a `[[layouts]]` table, from 1."""

    header: int
    nodes: dict[int, int] = field(default_factory=dict)
    """Number of nodes -> line of its layout."""


def read(path: Path) -> list[Group]:
    """The groups of a layout file, in its order.

    Raises:
        UserError: naming the file, the line and what may stand there.
    """
    return parse(text_of(path), str(path))


def parse(text: str, where: str) -> list[Group]:
    """The groups in a layout file's text; `where` opens each message. Raises as `read`."""
    content = parse_toml(text, where)
    groups = content.get("layouts", [])
    if set(content) - {"layouts"} or not isinstance(groups, list):
        wrong = next((key for key in content if key != "layouts"), "layouts")
        raise UserError(
            f"{where}: {wrong} is no table of a layout file", "write [[layouts]] above each group of recipes"
        )
    places = tables(text)
    if len(places) != len(groups):
        raise UserError(f"{where}: layouts is not written as [[layouts]] tables", f"each size has a line: {EXAMPLE}")
    return [_group(table, where, place) for table, place in zip(groups, places, strict=True)]


def _group(table: Any, file: str, place: Place) -> Group:
    where = f"{file}:{place.header}"
    for key in table:
        if key not in KEYS:
            near = did_you_mean(key, list(KEYS)) or f"a layout is on the line of its size: {EXAMPLE}"
            raise UserError(f"{where}: no key is called {key!r}", near)
    names, sizes = table.get("recipes"), table.get("nodes")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}: recipes is missing", 'name those laid out so: recipes = ["pretrain_h100_bf16"]')
    if not isinstance(sizes, dict) or not sizes or not all(isinstance(size, dict) for size in sizes.values()):
        raise UserError(f"{where}: nodes is missing", f"give each size its whole layout: {EXAMPLE}")
    lines = sorted(_sizes(sizes, file, place), key=lambda line: line[0])
    layouts = {nodes: layout for nodes, layout, _ in lines}
    saves = {nodes: steps for nodes, _, steps in lines if steps is not None}
    facts = {key: value for key, value in table.items() if key not in ("recipes", "nodes")}
    _check_facts(facts, where)
    return Group(tuple(names), layouts, saves, where, facts)


def _check_facts(facts: Mapping[str, Any], where: str) -> None:
    gpus = facts.get("gpus_per_node", 1)
    if type(gpus) is not int or gpus < 1:
        raise UserError(f"{where}: gpus_per_node takes a number of GPUs, not {gpus!r}")
    for key in ("task", "gpu", "precision"):
        if not isinstance(facts.get(key, ""), str):
            raise UserError(f"{where}: {key} takes a string, not {facts[key]!r}")
    stated = [key for key in ("task", "gpu", "precision") if key in facts]
    if 0 < len(stated) < 3:
        raise UserError(f"{where}: {' and '.join(stated)} without the rest", "give task, gpu and precision, or none")


def _sizes(sizes: Mapping[str, Any], file: str, place: Place) -> Iterator[tuple[int, Layout, int | None]]:
    for nodes, values in sizes.items():
        if not re.fullmatch(r"[1-9][0-9]{0,5}", nodes):
            raise UserError(f"{file}:{place.header}: nodes.{nodes} is no number of nodes", "write it as nodes.4")
        where = f"{file}:{place.nodes.get(int(nodes), place.header)}"
        steps = _steps(values[SAVES], where) if SAVES in values else None
        values = {key: value for key, value in values.items() if key != SAVES}
        layout = _layout(repr(values), values, where)  # a misspelt gbs is named here
        if "gbs" not in values:
            raise UserError(f"{where}: gbs is missing", "each line is a whole layout; add its global batch: gbs = 512")
        yield int(nodes), layout, steps


def _steps(value: object, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MOST_STEPS:
        raise UserError(
            f"{where}: {SAVES} is {value!r}; it is a number of steps", f"1 to {MOST_STEPS:,}, or leave it out"
        )
    return value


_layouts: dict[str, Layout] = {}
"""Layouts by the text of their fields: 19,000 sizes have a few hundred different ones, and each check takes 20 us."""


def _layout(text: str, values: dict[str, Any], where: str) -> Layout:
    if text not in _layouts:
        _layouts[text] = Layout.from_mapping(values, where)
    return _layouts[text]


def tables(text: str) -> list[Place]:
    """Where each `[[layouts]]` table of a file's text is, in its order."""
    places: list[Place] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*\[\[\s*layouts\s*\]\]", line):
            places.append(Place(number))
        elif places and (size := re.match(r"\s*nodes\s*\.\s*(\d+)\s*=", line)):
            places[-1].nodes[int(size[1])] = number
    return places


@cache
def places(path: Path) -> dict[str, Place]:
    """Where each recipe of a file is laid out, by its name without the model."""
    text = text_of(path)
    groups = zip(parse(text, str(path)), tables(text), strict=True)
    return {name: place for group, place in groups for name in group.recipes}


def written_fields(layout: Layout) -> dict[str, Any]:
    """The fields that a line gives: those that differ from their defaults, and always the global batch."""
    differs = {f.name: getattr(layout, f.name) for f in fields(layout) if getattr(layout, f.name) != f.default}
    return differs | {"gbs": layout.gbs}


def inline(layout: Layout) -> str:
    """A whole layout as an inline table."""
    return f"{{ {', '.join(f'{key} = {value_text(value)}' for key, value in written_fields(layout).items())} }}"


def group_text(recipes: Sequence[str], layouts: Mapping[int, Layout], saves: Mapping[int, int]) -> str:
    """A `[[layouts]]` table as text; `saves`: steps between two checkpoints, of the sizes that say them."""
    sizes = [size_line(nodes, layout, saves.get(nodes)) for nodes, layout in sorted(layouts.items())]
    return "\n".join(["[[layouts]]", *recipe_lines(recipes), *sizes]) + "\n"


def recipe_lines(recipes: Sequence[str]) -> list[str]:
    """The list of a table's recipes: one line where it fits."""
    line = f"recipes = [{', '.join(map(value_text, recipes))}]"
    return [line] if len(line) <= WIDTH else ["recipes = [", *(f"    {value_text(name)}," for name in recipes), "]"]


def size_line(nodes: int, layout: Layout, save_every: int | None) -> str:
    """The line of a size."""
    line = f"nodes.{nodes} = {inline(layout)}"
    return line if save_every is None else f"{line.removesuffix(' }')}, {SAVES} = {save_every} }}"


def value_text(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return str(value)
