"""Convert the values of a configuration to Python source in ruff's format.

A value first becomes a tree of source: calls and container literals (`Group`) with comments. The tree is then written
on one line if it fits, or else with a line per argument.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import pathlib
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, cast

import fiddle as fdl
import nemo_run as run
import torch

from superpod.collection.user_models import PREFIX
from superpod.errors import UserError
from superpod.nemo2.export import flatten
from superpod.nemo2.export.source_comments import argument_comment, configuration_comment

WIDTH = 100
"""Line length of an exported file."""

SHORT = (("from nemo.collections import llm", "llm"), ("from nemo import lightning as nl", "nl"))
"""Import statement and short name of NeMo packages whose classes are written like `llm.LlamaModel`."""

KINDS: dict[type, str] = {run.Config: "run.Config", run.Partial: "run.Partial"}
KINDS |= {fdl.Config: "fdl.Config", fdl.Partial: "fdl.Partial", fdl.ArgFactory: "fdl.ArgFactory"}
"""Configuration type -> its name in a file."""

Container = list[object] | tuple[object, ...] | set[object] | frozenset[object] | dict[object, object]


class NamedObject(Protocol):
    """A class or a function."""

    __module__: str
    __qualname__: str


@dataclass
class Group:
    """A call or a container literal: `opening`, items separated by commas, `closing`."""

    opening: str
    items: list[Item]
    closing: str


@dataclass
class Item:
    """An argument or item of a group, with its comment `why`; `label` is `name=`, `"key": ` or ""."""

    label: str
    value: str | Group
    why: str = ""


@dataclass
class Imports:
    """The imports of an exported file, collected while its values are written."""

    lines: dict[str, str] = field(default_factory=dict)
    """Name -> import statement, or "" for a function or constant of the file."""

    def module(self, line: str, name: str) -> str:
        """Add the import statement `line`, which binds `name`; return the name."""
        if self.lines.setdefault(name, line) != line:
            raise ValueError(f"conflicting imports of {name}: {line}; {self.lines[name]}")
        return name

    def reference(self, thing: NamedObject) -> str:
        """Add the import of a class or function, and return the expression that refers to it.

        Raises:
            UserError: a standalone file cannot import it.
        """
        module, name = thing.__module__, thing.__qualname__
        if module.partition(".")[0] in ("superpod", "__main__") or module.startswith(PREFIX) or "<" in name:
            raise UserError(
                f"the recipe uses {module}.{name}, which a standalone file cannot import",
                "leave out the override or option that adds it",
            )
        if module == "builtins":
            return name
        for line, short in SHORT:
            package = sys.modules[line.split()[1] + "." + line.split()[3]]
            if getattr(package, name, None) is thing:
                return f"{self.module(line, short)}.{name}"
        return self._import_from(module, name)

    def _import_from(self, module: str, name: str) -> str:
        outer = name.partition(".")[0]
        line = f"from {module} import {outer}"
        if self.lines.get(outer, line) != line:  # the name is already imported from another module
            return f"{self.module(f'import {module}', module)}.{name}"
        self.lines[outer] = line
        return name


@dataclass
class Writer:
    """Converts values to source trees; `replace` may return a constant or a call of a function instead of a tree."""

    imports: Imports
    replace: Callable[[str, object, str | Group], str | Group]

    def document(self, path: str, value: object) -> str | Group:
        """Return the source tree of the value at `path`.

        Raises:
            UserError: the value cannot be expressed in Python source.
        """
        if isinstance(value, fdl.Buildable):
            document: str | Group = self.configuration(path, value)
        elif type(value) in (list, tuple, set, frozenset, dict):  # exact types: a namedtuple is written differently
            document = self._container_source(path, cast("Container", value))
        else:
            document = self._scalar_source(path, value)
        return self.replace(path, value, document)

    def configuration(self, path: str, value: fdl.Buildable) -> Group:
        """Return the source tree of the configuration at `path`; only its arguments may be replaced by `replace`."""
        kind = KINDS.get(type(value))
        if kind is None:
            raise UserError(
                f"{path or 'the recipe'} has type {type(value).__name__}, which Python source cannot express"
            )
        userbuffers = flatten.find_userbuffers_name(value)
        if userbuffers:
            return self._userbuffers(userbuffers)
        package = kind.partition(".")[0]
        self.imports.module("import nemo_run as run" if package == "run" else "import fiddle as fdl", package)
        items = [Item("", self.imports.reference(fdl.get_callable(value)))]
        for name, argument in value.__arguments__.items():
            label = f"{name}=" if isinstance(name, str) else ""  # fiddle numbers positional arguments
            document = self.document(f"{path}.{name}".lstrip("."), argument)
            items.append(Item(label, document, argument_comment(value, str(name)) or configuration_comment(argument)))
        return Group(f"{kind}(", _drop_repeated_comments(items, configuration_comment(value)), ")")

    def _userbuffers(self, name: str) -> Group:
        """Return the source tree of NVIDIA's userbuffer configuration `name`, which is converted from a dataclass."""
        module, _, attribute = name.rpartition(".")
        package, _, short = module.rpartition(".")
        convert = self.imports.module("from fiddle.experimental import dataclasses as fdl_dc", "fdl_dc")
        dataclass_source = f"{self.imports.module(f'from {package} import {short}', short)}.{attribute}"
        return Group(f"{convert}.convert_dataclasses_to_configs(", [Item("", dataclass_source)], ")")

    def _container_source(self, path: str, value: Container) -> str | Group:
        if isinstance(value, dict):
            pairs = [(self.document(path, k), self.document(f"{path}[{k!r}]", v)) for k, v in value.items()]
            return Group("{", [Item(f"{one_line(k)}: ", v) for k, v in pairs], "}")
        repeat_expression = _repeat_expression(value) if isinstance(value, list) else None
        if repeat_expression:
            return repeat_expression
        items = [
            Item("", self.document(f"{path}[{i}]", item), configuration_comment(item)) for i, item in enumerate(value)
        ]
        if isinstance(value, frozenset):
            return Group("frozenset(", [Item("", Group("[", items, "]"))], ")")
        if isinstance(value, set):
            return Group("{", items, "}") if items else "set()"
        if isinstance(value, tuple):
            return Group("(", items, ",)" if len(items) == 1 else ")")
        return Group("[", items, "]")

    def _scalar_source(self, path: str, value: object) -> str | Group:
        if isinstance(value, torch.dtype):
            return f"{self.imports.module('import torch', 'torch')}.{str(value).partition('.')[2]}"
        if isinstance(value, enum.Enum):
            return f"{self.imports.reference(type(value))}.{value.name}"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, str | bytes) and type(value) in (str, bytes):
            return _string_source(value)
        if value is None or type(value) in (bool, int, float, complex):
            return repr(value)
        if isinstance(value, datetime.timedelta):
            self.imports.module("import datetime", "datetime")
            return repr(value)
        if isinstance(value, pathlib.PurePath):
            kind = f"{self.imports.module('import pathlib', 'pathlib')}.{type(value).__name__}"
            return Group(f"{kind}(", [Item("", _string_source(str(value)))], ")")
        if hasattr(value, "__qualname__"):
            return self.imports.reference(cast("NamedObject", value))
        if dataclasses.is_dataclass(value):
            items = [Item(f"{f.name}=", self.document(path, getattr(value, f.name))) for f in dataclasses.fields(value)]
            return Group(f"{self.imports.reference(type(value))}(", items, ")")
        raise UserError(f"{path} has type {type(value).__qualname__}, which Python source cannot express")


