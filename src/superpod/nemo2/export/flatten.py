"""A recipe as lines of `path = value`: what `recipes show` prints, goldens hold and run folders keep."""

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
    """One value of a flattened recipe."""

    path: str
    value: str
    where: str
    """file:line that set it last, or the class whose default it is"""

    def __str__(self) -> str:
        return f"{self.path} = {self.value}"


def flatten(partial: fdl.Buildable) -> list[Line]:
    """Every value that `partial` sets, and the defaults of its model class that differ from Megatron's.

    A `Config` is a line with its class, followed by its fields. Lines are sorted by path, so that a diff of two
    recipes is a diff of their lines.
    """
    return sorted(_walk("", partial, ""), key=lambda line: line.path)


def _walk(path: str, value: Any, where: str) -> Iterator[Line]:
    if name := constant(value):
        yield Line(path, name, where)
    elif isinstance(value, fdl.Buildable):
        yield Line(path or "recipe", _name(fdl.get_callable(value)), where)
        for field, item in _arguments(value):
            yield from _walk(f"{path}.{field}" if path else field, item, set_at(value, field))
        yield from _class_defaults(path, value)
    elif isinstance(value, list | tuple) and any(isinstance(v, fdl.Buildable) for v in value):
        for index, item in enumerate(value):
            yield from _walk(f"{path}[{index}]", item, where)
    else:
        yield Line(path, text_of(value), where)


def constant(value: Any) -> str:
    """The name of the tuned overlap of NVIDIA that `value` equals, which would be seventy lines; "" = none."""
    if getattr(getattr(value, "__fn_or_cls__", None), "__name__", "") != "TransformerLayerTPOverlapCfg":
        return ""
    from nemo.collections.llm.recipes.tp_overlap_configs import userbuffers

    built = fdl.build(value)
    names = (name for name in dir(userbuffers) if name.startswith("userbuffers_"))
    return next((f"{userbuffers.__name__}.{name}" for name in names if getattr(userbuffers, name) == built), "")


def _arguments(config: fdl.Buildable) -> Iterator[tuple[str, Any]]:
    yield from ((str(field), item) for field, item in config.__arguments__.items())


def _class_defaults(path: str, config: fdl.Buildable) -> Iterator[Line]:
    """Defaults of a NeMo model class that differ from those of Megatron's `TransformerConfig`."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    cls = fdl.get_callable(config)
    if not (isinstance(cls, type) and issubclass(cls, TransformerConfig)):
        return
    base = {f.name: f.default for f in dataclasses.fields(TransformerConfig)}
    for field in dataclasses.fields(cls):
        unset = field.name not in config.__arguments__ and field.default is not dataclasses.MISSING
        if unset and field.default != base.get(field.name, dataclasses.MISSING):
            yield Line(f"{path}.{field.name}", text_of(field.default), f"default of {cls.__name__}")


def set_at(config: fdl.Buildable, field: str) -> str:
    """`nemo2/build/partial.py:64`: the file and line that set an argument last; "" where nothing is recorded."""
    changes = config.__argument_history__.get(field)
    if not changes:
        return ""
    location = changes[-1].location
    line = _keyword_lines(location.filename).get((location.line_number, field), location.line_number)
    return f"{_short(location.filename)}:{line}" if line else _short(location.filename)


@cache
def _keyword_lines(filename: str) -> dict[tuple[int, str], int]:
    """(line of a call, keyword) -> line of that keyword, because a call may span many lines."""
    if not filename.endswith(".py"):
        return {}
    calls = [node for node in ast.walk(ast.parse(Path(filename).read_text())) if isinstance(node, ast.Call)]
    return {(call.lineno, key.arg): key.lineno for call in calls for key in call.keywords if key.arg}


@cache
def _short(filename: str) -> str:
    """The path as a reader knows it: relative to the repository, or to site-packages for a library."""
    if not os.path.isabs(filename):
        return filename
    path = Path(os.path.realpath(filename))
    if name := package_files.name_of(path):
        return name
    parts = path.parts
    return str(Path(*parts[parts.index("site-packages") + 1 :])) if "site-packages" in parts else str(path)


def _name(thing: Any) -> str:
    module = getattr(thing, "__module__", "")
    name = getattr(thing, "__qualname__", None) or repr(thing)
    return f"{module}.{name}" if module and module != "builtins" else name


def text_of(value: Any) -> str:
    """A value as flattened recipes show it: functions and classes by name."""
    if isinstance(value, list | tuple):
        inner = ", ".join(map(text_of, value))
        return f"[{inner}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {text_of(v)}" for k, v in value.items()) + "}"
    if callable(value) and not isinstance(value, type(None)) and hasattr(value, "__name__"):
        return _name(value)
    if isinstance(value, functools.partial):  # DeepSeek's layer specification; its repr holds an address
        keywords = (f"{key}={text_of(item)}" for key, item in value.keywords.items())
        return f"functools.partial({', '.join([_name(value.func), *map(text_of, value.args), *keywords])})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}(...)"
    return repr(value)
