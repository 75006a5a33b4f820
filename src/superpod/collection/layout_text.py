"""Parse and write layout files, which contain the complete layout of each recipe at each number of nodes.

    pretrain_h100_fp8cs = { 1 = "tp=2,sp,gbs=512,save_every=100", 2-8 = "cp=2,gbs=512,save_every=200+500+1000" }

A recipe that does not fit on one line has one line per layout:

    pretrain_h100_bf16.1 = "tp=2,sp,gbs=512,recompute=full,save_every=100"
    pretrain_h100_bf16.2-8 = "cp=2,gbs=512,save_every=200+500+1000"

A layout has the syntax of `--layout`, but it is complete: an omitted field has the default value of
`planner.layout.Layout`, independent of other lines. `2-8` means 2, 4 and 8 nodes. `save_every` is the number of steps
between two checkpoints: one number for all sizes on the line, or one per size. It is stored in the file so that a
recipe does not change when the planner changes.

An old format is also supported: a `[[layouts]]` table lists its recipes and has one table per size,
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
from superpod.planner.formats.config_files import parse_toml, read_text
from superpod.planner.layout import Layout

FACTS = ("task", "gpu", "precision", "gpus_per_node")
"""Keys of a recipe other than its sizes. Task, GPU and precision are given only for the tiny models."""
SAVES, MAX_STEPS = "save_every", 10**6
"""Key of the steps between two checkpoints, which is not a field of a layout, and its maximum value."""
MAX_LINE_LENGTH = 120
EXAMPLE = 'pretrain_h100_bf16 = { 4 = "tp=2,sp,gbs=512" }'
OLD_FORMAT_EXAMPLE = "nodes.4 = { tp = 2, gbs = 512 }"


@dataclass
class Place:
    """Position of a recipe in a file; lines are counted from 1."""

    line: int
    sizes: dict[str, int] = field(default_factory=dict)
    """Key of a number of nodes, such as `2-8` -> its line, if it has its own line."""


@dataclass(frozen=True)
class Entry:
    """A recipe in a layout file."""

    recipe: str
    """Name of the recipe without its model."""
    layouts: dict[int, Layout]
    """Number of nodes -> layout, in ascending order."""
    saves: dict[int, int]
    """Number of nodes -> steps between two checkpoints, where the file specifies them."""
    file: str
    line: int
    lines: dict[int, int]
    """Number of nodes -> line."""
    facts: Mapping[str, Any]
    """Values of the keys in FACTS that the file specifies."""

    @property
    def where(self) -> str:
        """`file:line`, for messages."""
        return f"{self.file}:{self.line}"


def read(path: Path) -> list[Entry]:
    """Read the recipes of a layout file, in the order of the file.

    Raises:
        UserError: the file is invalid; the message has the file and line.
    """
    return parse(read_text(path), str(path))


def parse(text: str, file: str) -> list[Entry]:
    """Parse the text of a layout file; error messages begin with `file`. Raises the same errors as `read`."""
    content = parse_toml(text, file)
    if "layouts" in content:
        return [_parse_entry(name, table, file, place) for name, table, place in _read_old_format(content, text, file)]
    recipe_places = places(text)
    return [_parse_entry(name, table, file, recipe_places.get(name, Place(1))) for name, table in content.items()]


def _read_old_format(content: Mapping[str, Any], text: str, file: str) -> Iterator[tuple[str, dict[str, Any], Place]]:
    """Yield name, table and position of each recipe in a file with `[[layouts]]` tables."""
    groups, found = content["layouts"], old_places(text)
    if set(content) != {"layouts"} or not isinstance(groups, list) or len(groups) != len(found):
        raise UserError(f"{file}: 'layouts' is not the name of a recipe", f"write one line per recipe: {EXAMPLE}")
    for table, place in zip(groups, found, strict=True):
        location = f"{file}:{place.line}"
        names, sizes = table.get("recipes"), table.get("nodes")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise UserError(f"{location}: 'recipes' is missing", 'list their names: recipes = ["pretrain_h100_bf16"]')
        if not isinstance(sizes, dict) or not sizes:
            raise UserError(f"{location}: 'nodes' is missing", f"write one layout per size: {OLD_FORMAT_EXAMPLE}")
        other_entries = {key: value for key, value in table.items() if key not in ("recipes", "nodes")}
        for name in names:
            yield name, other_entries | sizes, place


def _parse_entry(name: str, table: Any, file: str, place: Place) -> Entry:
    location = f"{file}:{place.line}"
    if not isinstance(table, dict):
        raise UserError(f"{location}: {name} is not a recipe with layouts", f"example: {EXAMPLE}")
    facts = {key: value for key, value in table.items() if key in FACTS}
    _check_facts(facts, location)
    layouts: dict[int, Layout] = {}
    saves: dict[int, int] = {}
    lines: dict[int, int] = {}
    for key, value in table.items():
        if key in FACTS:
            continue
        line = place.sizes.get(key, place.line)
        sizes = _parse_sizes(key, f"{file}:{line}")
        layout, steps = _parse_layout_and_steps(value, sizes, f"{file}:{line}")
        repeated_sizes = [nodes for nodes in sizes if nodes in layouts]
        if repeated_sizes:
            raise UserError(
                f"{file}:{line}: {name} has two layouts for {repeated_sizes[0]} nodes", "remove one of the two"
            )
        layouts |= dict.fromkeys(sizes, layout)
        lines |= dict.fromkeys(sizes, line)
        saves |= steps
    if not layouts:
        raise UserError(f"{location}: {name} has no layout", f"example: {EXAMPLE}")
    layouts, saves = dict(sorted(layouts.items())), dict(sorted(saves.items()))
    return Entry(name, layouts, saves, file, place.line, lines, facts)


def _check_facts(facts: Mapping[str, Any], where: str) -> None:
    gpus = facts.get("gpus_per_node", 1)
    if type(gpus) is not int or gpus < 1:
        raise UserError(f"{where}: gpus_per_node must be a positive integer, not {gpus!r}")
    for key in ("task", "gpu", "precision"):
        if not isinstance(facts.get(key, ""), str):
            raise UserError(f"{where}: {key} must be a string, not {facts[key]!r}")
    stated_keys = [key for key in ("task", "gpu", "precision") if key in facts]
    if 0 < len(stated_keys) < 3:
        missing_keys = [key for key in ("task", "gpu", "precision") if key not in facts]
        message = f"{where}: {' and '.join(stated_keys)} set without {' and '.join(missing_keys)}"
        raise UserError(message, "set all of task, gpu and precision, or none of them")


def _parse_sizes(key: str, where: str) -> list[int]:
    """Parse the numbers of nodes in a key: `4`, `1,4`, or `2-8`, which means 2, 4 and 8."""
    if not re.fullmatch(r"[1-9][0-9]{0,5}(-[1-9][0-9]{0,5}|(, ?[1-9][0-9]{0,5})*)", key):
        hint = did_you_mean(key, list(FACTS)) or f"write 4, or 2-8 for 2, 4 and 8: {EXAMPLE}"
        raise UserError(f"{where}: {key} is not a number of nodes", hint)
    first, dash, last = key.partition("-")
    if not dash:
        return [int(nodes) for nodes in key.split(",")]
    sizes = [int(first)]
    while sizes[-1] < int(last):
        sizes.append(2 * sizes[-1])
    if sizes[-1] != int(last) or len(sizes) == 1:
        message = f"{where}: {key} is not a valid range: {last} is not {first} times a power of two"
        raise UserError(message, 'list the numbers instead, such as "2,3"')
    return sizes


def _parse_layout_and_steps(value: Any, sizes: Sequence[int], where: str) -> tuple[Layout, dict[int, int]]:
    """Parse a layout and, if given, the steps between two checkpoints at each of its sizes."""
    if isinstance(value, str):
        values = option_syntax.parse_layout(value, f"{where}: the layout")
    elif isinstance(value, dict):
        values = dict(value)
    else:
        raise UserError(f"{where}: {value!r} is not a layout", f"example: {EXAMPLE}")
    steps = _parse_steps(values.pop(SAVES), sizes, where) if SAVES in values else {}
    layout = _cached_layout(repr(values), values, where)  # before gbs, so that a misspelt gbs is reported as such
    if "gbs" not in values:
        raise UserError(f"{where}: gbs is missing", "add the global batch size: gbs=512")
    return layout, steps


def _parse_steps(value: object, sizes: Sequence[int], where: str) -> dict[int, int]:
    texts = str(value).split("+")
    if not all(re.fullmatch(r"[1-9]\d*", text) and int(text) <= MAX_STEPS for text in texts):
        message = f"{where}: {SAVES} is {value}; it must be between 1 and {MAX_STEPS:,}"
        raise UserError(message, "set a number of steps, or omit it")
    if len(texts) not in (1, len(sizes)):
        hint = "set one number, or one per size"
        raise UserError(f"{where}: {SAVES} has {len(texts)} numbers for {len(sizes)} sizes", hint)
    steps = [int(text) for text in texts]
    if len(steps) == 1:
        return dict.fromkeys(sizes, steps[0])
    return dict(zip(sizes, steps, strict=True))


_layouts: dict[str, Layout] = {}
"""Text of the fields -> layout. The 11,000 lines have 1,000 different layouts; checking one takes 20 us."""


def _cached_layout(text: str, values: dict[str, Any], where: str) -> Layout:
    if text not in _layouts:
        _layouts[text] = Layout.from_mapping(values, where)
    return _layouts[text]


_KEY = re.compile(r"""\s*["']?(?P<recipe>[\w-]+)["']?(?:\s*\.\s*["']?(?P<size>[\w, -]+?)["']?)?\s*=""")
_SECTION = re.compile(r"""\s*\[\s*["']?(?P<recipe>[\w-]+)["']?\s*\]""")


