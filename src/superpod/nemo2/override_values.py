"""Parse the values of overrides: Python literals, and names and constructors of NeMo's stack. No code is executed.

`parse` reads a value as a syntax tree. Literals, containers and dotted names in `PACKAGES` become values; a call
becomes a configuration of the class that it names, or a `datetime.timedelta`. Other text is a string if the field
accepts strings, and an error otherwise.
"""

from __future__ import annotations

import ast
import collections.abc
import datetime
import enum
import importlib
import inspect
import math
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import fiddle as fdl
import nemo_run as run
import torch

from superpod.nemo2.signatures import find_parameter

PACKAGES = (
    *("torch.nn.functional", "torch.nn.init", "megatron.core", "nemo.collections.llm", "nemo.lightning"),
    *("nemo.utils", "lightning.pytorch", "transformer_engine.pytorch"),
)
"""Packages in which dotted names are looked up; in `torch` itself, only data types are."""
SHORT = {"nl": "nemo.lightning", "llm": "nemo.collections.llm", "F": "torch.nn.functional"}
"""Short name in NeMo's documentation -> package."""
VALUES: dict[str, type] = {"datetime.timedelta": datetime.timedelta, "timedelta": datetime.timedelta}
"""Name -> constructor that is called; a call of any other class becomes a `run.Config`."""
CONSTANTS = {"none": None, "null": None, "true": True, "false": False, "inf": math.inf, "nan": math.nan}
SWITCHES = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class NotAValue(ValueError):
    """Raised for a text that is not a value of the field's type."""


class _NotLiteral(ValueError):
    """Raised for a text that is neither a literal nor a known name or constructor."""


def parse(text: str, types: collections.abc.Sequence[Any]) -> Any:
    """Return the value that the text of an override specifies.

    Args:
        text: the text after the equals sign.
        types: types of the field, from `field_types`; the first that accepts the text applies.

    Raises:
        NotAValue: no type accepts the text.
    """
    text = text.strip()
    try:
        value: Any = _evaluate(ast.parse(text, mode="eval").body)
    except (_NotLiteral, SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        value = text
    for annotation in types:
        try:
            return _convert(value, text, annotation)
        except NotAValue:
            continue
    raise NotAValue(text)


def field_types(target: Any, field: str) -> list[Any]:
    """Return the annotated types of a class's field or a function's parameter; [Any] if there are none.

    Annotations of base classes follow that of the class.
    """
    found: list[Any] = []
    parameter = find_parameter(target, field)
    if parameter is not None:
        found.append(_resolve_annotation(target, field, parameter.annotation))
    for base in inspect.getmro(target) if isinstance(target, type) else ():
        annotations = inspect.get_annotations(base)
        if field in annotations:
            found.append(_resolve_annotation(base, field, annotations[field]))
            continue
        parameter = _init_parameter(base, field)
        if parameter is not None:
            found.append(_resolve_annotation(base, field, parameter.annotation))
    return [known for known in found if known is not None] or [Any]


def _init_parameter(base: type, field: str) -> inspect.Parameter | None:
    """Return a parameter of `base.__init__`; None if `base` itself defines no `__init__` with this parameter."""
    if "__init__" not in vars(base):
        return None
    try:
        return inspect.signature(base.__init__).parameters.get(field)
    except (TypeError, ValueError):
        return None


def _resolve_annotation(target: Any, field: str, annotation: Any) -> Any:
    """Return the type of an annotation, which may be a string; None if the type cannot be found."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        hints = get_type_hints(target) | get_type_hints(target.__init__ if isinstance(target, type) else target)
    except (NameError, TypeError, AttributeError):  # imported for type checkers only
        return None
    return hints.get(field)


# -- parsing --------------------------------------------------------------------------------------------


def _evaluate(node: ast.expr) -> Any:
    """Return the value of a syntax tree of literals, names and constructors. Raises _NotLiteral for other trees."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _evaluate(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_evaluate(item) for item in node.elts)
    if isinstance(node, ast.Set):
        return {_evaluate(item) for item in node.elts}
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_evaluate(typing.cast(ast.expr, key)) for key in node.keys]
        return dict(zip(keys, map(_evaluate, node.values), strict=True))
    if isinstance(node, ast.Name | ast.Attribute):
        return _named_value(_dotted_name(node))
    if isinstance(node, ast.Call):
        return _construct(node)
    raise _NotLiteral(ast.dump(node))


