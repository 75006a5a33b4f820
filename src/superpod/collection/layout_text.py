"""The form of layout files: for each recipe of a model, its whole layout at each number of nodes.

    pretrain_h100_fp8cs = { 1 = "tp=2,sp,gbs=512,save_every=100", 2-8 = "cp=2,gbs=512,save_every=200+500+1000" }

A recipe that does not fit on a line has a line for each layout:

    pretrain_h100_bf16.1 = "tp=2,sp,gbs=512,recompute=full,save_every=100"
    pretrain_h100_bf16.2-8 = "cp=2,gbs=512,save_every=200+500+1000"

A layout is written as `--layout` takes it, but it is complete: a field that it leaves out has the default of
`planner.layout.Layout`, whatever other lines say. `2-8` is 2, 4 and 8 nodes. `save_every` is the number of steps
between two checkpoints, one for all sizes of the line or one for each: a number, so that a recipe does not change when
the planner does.

Files of an earlier form are read, too. There, a `[[layouts]]` table names its recipes, and has a table for each size:
`nodes.4 = { tp = 2, gbs = 512, save_every = 100 }`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from superpod.errors import UserError, did_you_mean
from superpod.planner.formats import option_syntax
from superpod.planner.formats.files import parse_toml, read_text
from superpod.planner.layout import Layout

FACTS = ("task", "gpu", "precision", "gpus_per_node")
"""What a recipe may say besides its sizes. Task, GPU and precision follow from its name, but for the tiny models."""
SAVES, MOST_STEPS = "save_every", 10**6
"""The key of a size that is not a field of a layout, and its largest value."""
WIDTH = 120
EXAMPLE = 'pretrain_h100_bf16 = { 4 = "tp=2,sp,gbs=512" }'
EARLIER_EXAMPLE = "nodes.4 = { tp = 2, gbs = 512 }"


@dataclass
class Place:
    """Where a recipe stands in a file's text; lines from 1."""

    line: int
    sizes: dict[str, int] = field(default_factory=dict)
    """Key of a size, such as `2-8` -> its line, where it has one of its own."""


@dataclass(frozen=True)
class Entry:
    """A recipe in a layout file."""

    recipe: str
    """Its name without the model."""
    layouts: dict[int, Layout]
    """Layout at each number of nodes, in ascending order."""
    saves: dict[int, int]
    """Steps between two checkpoints at each number of nodes, where the file gives them."""
    file: str
    line: int
    lines: dict[int, int]
    """Line of each number of nodes."""
    facts: Mapping[str, Any]
    """Of FACTS, those that the file gives."""

    @property
    def where(self) -> str:
        """`file:line`, for messages."""
        return f"{self.file}:{self.line}"


def read(path: Path) -> list[Entry]:
    """The recipes of a layout file, in its order.

    Raises:
        UserError: naming the file, the line and what may stand there.
    """
    return parse(read_text(path), str(path))


def parse(text: str, file: str) -> list[Entry]:
    """The recipes in a layout file's text; `file` opens each message. Raises as `read`."""
    content = parse_toml(text, file)
    if "layouts" in content:
        return [_entry(name, table, file, place) for name, table, place in _earlier_form(content, text, file)]
    found = places(text)
    return [_entry(name, table, file, found.get(name, Place(1))) for name, table in content.items()]


def _earlier_form(content: Mapping[str, Any], text: str, file: str) -> Iterator[tuple[str, dict[str, Any], Place]]:
    """Each recipe of a file with `[[layouts]]` tables: its name, what it says, and where it stands."""
    groups, found = content["layouts"], earlier_places(text)
    if set(content) != {"layouts"} or not isinstance(groups, list) or len(groups) != len(found):
        raise UserError(f"{file}: layouts is not the name of a recipe", f"write a line for each recipe: {EXAMPLE}")
    for table, place in zip(groups, found, strict=True):
        where = f"{file}:{place.line}"
        names, sizes = table.get("recipes"), table.get("nodes")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise UserError(f"{where}: recipes is missing", 'name those laid out so: recipes = ["pretrain_h100_bf16"]')
        if not isinstance(sizes, dict) or not sizes:
            raise UserError(f"{where}: nodes is missing", f"give each size its layout: {EARLIER_EXAMPLE}")
        others = {key: value for key, value in table.items() if key not in ("recipes", "nodes")}
        for name in names:
            yield name, others | sizes, place


