"""Values of a configuration as Python source: one line where it fits, else an argument a line, as ruff formats it."""

from __future__ import annotations

import dataclasses
import enum
import math
import pathlib
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fiddle as fdl
import nemo_run as run
import torch

from superpod.errors import UserError
from superpod.recipes.export.source_comments import about, why

WIDTH = 100
"""Columns of an exported file."""

SHORT = (("from nemo.collections import llm", "llm"), ("from nemo import lightning as nl", "nl"))
"""Packages of NeMo whose names are written as `llm.LlamaModel`, as NeMo's users do."""

KINDS: dict[type, str] = {run.Config: "run.Config", run.Partial: "run.Partial"}
KINDS |= {fdl.Config: "fdl.Config", fdl.Partial: "fdl.Partial", fdl.ArgFactory: "fdl.ArgFactory"}
"""Kinds of configuration that a file can hold."""


@dataclass
class Group:
    """`opening item, item closing`: a call or a display."""

    opening: str
    items: list[Item]
    closing: str


@dataclass
class Item:
    """An item of a group: `label` is `name=`, `"key": ` or nothing; `why` is the comment on it."""

    label: str
    value: str | Group
    why: str = ""


@dataclass
class Imports:
    """What the file imports, gathered while its values are written. No name means two things."""

    lines: dict[str, str] = field(default_factory=dict)
    """Name -> what imports it."""

    def module(self, line: str, name: str) -> str:
        """A name, with the import that brings it."""
        if self.lines.setdefault(name, line) != line:
            raise ValueError(f"{name} would be imported twice: {line}, {self.lines[name]}")
        return name

    def of(self, thing: Any) -> str:
        """How the file names a class or a function.

        Raises:
            UserError: when no file could import it, or only where this project is installed.
        """
        module, name = thing.__module__, thing.__qualname__
        if module.partition(".")[0] in ("superpod", "__main__") or "<" in name:
            raise UserError(
                f"the recipe uses {module}.{name}, which a file that stands alone cannot import",
                "export it without what brings that in",
            )
        if module == "builtins":
            return name
        for line, short in SHORT:
            package = sys.modules[line.split()[1] + "." + line.split()[3]]
            if getattr(package, name, None) is thing:
                return f"{self.module(line, short)}.{name}"
        return self._from(module, name)

    def _from(self, module: str, name: str) -> str:
        outer = name.partition(".")[0]
        line = f"from {module} import {outer}"
        if self.lines.get(outer, line) != line:  # another module has the name already
            return f"{self.module(f'import {module}', module)}.{name}"
        self.lines[outer] = line
        return name


