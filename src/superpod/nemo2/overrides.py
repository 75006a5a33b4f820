"""Apply overrides such as `trainer.max_steps=10`, with NeMo-Run's paths and operators, and check their spelling."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import fiddle as fdl
import nemo_run as run
from fiddle._src import history

from superpod.errors import UserError, counted, did_you_mean
from superpod.nemo2 import options, override_values, shorthands
from superpod.nemo2.signatures import find_parameter, parameters
from superpod.nemo2.validation import values
from superpod.nemo2.validation.reading import Reader

LENGTHS = ("data.seq_length", "model.config.seq_length")
"""Fields with the sequence length of the data and of the model."""

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
"""Operator before the equals sign, as in NeMo-Run -> function of the field's current value and the given value."""


def apply(partial: run.Partial, overrides: list[str]) -> None:
    """Apply each `path=value`, each override with another operator such as `*=`, and each `with=OPTION`, in order.

    Raises:
        UserError: an override is malformed, names an unknown field, or has a value of the wrong type.
    """
    # `recipes show --why` prints this as the source of a value.
    location = history.Location(filename="command line", line_number=0, function_name=None)
    with history.custom_location(lambda: location):
        for text in overrides:
            _apply_override(partial, text)


def _apply_override(partial: run.Partial, text: str) -> None:
    if text.startswith(options.PREFIX):
        options.apply(partial, text.removeprefix(options.PREFIX))
        return
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not an override", "write PATH=VALUE, for example trainer.max_steps=10")
    node, field = _locate(partial, match["path"])
    shorthand = shorthands.find(text)
    if shorthand:
        shorthand(partial, match["value"])
    else:
        _set_field(node, field, match["path"], match["operator"], match["value"])


def _set_field(node: Any, field: str, path: str, operation: str, text: str) -> None:
    """Set a field of `node` to the value of `text`, or combine both with an operator in `OPERATIONS`.

    Raises:
        UserError: the field does not accept the value; the message contains its `path`.
    """
    if "[" in field:
        message = f"override {path}: an item of a list cannot be replaced"
        raise UserError(message, f"set a field of the item: {path}.FIELD=VALUE")
    if isinstance(node, dict):
        node[field] = override_values.parse(text, [Any])
        return
    types = override_values.field_types(fdl.get_callable(node), field)
    try:
        value = override_values.parse(text, [Any] if operation else types)
        if operation:
            value = OPERATIONS[operation](_get_value(node, field), value)
    except (override_values.NotAValue, TypeError, ValueError, ArithmeticError):
        expected = types[0].__name__ if isinstance(types[0], type) else str(types[0]).replace("typing.", "")
        raise UserError(
            f"override {f'{path}{operation}={text}'!r}: {path} must be of type {expected}, not {text!r}",
            _suggest_integer(path, text, types) or f"set {path}=VALUE with a value of type {expected}",
        ) from None
    setattr(node, field, value)
    _unset_none(node, field)


def _suggest_integer(path: str, text: str, types: list[Any]) -> str:
    """Return the override with an integer for a float such as `1e3`; "" if the field does not accept the integer."""
    number = values.literal(text.strip())
    if not isinstance(number, float) or not number.is_integer():
        return ""
    try:
        return f"{path}={override_values.parse(str(int(number)), types)}"
    except override_values.NotAValue:
        return ""


def align_lengths(partial: run.Partial, overrides: Sequence[str]) -> None:
    """If overrides set the sequence length of the data or the model only, set both to this length."""
    reader = Reader(partial, tuple(overrides))
    changed = [path for path in LENGTHS if reader.is_overridden(path) and isinstance(reader[path], int)]
    if len(changed) == 1:
        partial.data.seq_length = partial.model.config.seq_length = reader[changed[0]]


def _locate(partial: run.Partial, path: str) -> tuple[Any, str]:
    """Return the configuration or dictionary that contains the last field of `path`, and the name of that field.

    Raises:
        UserError: a field is unknown. NeMo's strategy would accept a misspelling as `**kwargs`.
    """
    node: Any = partial
    parent, part = node, path
    seen: list[str] = []
    for part in path.split("."):
        parent = node
        name, *indices = re.split(r"[\[\]]+", part.rstrip("]"))  # callbacks[0] -> callbacks, 0
        if isinstance(node, fdl.Buildable):
            names = parameters(fdl.get_callable(node))
            if name not in names:
                owner = ".".join(seen) or "the recipe"
                hint = f"`recipes show` lists the fields that are set; {owner} has {len(names)} fields in total"
                raise UserError(f"override {path}: {owner} has no field {name!r}", did_you_mean(name, names) or hint)
        elif not isinstance(node, dict):
            raise UserError(f"override {path}: {'.'.join(seen)} is {node!r} and has no fields")
        node = node.get(name) if isinstance(node, dict) else _get_value(node, name)
        for index in indices:
            node = _get_item(node, index, path)
        seen.append(part)
    return parent, part


def _get_value(node: Any, name: str) -> Any:
    """Return the value of a field, or its default. For a default factory, fiddle would raise ValueError."""
    try:
        return getattr(node, name, None)
    except ValueError:
        return fdl.get_callable(node).__dataclass_fields__[name].default_factory()


def _unset_none(node: Any, field: str) -> None:
    """Replace the string "None" by None in a field such as NeMo's `fp8: str = None`, whose annotation lacks None."""
    parameter = find_parameter(fdl.get_callable(node), field)
    if _get_value(node, field) in ("None", "null") and parameter is not None and parameter.default is None:
        setattr(node, field, None)


def _get_item(node: Any, index: str, path: str) -> Any:
    """Return an item of a list; raise UserError if it does not exist. `path` is the override's, for the message."""
    try:
        return node[int(index)]
    except (TypeError, ValueError, IndexError):
        size = len(node) if isinstance(node, list | tuple) else 0
        hint = f"the list has {counted(size, 'item')}; the first is [0]"
        raise UserError(f"override {path}: there is no item [{index}]", hint) from None


def require_known_names(partial: run.Partial, where: str) -> None:
    """Check that no configuration has a misspelled argument, which its class would accept as `**kwargs`.

    All unknown arguments of strategies are rejected. Other classes may pass them on, so only an argument with a name
    similar to a known one is rejected.

    Args:
        partial: the recipe.
        where: name of the recipe or file, for messages.

    Raises:
        UserError: an argument is unknown; the hint contains the most similar names.
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
                hint = did_you_mean(name, names) or f"see the {len(names)} arguments of NeMo's {target.__name__}"
                raise UserError(f"{where}: {target.__name__} has no argument {name!r}", hint)