def _dotted_name(node: ast.expr) -> str:
    """Return the text of a dotted name. Raises _NotLiteral for other trees."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    raise _NotLiteral(ast.dump(node))


def _named_value(name: str) -> Any:
    """Return the constant, data type, class or function with a dotted name. Raises _NotLiteral for unknown names."""
    if name.lower() in CONSTANTS:
        return CONSTANTS[name.lower()]
    first, _, rest = name.partition(".")
    if first == "torch":
        dtype = getattr(torch, rest, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return lookup(f"{SHORT.get(first, first)}.{rest}" if rest else name)


def lookup(name: str) -> Any:
    """Return the function, class or constant with a dotted name in `PACKAGES`. Raises _NotLiteral for other names."""
    if not any(name.startswith(f"{package}.") for package in PACKAGES) or "._" in name:
        raise _NotLiteral(name)
    module, _, attribute = name.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:  # an attribute of a class
        module, _, cls = module.rpartition(".")
        if not any(f"{module}.".startswith(f"{package}.") for package in PACKAGES):
            raise _NotLiteral(name) from None
        try:
            owner = getattr(importlib.import_module(module), cls, None)
        except ImportError:
            raise _NotLiteral(name) from None
    field = getattr(owner, attribute, None)
    package = str(getattr(field, "__module__", "") or module).partition(".")[0]
    if field is None or isinstance(field, types.ModuleType) or package not in {p.partition(".")[0] for p in PACKAGES}:
        raise _NotLiteral(name)
    return field


def _construct(call: ast.Call) -> Any:
    """Return the value of a constructor in `VALUES`, or a `run.Config` of another class, for a call with literals."""
    name = _dotted_name(call.func)
    if any(keyword.arg is None for keyword in call.keywords):
        raise _NotLiteral(name)
    arguments = [_evaluate(argument) for argument in call.args]
    keywords = {str(keyword.arg): _evaluate(keyword.value) for keyword in call.keywords}
    if name in VALUES:
        return VALUES[name](*arguments, **keywords)
    target = _named_value(name)
    if not isinstance(target, type):
        raise _NotLiteral(f"{name} is not a class")
    return run.Config(target, *arguments, **keywords)


# -- conversion --------------------------------------------------------------------


def _convert(value: Any, text: str, annotation: Any) -> Any:
    """Return `value`, parsed from `text`, as a value of the type `annotation`. Raises NotAValue if that fails."""
    origin = get_origin(annotation)
    if annotation in (Any, object) or isinstance(annotation, typing.TypeVar | typing.ForwardRef):
        return value  # an unresolved ForwardRef names a type that is imported for type checkers only
    if origin is typing.Annotated:
        return _convert(value, text, get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return _convert_to_union(value, text, get_args(annotation))
    if origin is Literal:
        choices = get_args(annotation)
        return value if value in choices else _require(text, text in choices)
    if origin is collections.abc.Callable or annotation in (typing.Callable, collections.abc.Callable):
        return _require(value, callable(value))
    if annotation in (None, type(None)):
        return _require(value, value is None)
    return _convert_to_class(value, text, annotation, origin)


def _convert_to_class(value: Any, text: str, annotation: Any, origin: Any) -> Any:
    """Convert to str, Path, bool, a number, an enum, a container or another class."""
    if annotation is str:
        if _is_quoted(text):
            return value
        return _require(text, not text.startswith(("[", "{", "(")) or value == text)
    if annotation is Path:
        return _require(Path(value if _is_quoted(text) else text), isinstance(value, str))
    if annotation is bool:
        return _require(SWITCHES.get(text.lower()), text.lower() in SWITCHES)
    if annotation in (int, float):
        return _convert_to_number(value, annotation)
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return _convert_to_enum(value, text, annotation)
    return _convert_to_container(value, annotation, origin)


def _require(value: Any, condition: bool) -> Any:
    """Return `value` if `condition` is true. Raises NotAValue otherwise."""
    if not condition:
        raise NotAValue(repr(value))
    return value


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"


def _convert_to_number(value: Any, kind: type) -> Any:
    if isinstance(value, bool):
        raise NotAValue(repr(value))
    if kind is float and isinstance(value, int | float):
        return float(value)
    return _require(value, isinstance(value, int))


def _convert_to_enum(value: Any, text: str, kind: type[enum.Enum]) -> Any:
    if isinstance(value, kind):
        return value
    name = text.rpartition(".")[2]
    return _require(kind.__members__.get(name), name in kind.__members__)


def _convert_to_union(value: Any, text: str, members: tuple[Any, ...]) -> Any:
    """Convert to the first type in a union that accepts the value: its exact type, then other types, then str."""
    if isinstance(value, datetime.timedelta) and any(get_origin(member) is dict for member in members):
        return {"days": value.days, "seconds": value.seconds}  # NeMo's Trainer cannot serialize a timedelta
    # str comes last, because it accepts any text; False sorts before True.
    for member in sorted(members, key=lambda member: (member is str, type(value) is not member)):
        try:
            return _convert(value, text, member)
        except NotAValue:
            continue
    raise NotAValue(text)


SEQUENCES = (list, collections.abc.Sequence, collections.abc.Iterable)
"""Annotated classes for which a list is accepted."""


def _convert_to_container(value: Any, annotation: Any, origin: Any) -> Any:
    """Convert to a list, tuple, set, dictionary or instance of a class; items are converted, too."""
    kind, items = origin or annotation, get_args(annotation)
    if kind in SEQUENCES and isinstance(value, list | tuple):
        return _convert_items(value, items)
    if kind in (set, frozenset) and isinstance(value, list | tuple | set):
        return kind(_convert_items(value, items))
    if kind is tuple and isinstance(value, list | tuple):
        return _convert_to_tuple(value, items)
    if kind in (dict, collections.abc.Mapping) and isinstance(value, dict):
        if not items:
            return value
        return {_convert(k, str(k), items[0]): _convert(v, str(v), items[1]) for k, v in value.items()}
    if not inspect.isclass(kind):
        raise NotAValue(repr(value))
    if isinstance(value, fdl.Buildable):
        target = fdl.get_callable(value)
        return _require(value, inspect.isclass(target) and issubclass(target, kind))
    return _require(value, isinstance(value, kind) and not isinstance(value, str))


def _convert_to_tuple(values: collections.abc.Sequence[Any], types: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert to a tuple with the types of a tuple annotation, such as `tuple[int, str]` or `tuple[int, ...]`."""
    if not types or (len(types) == 2 and types[1] is Ellipsis):
        return tuple(_convert_items(values, types))
    if len(types) != len(values):
        raise NotAValue(repr(values))
    return tuple(_convert(item, str(item), kind) for item, kind in zip(values, types, strict=True))


def _convert_items(values: collections.abc.Iterable[Any], types: tuple[Any, ...]) -> list[Any]:
    """Convert each item to the type `types[0]`; if `types` is empty, return the items unchanged."""
    return [_convert(item, str(item), types[0]) for item in values] if types else list(values)