@dataclass
class Writer:
    """Values to documents. `part` may put the call of a function in a document's place; it gives that to the file."""

    imports: Imports
    part: Callable[[str, Any, str | Group], str | Group]

    def document(self, path: str, value: Any) -> str | Group:
        """What is written for the value at `path`.

        Raises:
            UserError: when it is of a kind that has no source.
        """
        return self.part(path, value, self._whole(path, value))

    def _whole(self, path: str, value: Any) -> str | Group:
        if isinstance(value, fdl.Buildable):
            return self.buildable(path, value)
        if type(value) in (list, tuple, set, frozenset, dict):
            return self._container(path, value)
        return self._leaf(path, value)

    def buildable(self, path: str, value: fdl.Buildable) -> Group:
        """What is written for a configuration, whether or not it is a part."""
        kind = KINDS.get(type(value))
        if kind is None:
            raise UserError(f"{path or 'the recipe'} is a {type(value).__name__}, which cannot be written as source")
        package = kind.partition(".")[0]
        self.imports.module("import nemo_run as run" if package == "run" else "import fiddle as fdl", package)
        items = [Item("", self.imports.of(fdl.get_callable(value)))]
        for name, each in value.__arguments__.items():
            label = f"{name}=" if isinstance(name, str) else ""
            document = self.document(f"{path}.{name}".lstrip("."), each)
            items.append(Item(label, document, why(value, str(name)) or about(each)))
        return Group(f"{kind}(", _once(items, about(value)), ")")

    def _container(self, path: str, value: Any) -> str | Group:
        if isinstance(value, dict):
            pairs = [(self.document(path, k), self.document(f"{path}[{k!r}]", v)) for k, v in value.items()]
            return Group("{", [Item(f"{one_line(k)}: ", v) for k, v in pairs], "}")
        items = [Item("", self.document(f"{path}[{i}]", each), about(each)) for i, each in enumerate(value)]
        if isinstance(value, frozenset):
            return Group("frozenset(", [Item("", Group("[", items, "]"))], ")")
        if isinstance(value, set):
            return Group("{", items, "}") if items else "set()"
        if isinstance(value, tuple):
            return Group("(", items, ",)" if len(items) == 1 else ")")
        return Group("[", items, "]")

    def _leaf(self, path: str, value: Any) -> str | Group:
        if isinstance(value, torch.dtype):
            return f"{self.imports.module('import torch', 'torch')}.{str(value).partition('.')[2]}"
        if isinstance(value, enum.Enum):
            return f"{self.imports.of(type(value))}.{value.name}"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if type(value) in (str, bytes):
            return _string(value)
        if value is None or type(value) in (bool, int, float, complex):
            return repr(value)
        if isinstance(value, pathlib.PurePath):
            kind = f"{self.imports.module('import pathlib', 'pathlib')}.{type(value).__name__}"
            return Group(f"{kind}(", [Item("", _string(str(value)))], ")")
        if hasattr(value, "__qualname__"):
            return self.imports.of(value)
        if dataclasses.is_dataclass(value):
            items = [Item(f"{f.name}=", self.document(path, getattr(value, f.name))) for f in dataclasses.fields(value)]
            return Group(f"{self.imports.of(type(value))}(", items, ")")
        raise UserError(f"{path} is a {type(value).__qualname__}, which cannot be written as source")


def one_line(document: str | Group) -> str:
    """The document without its comments."""
    if isinstance(document, str):
        return document
    return document.opening + ", ".join(i.label + one_line(i.value) for i in document.items) + document.closing


def lines(document: str | Group, indent: int, before: int, after: int = 0) -> list[str]:
    """The document as lines, the first without its indentation.

    Args:
        indent: columns that the statement it is part of is indented by.
        before: columns taken on the first line.
        after: columns that follow on the last line, such as a comma.
    """
    if isinstance(document, str) or (not _commented(document) and before + len(one_line(document)) + after <= WIDTH):
        return [one_line(document)]
    inner = one_line(document).removeprefix(document.opening).removesuffix(document.closing)
    a_call = document.opening[:-1]  # what ruff never does to a list of its own
    if a_call and not _commented(document) and len(document.items) > 1 and indent + 4 + len(inner) <= WIDTH:
        return [document.opening, " " * (indent + 4) + inner, " " * indent + document.closing]
    found = [document.opening]
    for item in document.items:
        found += _item(item, indent + 4)
    return [*found, " " * indent + document.closing.lstrip(",")]


def comment(text: str, indent: int) -> list[str]:
    """The text as comment lines."""
    lead = " " * indent + "# "
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=lead, break_long_words=False)


def _item(item: Item, indent: int) -> list[str]:
    margin = " " * indent
    body = lines(item.value, indent, indent + len(item.label), 1)
    body[0] = margin + item.label + body[0]
    body[-1] += ","
    if not item.why:
        return body
    if len(body) == 1 and len(body[0]) + len("  # ") + len(item.why) <= WIDTH:
        return [f"{body[0]}  # {item.why}"]
    return [*comment(item.why, indent), *body]


def _commented(document: str | Group) -> bool:
    return isinstance(document, Group) and any(item.why or _commented(item.value) for item in document.items)


def _once(items: list[Item], said: str) -> list[Item]:
    """The items, each comment on the first that it is on; `said` is already on the whole."""
    seen = {said}
    for item in items:
        if item.why in seen:
            item.why = ""
        seen.add(item.why)
    return items


def _string(text: str | bytes) -> str:
    mark = "b" if isinstance(text, bytes) else ""
    plain = repr(text).removeprefix(mark)
    return mark + (f'"{plain[1:-1]}"' if plain[0] == "'" and '"' not in plain else plain)
