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

from superpod.errors import UserError, counted, did_you_mean
from superpod.planner.formats import option_syntax
from superpod.planner.formats.config_files import parse_toml, read_text
from superpod.planner.layout import Layout

FACTS = ("task", "gpu", "precision", "gpus_per_node")
"""Keys of a recipe other than its sizes. Task, GPU and precision are given only for the tiny models."""
SAVES, MAX_STEPS = "save_every", 10**6
"""Key of the steps between two checkpoints, and its maximum value."""
MAX_LINE_LENGTH = 120
EXAMPLE = 'pretrain_h100_bf16 = { 4 = "tp=2,sp,gbs=512" }'
OLD_FORMAT_EXAMPLE = "nodes.4 = { tp = 2, gbs = 512 }"


@dataclass
class Position:
    """Line of a recipe in a file, counted from 1."""

    line: int
    sizes: dict[str, int] = field(default_factory=dict)
    """Key of sizes, such as `2-8` -> its line, if it has a line of its own."""


@dataclass(frozen=True)
class Entry:
    """A recipe in a layout file, with its layouts and lines."""

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
    """Return the recipes of a layout file in order. Raises UserError with file and line if the file is invalid."""
    return parse(read_text(path), str(path))


def parse(text: str, file: str) -> list[Entry]:
    """Return the recipes in the text of a layout file. Raises UserError, with `file` in its message, if invalid."""
    content = parse_toml(text, file)
    if "layouts" in content:
        return [_parse_entry(name, table, file, place) for name, table, place in _read_old_format(content, text, file)]
    recipe_places = find_positions(text)
    return [_parse_entry(name, table, file, recipe_places.get(name, Position(1))) for name, table in content.items()]


def _read_old_format(
    content: Mapping[str, Any], text: str, file: str
) -> Iterator[tuple[str, dict[str, Any], Position]]:
    """Yield name, table and position of each recipe in a file with `[[layouts]]` tables."""
    groups, found = content["layouts"], find_old_tables(text)
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


def _parse_entry(name: str, table: Any, file: str, place: Position) -> Entry:
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
            nodes = counted(repeated_sizes[0], "node")
            raise UserError(f"{file}:{line}: {name} has two layouts for {nodes}", "remove one of them")
        layouts |= dict.fromkeys(sizes, layout)
        lines |= dict.fromkeys(sizes, line)
        saves |= steps
    if not layouts:
        raise UserError(f"{location}: {name} has no layout", f"example: {EXAMPLE}")
    layouts, saves = dict(sorted(layouts.items())), dict(sorted(saves.items()))
    return Entry(name, layouts, saves, file, place.line, lines, facts)


def _check_facts(facts: Mapping[str, Any], where: str) -> None:
    """Raise UserError if a fact has the wrong type, or only some of task, gpu and precision are set."""
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
    """Return the numbers of nodes of a key such as `4`, `1,4`, or `2-8` (2, 4 and 8). Raises UserError if invalid."""
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
    """Return a layout, and its steps between checkpoints by number of nodes. Raises UserError if a value is invalid."""
    if isinstance(value, str):
        values = option_syntax.parse_layout(value, f"{where}: the layout")
    elif isinstance(value, dict):
        values = dict(value)
    else:
        raise UserError(f"{where}: {value!r} is not a layout", f"example: {EXAMPLE}")
    steps = _parse_steps(values.pop(SAVES), sizes, where) if SAVES in values else {}
    layout = _get_cached_layout(repr(values), values, where)  # before gbs, so that a misspelt gbs is reported first
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
"""Text of the fields -> layout. 11,000 lines have 1,000 different layouts, and checking one takes 20 us."""


def _get_cached_layout(text: str, values: dict[str, Any], where: str) -> Layout:
    if text not in _layouts:
        _layouts[text] = Layout.from_mapping(values, where)
    return _layouts[text]


_KEY = re.compile(r"""\s*["']?(?P<recipe>[\w-]+)["']?(?:\s*\.\s*["']?(?P<size>[\w, -]+?)["']?)?\s*=""")
_SECTION = re.compile(r"""\s*\[\s*["']?(?P<recipe>[\w-]+)["']?\s*\]""")


def parse_key(line: str) -> tuple[str, str] | None:
    """Return (recipe, size key) of a line outside a TOML table, "" for the key of an inline table; None if neither."""
    match = _KEY.match(line)
    return (match["recipe"], match["size"] or "") if match else None


def find_positions(text: str) -> dict[str, Position]:
    """Return the position of each recipe in the text of a layout file, by name."""
    found: dict[str, Position] = {}
    section = None
    for number, line in enumerate(text.splitlines(), start=1):
        header = _SECTION.match(line)
        if header:
            section = header["recipe"]
            found[section] = Position(number)
            continue
        keys = parse_key(line)
        if keys:
            recipe, size = (section, keys[0]) if section else keys
            place = found.setdefault(recipe, Position(number))
            if size:
                place.sizes[size] = number
    return found


def find_old_tables(text: str) -> list[Position]:
    """Return the position of each `[[layouts]]` table in the text of a layout file."""
    found: list[Position] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*\[\[\s*layouts\s*\]\]", line):
            found.append(Position(number))
            continue
        size = re.match(r"\s*nodes\s*\.\s*(\d+)\s*=", line)
        if size and found:
            found[-1].sizes[size[1]] = number
    return found


def list_written_fields(layout: Layout) -> dict[str, Any]:
    """Return the fields of a layout that differ from the default, and the global batch size, by name."""
    changed_fields = {f.name: getattr(layout, f.name) for f in fields(layout) if getattr(layout, f.name) != f.default}
    return changed_fields | {"gbs": layout.gbs}


def format_entry(
    recipe: str, layouts: Mapping[int, Layout], saves: Mapping[int, int], facts: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the lines of a recipe: one line if it fits into `MAX_LINE_LENGTH`, else a line per layout."""
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
    """Return the key for numbers of nodes, such as `2-8`: the inverse of `_parse_sizes`."""
    if len(sizes) == 1:
        return str(sizes[0])
    if all(after == 2 * before for before, after in pairwise(sizes)):
        return f"{sizes[0]}-{sizes[-1]}"
    return f'"{",".join(map(str, sizes))}"'