def parse_key(line: str) -> tuple[str, str] | None:
    """Parse the recipe and the size key ("" for an inline table) of a line outside any TOML table."""
    match = _KEY.match(line)
    return (match["recipe"], match["size"] or "") if match else None


def places(text: str) -> dict[str, Place]:
    """Find the position of each recipe in the text of a layout file."""
    found: dict[str, Place] = {}
    section = None
    for number, line in enumerate(text.splitlines(), start=1):
        header = _SECTION.match(line)
        if header:
            section = header["recipe"]
            found[section] = Place(number)
            continue
        keys = parse_key(line)
        if keys:
            recipe, size = (section, keys[0]) if section else keys
            place = found.setdefault(recipe, Place(number))
            if size:
                place.sizes[size] = number
    return found


def old_places(text: str) -> list[Place]:
    """Find the position of each `[[layouts]]` table in the text of a layout file."""
    found: list[Place] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*\[\[\s*layouts\s*\]\]", line):
            found.append(Place(number))
            continue
        size = re.match(r"\s*nodes\s*\.\s*(\d+)\s*=", line)
        if size and found:
            found[-1].sizes[size[1]] = number
    return found


def written_fields(layout: Layout) -> dict[str, Any]:
    """Return the fields that are written to a file: those that differ from the default, and the global batch size."""
    changed_fields = {f.name: getattr(layout, f.name) for f in fields(layout) if getattr(layout, f.name) != f.default}
    return changed_fields | {"gbs": layout.gbs}


