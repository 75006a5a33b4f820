"""`recipes diff`: compare two recipes of this project or of NeMo, and explain the differences."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass

import fiddle as fdl

from superpod.errors import UserError, did_you_mean
from superpod.nemo2.export.field_meanings import meaning
from superpod.nemo2.export.flatten import flatten, format_value
from superpod.nemo2.signatures import find_parameter
from superpod.recipes import build

NEMO = "nemo:"
"""Prefix of the names of NeMo's own recipes: `nemo:llama3_8b` or `nemo:llama3_8b.finetune_recipe`."""

PARTS = ("recipe", "model", "data", "trainer.strategy", "trainer.plugins", "trainer.callbacks", "trainer", "optim")
"""Groups of a diff in the order of the output; other groups follow."""

UNSET, DEFAULT = "-", "default "
"""Value of a field that a recipe lacks, and prefix of a value that it does not set."""


@dataclass(frozen=True)
class Difference:
    """A path at which two recipes differ, and the values `a` and `b` there; `why` is the effect of the field."""

    path: str
    a: str
    b: str
    why: str

    @property
    def part(self) -> str:
        """The group that contains the path."""
        groups = (part for part in PARTS if re.match(rf"{re.escape(part)}(\.|\[|$)", self.path))
        return next(groups, self.path.partition(".")[0])


def load(name: str, num_nodes: int | None = None) -> fdl.Buildable:
    """Build the recipe `name`, which may be a recipe of NeMo (`nemo:...`), on `num_nodes` nodes (None = its default).

    Raises:
        UserError: there is no such recipe, or NeMo's recipe function raised an error.
    """
    if name.startswith(NEMO):
        return _build_nemo_recipe(name.removeprefix(NEMO), num_nodes)
    return build(name, num_nodes)


def differences(a: fdl.Buildable, b: fdl.Buildable) -> list[Difference]:
    """Return the paths at which two recipes differ, sorted by group.

    A value that only one recipe sets is compared with the default of the other.
    """
    left, right = _collect_values(a), _collect_values(b)
    in_one_only = left.nodes.keys() ^ right.nodes.keys()
    found = []
    for path in dict.fromkeys([*left.lines, *right.lines]):
        if any(path.startswith(f"{node}.") for node in in_one_only):
            continue  # the difference of the entire configuration covers its fields
        value_a, value_b = _value_or_default(left, path), _value_or_default(right, path)
        if not _are_equal(value_a.removeprefix(DEFAULT), value_b.removeprefix(DEFAULT)):
            found.append(Difference(path, value_a, value_b, meaning(path)))
    order = {part: i for i, part in enumerate(PARTS)}
    return sorted(found, key=lambda d: (order.get(d.part, len(order)), d.part, d.path))


def _are_equal(a: str, b: str) -> bool:
    """Return whether two formatted values are equal; numbers up to rounding, because NeMo computes some of them."""
    try:
        return a == b or math.isclose(float(a), float(b), rel_tol=1e-12)
    except ValueError:
        return False


def _build_nemo_recipe(text: str, num_nodes: int | None) -> fdl.Buildable:
    """Build the recipe of NeMo's module and function `text`, such as `llama3_8b.finetune_recipe`. Raises UserError."""
    from nemo.collections.llm import recipes

    module, _, factory = text.partition(".")
    modules = [info.name for info in pkgutil.iter_modules(recipes.__path__)]
    if module not in modules:
        raise UserError(f"NeMo has no recipe module {module!r}", did_you_mean(module, modules))
    functions = vars(importlib.import_module(f"{recipes.__name__}.{module}"))
    make = functions.get(factory or "pretrain_recipe")
    if not callable(make):
        recipe_functions = [name for name in functions if name.endswith("_recipe")]
        message = f"nemo:{module} has no function {factory or 'pretrain_recipe'}"
        raise UserError(message, f"available functions: {', '.join(recipe_functions) or 'none'}")
    # Some of NeMo's factories have no parameter num_nodes, and some raise when called.
    arguments = {}
    if num_nodes and "num_nodes" in inspect.signature(make).parameters:
        arguments["num_nodes"] = num_nodes
    try:
        recipe = make(**arguments)
    except (TypeError, NotImplementedError) as error:
        raise UserError(f"nemo:{text}: NeMo's recipe function raised an error: {error}") from error
    if not isinstance(recipe, fdl.Buildable):
        raise UserError(f"nemo:{text} returns a {type(recipe).__name__}, which is not a recipe")
    return recipe


@dataclass(frozen=True)
class _Values:
    """The values of a recipe by path. A path identifies list items by class, so that their order is irrelevant."""

    lines: dict[str, str]
    """Path -> formatted value."""
    nodes: dict[str, fdl.Buildable]
    """Path -> configuration, to look up defaults."""


def _collect_values(partial: fdl.Buildable) -> _Values:
    nodes = dict(_walk("", partial))
    names: dict[str, str] = {}
    for path, node in nodes.items():
        if path.endswith("]"):
            names[path] = _name_by_class(path, node, set(names.values()))
    lines = {_rename(line.path, names): line.value for line in flatten(partial)}
    return _Values(lines, {_rename(path, names): node for path, node in nodes.items()})


def _walk(path: str, value: object) -> Iterator[tuple[str, fdl.Buildable]]:
    """Yield the path and the configuration for each configuration in `value`, whose own path is `path`."""
    if isinstance(value, fdl.Buildable):
        yield path, value
        for field, item in value.__arguments__.items():
            yield from _walk(f"{path}.{field}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{path}[{index}]", item)


def _name_by_class(path: str, node: fdl.Buildable, existing: set[str]) -> str:
    """Return a path such as callbacks[TimingCallback] for callbacks[3], or [TimingCallback_2] for a second one."""
    name = f"{path.rpartition('[')[0]}[{fdl.get_callable(node).__name__}]"
    count = sum(other.startswith(name[:-1]) for other in existing)
    return name if not count else f"{name[:-1]}_{count + 1}]"


def _rename(path: str, names: dict[str, str]) -> str:
    """Return `path` with its prefix replaced according to `names` (old path -> new path)."""
    for old, new in names.items():
        if path == old or path.startswith(f"{old}."):
            return new + path[len(old) :]
    return path


def _value_or_default(side: _Values, path: str) -> str:
    """Return the value at a path of a recipe: the value that it sets, or the default of the class, or `-`."""
    if path in side.lines:
        return side.lines[path]
    parent, _, name = path.rpartition(".")
    node = side.nodes.get(parent)
    parameter = find_parameter(fdl.get_callable(node), name) if node is not None else None
    if parameter is None or parameter.default is inspect.Parameter.empty:
        return UNSET
    return DEFAULT + format_value(parameter.default)
