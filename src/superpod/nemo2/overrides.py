"""`trainer.max_steps=10` on a command line: NeMo-Run's syntax of paths and operators, with a misspelling caught."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import nemo_run as run
from fiddle._src import history

from superpod.errors import UserError, did_you_mean
from superpod.nemo2 import options, override_values, shorthands
from superpod.nemo2.signatures import parameter_of, parameters
from superpod.nemo2.validation import values
from superpod.nemo2.validation.reading import Reader

LENGTHS = ("data.seq_length", "model.config.seq_length")
"""The sequence length of the data and of the model."""

_FORM = re.compile(r"(?P<path>[A-Za-z_][\w.\[\]]*)\s*(?P<operator>//|[-+*/|&]|)=(?P<value>.*)", re.DOTALL)
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "|": operator.or_,
    "&": operator.and_,
}
"""Operators before the equals sign, which change the field's value, as in NeMo-Run."""


def apply(partial: run.Partial, overrides: list[str]) -> None:
    """Apply each `path=value` (or another of NeMo-Run's operators, such as `*=`) and each `with=OPTION`, in order.

    Raises:
        UserError: an override is malformed, names no field of the recipe, or has a value of another type.
    """
    where = history.Location(filename="command line", line_number=0, function_name=None)
    for text in overrides:
        if text.startswith(options.PREFIX):
            with history.custom_location(lambda: where):
                options.apply(partial, text.removeprefix(options.PREFIX))
            continue
        match = _FORM.fullmatch(text)
        if match is None:
            raise UserError(f"{text!r} is not an override", "write path=value, such as trainer.max_steps=10")
        _check_path(partial, match["path"])
        if short := shorthands.meant(text):
            with history.custom_location(lambda: where):
                short(partial, match["value"])
            continue
        with history.custom_location(lambda: where):
            _set(partial, match["path"], match["operator"], match["value"])


def _set(partial: run.Partial, path: str, operation: str, text: str) -> None:
    """Set the field at `path`, or change its value by `operation`.

    Raises:
        UserError: the text is no value that the field takes.
    """
    node, field = _locate(partial, path)
    if "[" in field:
        raise UserError(f"override {path}: an item of a list is not replaced", f"set a field of it: {path}.FIELD=VALUE")
    if isinstance(node, dict):
        node[field] = override_values.parse(text, [Any])
        return
    taken = override_values.types_of(fdl.get_callable(node), field)
    try:
        value = override_values.parse(text, taken if operation == "" else [Any])
        if operation:
            value = OPERATIONS[operation](_value(node, field), value)
    except (override_values.NotAValue, TypeError, ValueError, ArithmeticError):
        kind = taken[0].__name__ if isinstance(taken[0], type) else str(taken[0]).replace("typing.", "")
        raise UserError(
            f"override {f'{path}{operation}={text}'!r}: {path} takes {kind}, not {text!r}",
            _whole(path, text, taken) or f"write {path}=VALUE with a value of {kind}",
        ) from None
    setattr(node, field, value)
    _unset_none(node, field)


def _whole(path: str, text: str, taken: list[Any]) -> str:
    """The override with the whole number that a text such as `1e3` means; '' where it means none, or none is taken."""
    number = values.literal(text.strip())
    if not isinstance(number, float) or not number.is_integer():
        return ""
    try:
        return f"{path}={override_values.parse(str(int(number)), taken)}"
    except override_values.NotAValue:
        return ""


def keep_one_length(partial: run.Partial, overrides: Sequence[str]) -> None:
    """If an override has changed only the data's or only the model's sequence length, give the other the same."""
    reader = Reader(partial, tuple(overrides))
    changed = [path for path in LENGTHS if reader.overridden(path) and isinstance(reader[path], int)]
    if len(changed) == 1:
        partial.data.seq_length = partial.model.config.seq_length = reader[changed[0]]


def _check_path(partial: run.Partial, path: str) -> None:
    """Refuse a path that names no field: NeMo's strategy takes `**kwargs` and would accept a misspelling."""
    node: Any = partial
    seen: list[str] = []
    for part in path.split("."):
        name, *indices = _name_and_indices(part)
        if isinstance(node, fdl.Buildable):
            known = parameters(fdl.get_callable(node))
            if name not in known:
                spot = ".".join(seen) or "the recipe"
                hint = (
                    did_you_mean(name, known) or f"`recipes show` lists what is set; {spot} takes {len(known)} fields"
                )
                raise UserError(f"override {path}: {spot} has no field {name!r}", hint)
        elif not isinstance(node, dict):
            raise UserError(f"override {path}: {'.'.join(seen)} is {node!r} and has no fields")
        node = node.get(name) if isinstance(node, dict) else _value(node, name)
        for index in indices:
            node = _item(node, index, path)
        seen.append(part)


def _value(node: Any, name: str) -> Any:
    """A field of a configuration as it is set, or its default; fiddle raises for a default that a factory makes."""
    try:
        return getattr(node, name, None)
    except ValueError:
        return fdl.get_callable(node).__dataclass_fields__[name].default_factory()


def _unset_none(node: Any, field: str) -> None:
    """Set None for `trainer.plugins.fp8=None`: NeMo annotates `fp8: str = None`, so that the text would be a string."""
    parameter = parameter_of(fdl.get_callable(node), field)
    if _value(node, field) in ("None", "null") and parameter is not None and parameter.default is None:
        setattr(node, field, None)


def _locate(partial: run.Partial, path: str) -> tuple[Any, str]:
    """The node that holds the last field of `path`, and that field."""
    *parents, field = path.split(".")
    node: Any = partial
    for part in parents:
        name, *indices = _name_and_indices(part)
        node = node[name] if isinstance(node, dict) else _value(node, name)
        for index in indices:
            node = node[int(index)]
    return node, field


def _name_and_indices(part: str) -> list[str]:
    """["callbacks", "0"] of `callbacks[0]`."""
    return re.split(r"[\[\]]+", part.rstrip("]"))


def _item(node: Any, index: str, path: str) -> Any:
    try:
        return node[int(index)]
    except (TypeError, ValueError, IndexError):
        size = len(node) if isinstance(node, list | tuple) else 0
        raise UserError(f"override {path}: there is no item [{index}]", f"it has {size} items, from 0") from None


def require_known_names(partial: run.Partial, where: str) -> None:
    """Refuse arguments that only the `**kwargs` of a class accept, and that none of its bases has.

    Classes other than strategies may pass such an argument on: there, only a name close to a known one is refused.

    Raises:
        UserError: with the closest names.
    """
    import difflib

    from fiddle import daglish
    from torch.nn.parallel import DistributedDataParallel

    for node, _ in daglish.iterate(partial):
        target = fdl.get_callable(node) if isinstance(node, fdl.Buildable) else None
        if not isinstance(target, type):
            continue
        known = parameters(target)
        if "Strategy" in target.__name__:  # Lightning's DDPStrategy passes the rest to PyTorch's DDP
            known += parameters(DistributedDataParallel)
        for name in [name for name in node.__arguments__ if isinstance(name, str) and name not in known]:
            if "Strategy" in target.__name__ or difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                hint = did_you_mean(name, known) or f"it takes {len(known)} others: see NeMo's {target.__name__}"
                raise UserError(f"{where}: {target.__name__} has no argument {name!r}", hint)