MIN_REPEATED = 3
"""Minimum number of equal consecutive items that are written like `["decoder"] * 3`."""


def _repeat_expression(values: Sequence[object]) -> str | Group | None:
    """Return a short source tree of a list of strings or string lists with equal neighbors; None for other lists."""
    runs = [(item, len(list(same))) for item, same in groupby(values)]
    if not any(count >= MIN_REPEATED for _, count in runs) or not all(map(_is_string_or_list, values)):
        return None
    if len(runs) == 1 and not isinstance(runs[0][0], list):
        return f"[{_strings_source(runs[0][0])}] * {len(values)}"
    items: list[Item] = []
    for item, count in runs:
        source = _strings_source(item)
        if count < MIN_REPEATED:
            items += [Item("", source) for _ in range(count)]
        elif isinstance(item, list):  # separate list objects, as in the original: fiddle compares object identity
            items.append(Item("", f"*({source} for _ in range({count}))"))
        else:
            items.append(Item("", f"*[{source}] * {count}"))
    return Group("[", items, "]")


def _is_string_or_list(item: object) -> bool:
    return type(item) is str or (type(item) is list and all(type(part) is str for part in item))


def _strings_source(item: object) -> str:
    """Return the source of a string or a list of strings."""
    if not isinstance(item, list):
        return _string_source(cast("str", item))
    return one_line(_repeat_expression(item) or Group("[", [Item("", _string_source(part)) for part in item], "]"))