def _entry(name: str, table: Any, file: str, place: Place) -> Entry:
    where = f"{file}:{place.line}"
    if not isinstance(table, dict):
        raise UserError(f"{where}: {name} is not a recipe with its layouts", f"such as {EXAMPLE}")
    facts = {key: value for key, value in table.items() if key in FACTS}
    _check_facts(facts, where)
    layouts: dict[int, Layout] = {}
    saves: dict[int, int] = {}
    lines: dict[int, int] = {}
    for key, value in table.items():
        if key in FACTS:
            continue
        line = place.sizes.get(key, place.line)
        sizes = _sizes(key, f"{file}:{line}")
        layout, steps = _layout_and_steps(value, sizes, f"{file}:{line}")
        if repeated := [nodes for nodes in sizes if nodes in layouts]:
            raise UserError(f"{file}:{line}: {name} has two layouts at {repeated[0]} nodes", "leave one of the two out")
        layouts |= dict.fromkeys(sizes, layout)
        lines |= dict.fromkeys(sizes, line)
        saves |= steps
    if not layouts:
        raise UserError(f"{where}: {name} has no layout", f"such as {EXAMPLE}")
    layouts, saves = dict(sorted(layouts.items())), dict(sorted(saves.items()))
    return Entry(name, layouts, saves, file, place.line, lines, facts)


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


def _sizes(key: str, where: str) -> list[int]:
    """The numbers of nodes that a key stands for: `4`, `1,4`, or `2-8`, which is 2, 4 and 8."""
    if not re.fullmatch(r"[1-9][0-9]{0,5}(-[1-9][0-9]{0,5}|(, ?[1-9][0-9]{0,5})*)", key):
        near = did_you_mean(key, list(FACTS)) or f"a key is 4, or 2-8 for 2, 4 and 8: {EXAMPLE}"
        raise UserError(f"{where}: {key} is not a number of nodes", near)
    first, dash, last = key.partition("-")
    if not dash:
        return [int(nodes) for nodes in key.split(",")]
    sizes = [int(first)]
    while sizes[-1] < int(last):
        sizes.append(2 * sizes[-1])
    if sizes[-1] != int(last) or len(sizes) == 1:
        raise UserError(f"{where}: {key} does not lead from {first} to {last} by doubling", 'or list them: "2,3"')
    return sizes


def _layout_and_steps(value: Any, sizes: Sequence[int], where: str) -> tuple[Layout, dict[int, int]]:
    """A layout and the steps between two checkpoints at each of its sizes, where they are given."""
    if isinstance(value, str):
        values = option_syntax.parse_layout(value, f"{where}: the layout")
    elif isinstance(value, dict):
        values = dict(value)
    else:
        raise UserError(f"{where}: {value!r} is not a layout", f"such as {EXAMPLE}")
    steps = _steps(values.pop(SAVES), sizes, where) if SAVES in values else {}
    layout = _layout(repr(values), values, where)  # before gbs is missed, as it may only be misspelt
    if "gbs" not in values:
        raise UserError(f"{where}: gbs is missing", "a layout is complete; add its global batch: gbs=512")
    return layout, steps


