"""Convert a recipe to lines of `path = value`, for `recipes show`, goldens and run folders."""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fiddle as fdl

from superpod.common import package_files


@dataclass(frozen=True)
class Line:
    """A value of a flattened recipe."""

    path: str
    value: str
    where: str
    """`file:line` that last set the value, or the class whose default it is."""

    def __str__(self) -> str:
        return f"{self.path} = {self.value}"


def flatten(partial: fdl.Buildable) -> list[Line]:
    """Return a line per value that `partial` sets, and per default of its model class that differs from Megatron's.

    A `Config` becomes a line with its class, followed by its fields. Lines are sorted by path, so that two recipes can
    be compared line by line.
    """
    return sorted(_walk("", partial, ""), key=lambda line: line.path)


def _walk(path: str, value: Any, where: str) -> Iterator[Line]:
    """Yield the lines of `value` at `path`, which was set at `where`."""
    userbuffers = find_userbuffers_name(value)
    if userbuffers:
        yield Line(path, userbuffers, where)
    elif isinstance(value, fdl.Buildable):
        yield Line(path or "recipe", _qualified_name(fdl.get_callable(value)), where)
        for field, item in ((str(name), argument) for name, argument in value.__arguments__.items()):
            yield from _walk(f"{path}.{field}" if path else field, item, find_setter(value, field))
        yield from _class_defaults(path, value)
    elif isinstance(value, list | tuple) and any(isinstance(v, fdl.Buildable) for v in value):
        for index, item in enumerate(value):
            yield from _walk(f"{path}[{index}]", item, where)
    else:
        yield Line(path, format_value(value), where)


def find_userbuffers_name(value: Any) -> str:
    """Return the name of NVIDIA's userbuffer configuration that `value` equals, instead of 70 fields; "" for others."""
    if getattr(getattr(value, "__fn_or_cls__", None), "__name__", "") != "TransformerLayerTPOverlapCfg":
        return ""
    from nemo.collections.llm.recipes.tp_overlap_configs import userbuffers

    built_config = fdl.build(value)
    names = (name for name in dir(userbuffers) if name.startswith("userbuffers_"))
    return next((f"{userbuffers.__name__}.{name}" for name in names if getattr(userbuffers, name) == built_config), "")


def _class_defaults(path: str, config: fdl.Buildable) -> Iterator[Line]:
    """Yield the defaults of a NeMo model class that differ from those of Megatron's `TransformerConfig`."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    cls = fdl.get_callable(config)
    if not (isinstance(cls, type) and issubclass(cls, TransformerConfig)):
        return
    base = {f.name: f.default for f in dataclasses.fields(TransformerConfig)}
    for field in dataclasses.fields(cls):
        is_unset = field.name not in config.__arguments__ and field.default is not dataclasses.MISSING
        if is_unset and field.default != base.get(field.name, dataclasses.MISSING):
            yield Line(f"{path}.{field.name}", format_value(field.default), f"default of {cls.__name__}")


def find_setter(config: fdl.Buildable, field: str) -> str:
    """Return the file and line that last set an argument, such as `nemo2/build/partial.py:64`; "" if unknown."""
    changes = config.__argument_history__.get(field)
    if not changes:
        return ""
    location = changes[-1].location
    line = _keyword_lines(location.filename).get((location.line_number, field), location.line_number)
    return f"{_shorten_filename(location.filename)}:{line}" if line else _shorten_filename(location.filename)


@cache
def _keyword_lines(filename: str) -> dict[tuple[int, str], int]:
    """Return {(line of a call, keyword): line of the keyword} for a Python file, because a call may span many lines."""
    if not filename.endswith(".py"):
        return {}
    calls = [node for node in ast.walk(ast.parse(Path(filename).read_text())) if isinstance(node, ast.Call)]
    return {(call.lineno, key.arg): key.lineno for call in calls for key in call.keywords if key.arg}


@cache
def _shorten_filename(filename: str) -> str:
    """Return a file name relative to the repository or, for a library, to site-packages."""
    if not os.path.isabs(filename):
        return filename
    path = Path(os.path.realpath(filename))
    name = package_files.display_name(path)
    if name:
        return name
    return str(path).rpartition("/site-packages/")[2]


def _qualified_name(thing: Any) -> str:
    """Return the module and name of a class or function; the name only for built-ins."""
    module = getattr(thing, "__module__", "")
    name = getattr(thing, "__qualname__", None) or repr(thing)
    return f"{module}.{name}" if module and module != "builtins" else name


def format_value(value: Any) -> str:
    """Return the text of a value in a line of a flattened recipe; functions and classes appear by name."""
    if isinstance(value, list | tuple):
        items = ", ".join(map(format_value, value))
        return f"[{items}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {format_value(v)}" for k, v in value.items()) + "}"
    if callable(value) and not isinstance(value, type(None)) and hasattr(value, "__name__"):
        return _qualified_name(value)
    if isinstance(value, functools.partial):  # DeepSeek's layer specification, whose repr contains an address
        keywords = (f"{key}={format_value(item)}" for key, item in value.keywords.items())
        arguments = [_qualified_name(value.func), *map(format_value, value.args), *keywords]
        return f"functools.partial({', '.join(arguments)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}(...)"
    return repr(value)
