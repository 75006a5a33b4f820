"""The value of an override: Python literals, and names and constructors of NeMo's stack, without evaluating any code.

`parse` reads the text as a syntax tree. Literals, containers and dotted names below `PACKAGES` become values; a call
becomes a configuration of the class that it names, or a `datetime.timedelta`. Anything else is not evaluated: where the
field takes a string, the text is that string, and everywhere else it is refused.
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

from superpod.nemo2.signatures import parameter_of

PACKAGES = (
    *("torch.nn.functional", "torch.nn.init", "megatron.core", "nemo.collections.llm", "nemo.lightning"),
    *("nemo.utils", "lightning.pytorch", "transformer_engine.pytorch"),
)
"""Packages below which a dotted name is looked up. Of `torch` itself, only its data types are taken."""
SHORT = {"nl": "nemo.lightning", "llm": "nemo.collections.llm", "F": "torch.nn.functional"}
"""The names under which NeMo's documentation imports some of them."""
VALUES: dict[str, type] = {"datetime.timedelta": datetime.timedelta, "timedelta": datetime.timedelta}
"""Constructors whose result is a value; any other class becomes a `run.Config`."""
WORDS: dict[str, Any] = {"none": None, "null": None, "true": True, "false": False}
SWITCHES = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
NUMBERS = {"inf": math.inf, "nan": math.nan}


class NotAValue(ValueError):
    """The text is not a value that the field takes."""


class _NotLiteral(ValueError):
    """The text is not a literal, a known name or a known constructor."""