def _steps(value: object, sizes: Sequence[int], where: str) -> dict[int, int]:
    texts = str(value).split("+")
    if not all(re.fullmatch(r"[1-9]\d*", text) and int(text) <= MOST_STEPS for text in texts):
        hint = f"write a number of steps from 1 to {MOST_STEPS:,}, or leave it out"
        raise UserError(f"{where}: {SAVES} is {value}", hint)
    if len(texts) not in (1, len(sizes)):
        hint = "give one number, or one for each size"
        raise UserError(f"{where}: {SAVES} has {len(texts)} numbers for {len(sizes)} sizes", hint)
    steps = [int(text) for text in texts]
    if len(steps) == 1:
        return dict.fromkeys(sizes, steps[0])
    return dict(zip(sizes, steps, strict=True))


_layouts: dict[str, Layout] = {}
"""Layouts by the text of their fields: 11,000 lines have a thousand different ones, and each check takes 20 us."""


def _layout(text: str, values: dict[str, Any], where: str) -> Layout:
    if text not in _layouts:
        _layouts[text] = Layout.from_mapping(values, where)
    return _layouts[text]


_KEY = re.compile(r"""\s*["']?(?P<recipe>[\w-]+)["']?(?:\s*\.\s*["']?(?P<size>[\w, -]+?)["']?)?\s*=""")
_SECTION = re.compile(r"""\s*\[\s*["']?(?P<recipe>[\w-]+)["']?\s*\]""")


def key_of(line: str) -> tuple[str, str] | None:
    """The recipe and the key of a size that a line outside sections gives, the latter "" for an inline table."""
    match = _KEY.match(line)
    return (match["recipe"], match["size"] or "") if match else None


def places(text: str) -> dict[str, Place]:
    """Where each recipe of a file's text is, in its order."""
    found: dict[str, Place] = {}
    section = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _SECTION.match(line):
            section = header["recipe"]
            found[section] = Place(number)
        elif keys := key_of(line):
            recipe, size = (section, keys[0]) if section else keys
            place = found.setdefault(recipe, Place(number))
            if size:
                place.sizes[size] = number
    return found


def earlier_places(text: str) -> list[Place]:
    """Where each `[[layouts]]` table of a file's text is, in its order."""
    found: list[Place] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*\[\[\s*layouts\s*\]\]", line):
            found.append(Place(number))
        elif found and (size := re.match(r"\s*nodes\s*\.\s*(\d+)\s*=", line)):
            found[-1].sizes[size[1]] = number
    return found


def written_fields(layout: Layout) -> dict[str, Any]:
    """The fields that a line gives: those that differ from their defaults, and always the global batch."""
    differs = {f.name: getattr(layout, f.name) for f in fields(layout) if getattr(layout, f.name) != f.default}
    return differs | {"gbs": layout.gbs}


def entry_lines(
    recipe: str, layouts: Mapping[int, Layout], saves: Mapping[int, int], facts: Mapping[str, Any] | None = None
) -> list[str]:
    """The lines of a recipe: one where it fits, else one for each layout."""
    sizes: dict[tuple[Layout, bool], list[int]] = {}
    for nodes, layout in sorted(layouts.items()):
        sizes.setdefault((layout, nodes in saves), []).append(nodes)
    values = {key: json.dumps(value) for key, value in (facts or {}).items()}
    for (layout, _), alike in sizes.items():
        steps = [str(saves[nodes]) for nodes in alike if nodes in saves]
        text = option_syntax.format_layout(layout, with_batch=True)
        if steps:
            text += f",{SAVES}={steps[0] if len(set(steps)) == 1 else '+'.join(steps)}"
        values[_key(alike)] = f'"{text}"'
    line = f"{recipe} = {{ {', '.join(f'{key} = {value}' for key, value in values.items())} }}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{recipe}.{key} = {value}" for key, value in values.items()]


def _key(sizes: Sequence[int]) -> str:
    """Numbers of nodes as a key, which `_sizes` reads."""
    if len(sizes) == 1:
        return str(sizes[0])
    if all(after == 2 * before for before, after in pairwise(sizes)):
        return f"{sizes[0]}-{sizes[-1]}"
    return f'"{",".join(map(str, sizes))}"'
