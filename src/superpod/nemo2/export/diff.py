"""`recipes diff`: what differs between two recipes, ours or NeMo's own, and why it matters."""

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
from superpod.nemo2.export.flatten import flatten, text_of
from superpod.nemo2.signatures import parameter_of
from superpod.recipes import build

NEMO = "nemo:"
"""`nemo:llama3_8b` or `nemo:llama3_8b.finetune_recipe`: a factory of `nemo.collections.llm.recipes`."""

PARTS = ("recipe", "model", "data", "trainer.strategy", "trainer.plugins", "trainer.callbacks", "trainer", "optim")
"""Groups of a diff, in the order they are shown; other groups follow."""

UNSET, DEFAULT = "-", "default "


@dataclass(frozen=True)
class Difference:
    """One path at which two recipes differ. `default ` before a value says that the recipe does not set it."""

    path: str
    a: str
    b: str
    why: str

    @property
    def part(self) -> str:
        """The group it is shown in."""
        inside = (part for part in PARTS if re.match(rf"{re.escape(part)}(\.|\[|$)", self.path))
        return next(inside, self.path.partition(".")[0])


def load(name: str, num_nodes: int | None = None) -> fdl.Buildable:
    """The recipe of that name, ours or (`nemo:...`) NeMo's.

    Raises:
        UserError: no such recipe, or NeMo's own cannot be made.
    """
    return _nemo(name.removeprefix(NEMO), num_nodes) if name.startswith(NEMO) else build(name, num_nodes)


def differences(a: fdl.Buildable, b: fdl.Buildable) -> list[Difference]:
    """Paths at which two recipes differ, by part. A value set in one only is compared with the other's default."""
    sides = _values(a), _values(b)
    in_one_only = sides[0].nodes.keys() ^ sides[1].nodes.keys()
    rows = []
    for path in dict.fromkeys([*sides[0].lines, *sides[1].lines]):
        left, right = (_value(side, path) for side in sides)
        covered = any(path.startswith(f"{node}.") for node in in_one_only)  # the configuration's own row says it all
        if not covered and not _equal(left.removeprefix(DEFAULT), right.removeprefix(DEFAULT)):
            rows.append(Difference(path, left, right, meaning(path)))
    order = {part: i for i, part in enumerate(PARTS)}
    return sorted(rows, key=lambda d: (order.get(d.part, len(order)), d.part, d.path))


def _equal(a: str, b: str) -> bool:
    """Whether two values are the same, numbers up to rounding: NeMo computes some, such as 0.1 * lr."""
    try:
        return a == b or math.isclose(float(a), float(b), rel_tol=1e-12)
    except ValueError:
        return False


def _nemo(text: str, num_nodes: int | None) -> fdl.Buildable:
    from nemo.collections.llm import recipes

    module, _, factory = text.partition(".")
    modules = [info.name for info in pkgutil.iter_modules(recipes.__path__)]
    if module not in modules:
        raise UserError(f"NeMo has no recipe called {module!r}", did_you_mean(module, modules))
    functions = vars(importlib.import_module(f"{recipes.__name__}.{module}"))
    make = functions.get(factory or "pretrain_recipe")
    if not callable(make):
        named = [name for name in functions if name.endswith("_recipe")]
        raise UserError(f"nemo:{module} has no {factory or 'pretrain_recipe'}", f"it has {', '.join(named) or 'none'}")
    # Some of NeMo's factories take no num_nodes, and some raise when called.
    takes = "num_nodes" in inspect.signature(make).parameters
    try:
        recipe = make(**({"num_nodes": num_nodes} if num_nodes and takes else {}))
    except (TypeError, NotImplementedError) as error:
        raise UserError(f"NeMo cannot make nemo:{text}: {error}") from error
    if not isinstance(recipe, fdl.Buildable):
        raise UserError(f"nemo:{text} makes a {type(recipe).__name__}, which is not a recipe")
    return recipe


@dataclass(frozen=True)
class _Values:
    """Values by path. Items of lists are named by class, not by number, so that their order makes no difference."""

    lines: dict[str, str]
    nodes: dict[str, fdl.Buildable]
    """Path -> configuration, to look up defaults."""


def _values(partial: fdl.Buildable) -> _Values:
    nodes = dict(_nodes("", partial))
    names: dict[str, str] = {}
    for path, node in nodes.items():
        if path.endswith("]"):
            names[path] = _list_name(path, node, set(names.values()))
    lines = {_renamed(line.path, names): line.value for line in flatten(partial)}
    return _Values(lines, {_renamed(path, names): node for path, node in nodes.items()})


def _nodes(path: str, value: object) -> Iterator[tuple[str, fdl.Buildable]]:
    if isinstance(value, fdl.Buildable):
        yield path, value
        for field, item in value.__arguments__.items():
            yield from _nodes(f"{path}.{field}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _nodes(f"{path}[{index}]", item)


def _list_name(path: str, node: fdl.Buildable, taken: set[str]) -> str:
    """callbacks[3] -> callbacks[TimingCallback]; the second of a class is callbacks[TimingCallback_2]."""
    name = f"{path.rpartition('[')[0]}[{fdl.get_callable(node).__name__}]"
    count = sum(other.startswith(name[:-1]) for other in taken)
    return name if not count else f"{name[:-1]}_{count + 1}]"


def _renamed(path: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        if path == old or path.startswith(f"{old}."):
            return new + path[len(old) :]
    return path


def _value(side: _Values, path: str) -> str:
    """One side's value at a path: the one set, else the default of the class there, else `-`."""
    if path in side.lines:
        return side.lines[path]
    parent, _, name = path.rpartition(".")
    node = side.nodes.get(parent)
    parameter = parameter_of(fdl.get_callable(node), name) if node is not None else None
    if parameter is None or parameter.default is inspect.Parameter.empty:
        return UNSET
    return DEFAULT + text_of(parameter.default)