def one_line(document: str | Group) -> str:
    """Return a source tree as one line, without comments."""
    if isinstance(document, str):
        return document
    return document.opening + ", ".join(i.label + one_line(i.value) for i in document.items) + document.closing


def lines(document: str | Group, indent: int, before: int, after: int = 0) -> list[str]:
    """Return a source tree as lines; the first line has no indentation.

    Args:
        document: the source tree.
        indent: indentation of the statement that contains the tree, in columns.
        before: number of columns used before the tree on the first line.
        after: number of columns needed after the tree on the last line, such as 1 for a comma.
    """
    single_line = one_line(document)
    if isinstance(document, str):
        return [single_line]
    has_comments = _has_comments(document)
    if not has_comments and before + len(single_line) + after <= WIDTH:
        return [single_line]
    # ruff puts all arguments of a call on one line of their own if they fit, but never the items of a list.
    inner_text = single_line.removeprefix(document.opening).removesuffix(document.closing)
    is_call = len(document.opening) > 1
    if is_call and not has_comments and len(document.items) > 1 and indent + 4 + len(inner_text) <= WIDTH:
        return [document.opening, " " * (indent + 4) + inner_text, " " * indent + document.closing]
    item_lines = [line for item in document.items for line in _item_lines(item, indent + 4)]
    return [document.opening, *item_lines, " " * indent + document.closing.lstrip(",")]


def comment(text: str, indent: int) -> list[str]:
    """Return a text as comment lines."""
    lead = " " * indent + "# "
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=lead, break_long_words=False)


def _item_lines(item: Item, indent: int) -> list[str]:
    """Return the lines of an item, with its comment and a comma."""
    margin = " " * indent
    body = lines(item.value, indent, indent + len(item.label), 1)
    body[0] = margin + item.label + body[0]
    body[-1] += ","
    if not item.why:
        return body
    if len(body) == 1 and len(body[0]) + len("  # ") + len(item.why) <= WIDTH:
        return [f"{body[0]}  # {item.why}"]
    return [*comment(item.why, indent), *body]


def _has_comments(document: str | Group) -> bool:
    return isinstance(document, Group) and any(item.why or _has_comments(item.value) for item in document.items)


def _drop_repeated_comments(items: list[Item], group_comment: str) -> list[Item]:
    """Return `items` without the comments that repeat that of an earlier item or of the group."""
    seen_comments = {group_comment}
    for item in items:
        if item.why in seen_comments:
            item.why = ""
        seen_comments.add(item.why)
    return items


def _string_source(text: str | bytes) -> str:
    """Return the source of a string with ruff's quotes: double, unless the text contains double quotes."""
    prefix = "b" if isinstance(text, bytes) else ""
    quoted_text = repr(text).removeprefix(prefix)
    if quoted_text[0] == "'" and '"' not in quoted_text:
        quoted_text = f'"{quoted_text[1:-1]}"'
    return prefix + quoted_text
