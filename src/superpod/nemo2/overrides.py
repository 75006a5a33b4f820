"""Apply overrides such as `trainer.max_steps=10`: the paths and operators of NeMo-Run, with spelling checks."""

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
from superpod.nemo2.signatures import find_parameter, parameters
from superpod.nemo2.validation import values
from superpod.nemo2.validation.reading import Reader

LENGTHS = ("data.seq_length", "model.config.seq_length")
"""Sequence length of the data and of the model."""

_PATTERN = re.compile(r"(?P<path>[A-Za-z_][\w.\[\]]*)\s*(?P<operator>//|[-+*/|&]|)=(?P<value>.*)", re.DOTALL)
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "|": operator.or_,
    "&": operator.and_,
}
"""NeMo-Run's operators before the equals sign, which change the current value of the field."""


def apply(partial: run.Partial, overrides: list[str]) -> None:
    """Apply each `path=value` (or another of NeMo-Run's operators, such as `*=`) and each `with=OPTION`, in order.

    Raises:
        UserError: an override is malformed, names an unknown field, or has a value of the wrong type.
    """
    # `recipes show --why` prints this as the source of a value.
    location = history.Location(filename="command line", line_number=0, function_name=None)
    with history.custom_location(lambda: location):
        for text in overrides:
            _apply_one(partial, text)


def _apply_one(partial: run.Partial, text: str) -> None:
    if text.startswith(options.PREFIX):
        options.apply(partial, text.removeprefix(options.PREFIX))
        return
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not an override", "write path=value, for example trainer.max_steps=10")
    _check_path(partial, match["path"])
    shorthand = shorthands.find(text)
    if shorthand:
        shorthand(partial, match["value"])
    else:
        _set(partial, match["path"], match["operator"], match["value"])


def _set(partial: run.Partial, path: str, operation: str, text: str) -> None:
    """Set the field at `path`, or modify its value with `operation`.

    Raises:
        UserError: the field does not accept the value.
    """
    node, field = _locate(partial, path)
    if "[" in field:
        message = f"override {path}: items of a list cannot be replaced"
        raise UserError(message, f"set a field of the item: {path}.FIELD=VALUE")
    if isinstance(node, dict):
        node[field] = override_values.parse(text, [Any])
        return
    types = override_values.field_types(fdl.get_callable(node), field)
    try:
        value = override_values.parse(text, [Any] if operation else types)
        if operation:
            value = OPERATIONS[operation](_value(node, field), value)
    except (override_values.NotAValue, TypeError, ValueError, ArithmeticError):
        expected = types[0].__name__ if isinstance(types[0], type) else str(types[0]).replace("typing.", "")
        raise UserError(
            f"override {f'{path}{operation}={text}'!r}: {path} must be of type {expected}, not {text!r}",
            _suggest_integer(path, text, types) or f"set {path}=VALUE with a value of type {expected}",
        ) from None
    setattr(node, field, value)
    _unset_none(node, field)


def _suggest_integer(path: str, text: str, types: list[Any]) -> str:
    """Return the override with an integer instead of text such as `1e3`; "" if that is not valid."""
    number = values.literal(text.strip())
    if not isinstance(number, float) or not number.is_integer():
        return ""
    try:
        return f"{path}={override_values.parse(str(int(number)), types)}"
    except override_values.NotAValue:
        return ""


def align_lengths(partial: run.Partial, overrides: Sequence[str]) -> None:
    """If overrides set the sequence length of only the data or only the model, set both to the same length."""
    reader = Reader(partial, tuple(overrides))
    changed = [path for path in LENGTHS if reader.is_overridden(path) and isinstance(reader[path], int)]
    if len(changed) == 1:
        partial.data.seq_length = partial.model.config.seq_length = reader[changed[0]]


def _check_path(partial: run.Partial, path: str) -> None:
    """Reject a path with an unknown field: NeMo's strategy takes `**kwargs` and would accept a misspelling."""
    node: Any = partial
    seen: list[str] = []
    for part in path.split("."):
        name, *indices = _name_and_indices(part)
        if isinstance(node, fdl.Buildable):
            names = parameters(fdl.get_callable(node))
            if name not in names:
                parent = ".".join(seen) or "the recipe"
                hint = did_you_mean(name, names)
                hint = (
                    hint or f"`recipes show` lists the fields that are set; {parent} has {len(names)} fields in total"
                )
                raise UserError(f"override {path}: {parent} has no field {name!r}", hint)
        elif not isinstance(node, dict):
            raise UserError(f"override {path}: {'.'.join(seen)} is {node!r} and has no fields")
        node = node.get(name) if isinstance(node, dict) else _value(node, name)
        for index in indices:
            node = _item(node, index, path)
        seen.append(part)


def _value(node: Any, name: str) -> Any:
    """Return the value of a field, or its default; fiddle raises ValueError for a default made by a factory."""
    try:
        return getattr(node, name, None)
    except ValueError:
        return fdl.get_callable(node).__dataclass_fields__[name].default_factory()


def _unset_none(node: Any, field: str) -> None:
    """Set None for `trainer.plugins.fp8=None`, which parses as a string because NeMo annotates `fp8: str = None`."""
    parameter = find_parameter(fdl.get_callable(node), field)
    if _value(node, field) in ("None", "null") and parameter is not None and parameter.default is None:
        setattr(node, field, None)


def _locate(partial: run.Partial, path: str) -> tuple[Any, str]:
    """Return the node that holds the last field of `path`, and the name of that field."""
    *parents, field = path.split(".")
    node: Any = partial
    for part in parents:
        name, *indices = _name_and_indices(part)
        node = node[name] if isinstance(node, dict) else _value(node, name)
        for index in indices:
            node = node[int(index)]
    return node, field


def _name_and_indices(part: str) -> list[str]:
    """Split `callbacks[0]` into ["callbacks", "0"]."""
    return re.split(r"[\[\]]+", part.rstrip("]"))


def _item(node: Any, index: str, path: str) -> Any:
    try:
        return node[int(index)]
    except (TypeError, ValueError, IndexError):
        size = len(node) if isinstance(node, list | tuple) else 0
        raise UserError(
            f"override {path}: there is no item [{index}]", f"the list has {size} items; the first is [0]"
        ) from None


def require_known_names(partial: run.Partial, where: str) -> None:
    """Reject arguments that a class accepts only as `**kwargs`, and that no base class has.

    Classes other than strategies may pass on such arguments; there, only names similar to a known one are rejected.

    Raises:
        UserError: an argument is unknown; the hint contains the closest names.
    """
    import difflib

    from fiddle import daglish
    from torch.nn.parallel import DistributedDataParallel

    for node, _ in daglish.iterate(partial):
        target = fdl.get_callable(node) if isinstance(node, fdl.Buildable) else None
        if not isinstance(target, type):
            continue
        names = parameters(target)
        is_strategy = "Strategy" in target.__name__
        if is_strategy:  # Lightning's DDPStrategy passes the rest to PyTorch's DDP
            names += parameters(DistributedDataParallel)
        for name in [name for name in node.__arguments__ if isinstance(name, str) and name not in names]:
            if is_strategy or difflib.get_close_matches(name, names, n=1, cutoff=0.85):
                hint = did_you_mean(name, names)
                hint = hint or f"see the {len(names)} arguments of NeMo's {target.__name__}"
                raise UserError(f"{where}: {target.__name__} has no argument {name!r}", hint)