def parse(text: str, types: collections.abc.Sequence[Any]) -> Any:
    """The value that a text means for a field.

    Args:
        text: the text after the equals sign.
        types: the types that the field takes (`types_of`); several if a class narrows the type of its base.

    Raises:
        NotAValue: the text is not a value of any of these types.
    """
    text = text.strip()
    try:
        value: Any = _value(ast.parse(text, mode="eval").body)
    except (_NotLiteral, SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        value = text
    for annotation in types:
        try:
            return _fitted(value, text, annotation)
        except NotAValue:
            continue
    raise NotAValue(text)


def types_of(target: Any, field: str) -> list[Any]:
    """The types that a class or function takes for a field: its own annotation, then those of its bases."""
    found: list[Any] = []
    if parameter := parameter_of(target, field):
        found.append(_resolved(target, field, parameter.annotation))
    for base in inspect.getmro(target) if isinstance(target, type) else ():
        if field in (own := inspect.get_annotations(base)):
            found.append(_resolved(base, field, own[field]))
        elif parameter := _own_parameter(base, field):
            found.append(_resolved(base, field, parameter.annotation))
    return [known for known in found if known is not None] or [Any]


def _own_parameter(base: type, field: str) -> inspect.Parameter | None:
    try:
        return inspect.signature(base.__init__).parameters.get(field) if "__init__" in vars(base) else None
    except (TypeError, ValueError):
        return None


def _resolved(target: Any, field: str, annotation: Any) -> Any:
    """An annotation, evaluated if it is a string; None if that names a type that cannot be found."""
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


def _value(node: ast.expr) -> Any:
    """The value of a syntax tree of literals, names and constructors. Raises _NotLiteral for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    if isinstance(node, ast.Set):
        return {_value(item) for item in node.elts}
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_value(typing.cast(ast.expr, k)): _value(v) for k, v in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.Name | ast.Attribute):
        return _named(_dotted(node))
    if isinstance(node, ast.Call):
        return _made(node)
    raise _NotLiteral(ast.dump(node))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise _NotLiteral(ast.dump(node))


def _named(name: str) -> Any:
    if name.lower() in WORDS:
        return WORDS[name.lower()]
    if name.lower() in NUMBERS:
        return NUMBERS[name.lower()]
    first, _, rest = name.partition(".")
    if first == "torch" and isinstance(dtype := getattr(torch, rest, None), torch.dtype):
        return dtype
    return lookup(f"{SHORT.get(first, first)}.{rest}" if rest else name)


def lookup(name: str) -> Any:
    """The function, class or constant with a dotted name below `PACKAGES`. Raises _NotLiteral for others."""
    if not any(name.startswith(f"{package}.") for package in PACKAGES) or "._" in name:
        raise _NotLiteral(name)
    module, _, attribute = name.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:  # an attribute of a class
        module, _, outer = module.rpartition(".")
        if not any(f"{module}.".startswith(f"{package}.") for package in PACKAGES):
            raise _NotLiteral(name) from None
        try:
            owner = getattr(importlib.import_module(module), outer, None)
        except ImportError:
            raise _NotLiteral(name) from None
    found = getattr(owner, attribute, None)
    home = str(getattr(found, "__module__", "") or module).partition(".")[0]
    if found is None or isinstance(found, types.ModuleType) or home not in {p.partition(".")[0] for p in PACKAGES}:
        raise _NotLiteral(name)
    return found


def _made(call: ast.Call) -> Any:
    """The result of a constructor call with literal arguments: a value of `VALUES`, or a `run.Config`."""
    name = _dotted(call.func)
    if any(keyword.arg is None for keyword in call.keywords):
        raise _NotLiteral(name)
    positional = [_value(argument) for argument in call.args]
    named = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    if name in VALUES:
        return VALUES[name](*positional, **named)
    target = _named(name)
    if not isinstance(target, type):
        raise _NotLiteral(f"{name} is not a class")
    return run.Config(target, *positional, **named)


# -- conversion --------------------------------------------------------------------


def _fitted(value: Any, text: str, annotation: Any) -> Any:
    """The value, converted to what an annotation takes. Raises NotAValue."""
    origin = get_origin(annotation)
    if annotation in (Any, object) or isinstance(annotation, typing.TypeVar | typing.ForwardRef):
        return value  # a ForwardRef that is left names a type imported for type checkers only
    if origin is typing.Annotated:
        return _fitted(value, text, get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return _of_union(value, text, get_args(annotation))
    if origin is Literal:
        return _of_choice(value, text, get_args(annotation))
    if origin is collections.abc.Callable or annotation in (typing.Callable, collections.abc.Callable):
        return _require(value, callable(value))
    if annotation in (None, type(None)):
        return _require(value, value is None)
    return _of_class(value, text, annotation, origin)


def _of_class(value: Any, text: str, annotation: Any, origin: Any) -> Any:
    if annotation is str:
        return value if _is_quoted(text) else _require(text, not text.startswith(("[", "{", "(")) or value == text)
    if annotation is Path:
        return _require(Path(value if _is_quoted(text) else text), isinstance(value, str))
    if annotation is bool:
        return _require(SWITCHES.get(text.lower()), text.lower() in SWITCHES)
    if annotation in (int, float):
        return _of_number(value, annotation)
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return _of_enumeration(value, text, annotation)
    return _of_container(value, annotation, origin)


def _require(value: Any, holds: bool) -> Any:
    if not holds:
        raise NotAValue(repr(value))
    return value


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"


def _of_number(value: Any, kind: type) -> Any:
    if isinstance(value, bool):
        raise NotAValue(repr(value))
    if kind is float and isinstance(value, int | float):
        return float(value)
    return _require(value, isinstance(value, int))


def _of_choice(value: Any, text: str, choices: tuple[Any, ...]) -> Any:
    if value in choices:
        return value
    return _require(text, text in choices)


def _of_enumeration(value: Any, text: str, kind: type[enum.Enum]) -> Any:
    if isinstance(value, kind):
        return value
    name = text.rpartition(".")[2]
    return _require(kind.__members__.get(name), name in kind.__members__)


def _of_union(value: Any, text: str, members: tuple[Any, ...]) -> Any:
    """The value as the first member of a union that takes it: exact types first, `str`, which takes any text, last."""
    if isinstance(value, datetime.timedelta) and any(get_origin(member) is dict for member in members):
        return {"days": value.days, "seconds": value.seconds}  # NeMo's Trainer cannot record a timedelta
    exact = [member for member in members if inspect.isclass(member) and type(value) is member and member is not str]
    others = [member for member in members if member not in exact and member is not str]
    for member in (*exact, *others, *([str] if str in members else [])):
        try:
            return _fitted(value, text, member)
        except NotAValue:
            continue
    raise NotAValue(text)


SEQUENCES = (list, collections.abc.Sequence, collections.abc.Iterable)


def _of_container(value: Any, annotation: Any, origin: Any) -> Any:
    """The value as a list, tuple, set, dictionary or object of a class, with converted items."""
    kind, items = origin or annotation, get_args(annotation)
    if kind in SEQUENCES and isinstance(value, list | tuple):
        return [_fitted(item, str(item), items[0]) for item in value] if items else list(value)
    if kind in (set, frozenset) and isinstance(value, list | tuple | set):
        return kind(_fitted(item, str(item), items[0]) if items else item for item in value)
    if kind is tuple and isinstance(value, list | tuple):
        if len(items) == 2 and items[1] is Ellipsis:
            return tuple(_fitted(item, str(item), items[0]) for item in value)
        if items and len(items) != len(value):
            raise NotAValue(repr(value))
        return (
            tuple(_fitted(item, str(item), i) for item, i in zip(value, items, strict=True)) if items else tuple(value)
        )
    if kind in (dict, collections.abc.Mapping) and isinstance(value, dict):
        if not items:
            return value
        return {_fitted(k, str(k), items[0]): _fitted(v, str(v), items[1]) for k, v in value.items()}
    if not inspect.isclass(kind):
        raise NotAValue(repr(value))
    if isinstance(value, fdl.Buildable):
        made = fdl.get_callable(value)
        return _require(value, inspect.isclass(made) and issubclass(made, kind))
    return _require(value, isinstance(value, kind) and not isinstance(value, str))