def entry_lines(
    recipe: str, layouts: Mapping[int, Layout], saves: Mapping[int, int], facts: Mapping[str, Any] | None = None
) -> list[str]:
    """Format a recipe as one line if it fits, else as one line per layout."""
    groups: dict[tuple[Layout, bool], list[int]] = {}
    for nodes, layout in sorted(layouts.items()):
        groups.setdefault((layout, nodes in saves), []).append(nodes)
    values = {key: json.dumps(value) for key, value in (facts or {}).items()}
    for (layout, has_steps), sizes in groups.items():
        text = option_syntax.format_layout(layout, with_batch=True)
        if has_steps:
            steps = [str(saves[nodes]) for nodes in sizes]
            text += f",{SAVES}={steps[0] if len(set(steps)) == 1 else '+'.join(steps)}"
        values[_format_sizes(sizes)] = f'"{text}"'
    line = f"{recipe} = {{ {', '.join(f'{key} = {value}' for key, value in values.items())} }}"
    if len(line) <= MAX_LINE_LENGTH:
        return [line]
    return [f"{recipe}.{key} = {value}" for key, value in values.items()]


def _format_sizes(sizes: Sequence[int]) -> str:
    """Format numbers of nodes as a key, the inverse of `_parse_sizes`."""
    if len(sizes) == 1:
        return str(sizes[0])
    if all(after == 2 * before for before, after in pairwise(sizes)):
        return f"{sizes[0]}-{sizes[-1]}"
    return f'"{",".join(map(str, sizes))}"'
