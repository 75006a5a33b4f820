"""Write the values of a configuration as Python source, formatted as ruff formats it.

A value becomes a document first, a tree of calls and displays with comments, and the document becomes lines: one where
it fits, else one per argument.
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

from superpod.collection.own_models import PREFIX
from superpod.errors import UserError
from superpod.nemo2.export import flatten
from superpod.nemo2.export.source_comments import about, why

WIDTH = 100
"""Columns of an exported file."""

SHORT = (("from nemo.collections import llm", "llm"), ("from nemo import lightning as nl", "nl"))
"""Packages of NeMo whose names are written as `llm.LlamaModel`, as NeMo's users write them."""

KINDS: dict[type, str] = {run.Config: "run.Config", run.Partial: "run.Partial"}
KINDS |= {fdl.Config: "fdl.Config", fdl.Partial: "fdl.Partial", fdl.ArgFactory: "fdl.ArgFactory"}
"""Kinds of configuration that a file can hold."""


Container = list[object] | tuple[object, ...] | set[object] | frozenset[object] | dict[object, object]


class Named(Protocol):
    """A class or a function."""

    __module__: str
    __qualname__: str


@dataclass
class Group:
    """A call or a display: `opening item, item closing`."""

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
    """What the file imports, collected while its values are written. No name is imported twice."""

    lines: dict[str, str] = field(default_factory=dict)
    """Name -> the statement that imports it, "" for a function of the file."""

    def module(self, line: str, name: str) -> str:
        """The name, once its import is noted."""
        if self.lines.setdefault(name, line) != line:
            raise ValueError(f"{name} would be imported twice: {line}, {self.lines[name]}")
        return name

    def of(self, thing: Named) -> str:
        """How the file names a class or a function.

        Raises:
            UserError: no file could import it, or only one where this project is installed.
        """
        module, name = thing.__module__, thing.__qualname__
        if module.partition(".")[0] in ("superpod", "__main__") or module.startswith(PREFIX) or "<" in name:
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
    """Turns values into documents. `part` may replace a document by the call of a function that it adds to the file."""

    imports: Imports
    part: Callable[[str, object, str | Group], str | Group]

    def document(self, path: str, value: object) -> str | Group:
        """The document of the value at `path`.

        Raises:
            UserError: it is of a kind that has no source.
        """
        return self.part(path, value, self._whole(path, value))

    def _whole(self, path: str, value: object) -> str | Group:
        if isinstance(value, fdl.Buildable):
            return self.buildable(path, value)
        if type(value) in (list, tuple, set, frozenset, dict):  # no subclass: a namedtuple has another source
            return self._container(path, cast("Container", value))
        return self._leaf(path, value)

    def buildable(self, path: str, value: fdl.Buildable) -> Group:
        """The document of a configuration, even where `part` would replace it."""
        kind = KINDS.get(type(value))
        if kind is None:
            raise UserError(f"{path or 'the recipe'} is a {type(value).__name__}, which cannot be written as source")
        if name := flatten.constant(value):
            return self._tuned(name)
        package = kind.partition(".")[0]
        self.imports.module("import nemo_run as run" if package == "run" else "import fiddle as fdl", package)
        items = [Item("", self.imports.of(fdl.get_callable(value)))]
        for name, argument in value.__arguments__.items():
            label = f"{name}=" if isinstance(name, str) else ""  # fiddle numbers positional arguments
            document = self.document(f"{path}.{name}".lstrip("."), argument)
            items.append(Item(label, document, why(value, str(name)) or about(argument)))
        return Group(f"{kind}(", _once(items, about(value)), ")")

    def _tuned(self, name: str) -> Group:
        """NVIDIA's tuned overlap of that name, as the configuration that NeMo's dataclass is made into."""
        module, _, table = name.rpartition(".")
        package, _, short = module.rpartition(".")
        convert = self.imports.module("from fiddle.experimental import dataclasses as fdl_dc", "fdl_dc")
        table = f"{self.imports.module(f'from {package} import {short}', short)}.{table}"
        return Group(f"{convert}.convert_dataclasses_to_configs(", [Item("", table)], ")")

    def _container(self, path: str, value: Container) -> str | Group:
        if isinstance(value, dict):
            pairs = [(self.document(path, k), self.document(f"{path}[{k!r}]", v)) for k, v in value.items()]
            return Group("{", [Item(f"{one_line(k)}: ", v) for k, v in pairs], "}")
        if isinstance(value, list) and (short := _repeated(value)):
            return short
        items = [Item("", self.document(f"{path}[{i}]", item), about(item)) for i, item in enumerate(value)]
        if isinstance(value, frozenset):
            return Group("frozenset(", [Item("", Group("[", items, "]"))], ")")
        if isinstance(value, set):
            return Group("{", items, "}") if items else "set()"
        if isinstance(value, tuple):
            return Group("(", items, ",)" if len(items) == 1 else ")")
        return Group("[", items, "]")

    def _leaf(self, path: str, value: object) -> str | Group:
        if isinstance(value, torch.dtype):
            return f"{self.imports.module('import torch', 'torch')}.{str(value).partition('.')[2]}"
        if isinstance(value, enum.Enum):
            return f"{self.imports.of(type(value))}.{value.name}"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, str | bytes) and type(value) in (str, bytes):
            return _string(value)
        if value is None or type(value) in (bool, int, float, complex):
            return repr(value)
        if isinstance(value, datetime.timedelta):
            self.imports.module("import datetime", "datetime")
            return repr(value)
        if isinstance(value, pathlib.PurePath):
            kind = f"{self.imports.module('import pathlib', 'pathlib')}.{type(value).__name__}"
            return Group(f"{kind}(", [Item("", _string(str(value)))], ")")
        if hasattr(value, "__qualname__"):
            return self.imports.of(cast("Named", value))
        if dataclasses.is_dataclass(value):
            items = [Item(f"{f.name}=", self.document(path, getattr(value, f.name))) for f in dataclasses.fields(value)]
            return Group(f"{self.imports.of(type(value))}(", items, ")")
        raise UserError(f"{path} is a {type(value).__qualname__}, which cannot be written as source")


REPEATED = 3
"""Equal neighbours from which on a list of words is written as `["decoder"] * 3`."""


def _repeated(words: Sequence[object]) -> str | Group | None:
    """The document of a list of words, or of lists of words, that repeats itself; None = another list."""
    runs = [(item, len(list(same))) for item, same in groupby(words)]
    if not any(count >= REPEATED for _, count in runs) or not all(map(_is_words, words)):
        return None
    written = [(_word(item), count, isinstance(item, list)) for item, count in runs]
    if len(written) == 1 and not written[0][2]:
        return f"[{written[0][0]}] * {len(words)}"
    items: list[Item] = []
    for word, count, is_list in written:
        if count < REPEATED:
            items += [Item("", word)] * count
        else:  # a list for each place, as in the original: equal configurations share the same lists
            items.append(Item("", f"*({word} for _ in range({count}))" if is_list else f"*[{word}] * {count}"))
    return Group("[", items, "]")


def _is_words(item: object) -> bool:
    return type(item) is str or (type(item) is list and all(type(word) is str for word in item))


def _word(item: object) -> str:
    if not isinstance(item, list):
        return _string(cast("str", item))
    return one_line(_repeated(item) or Group("[", [Item("", _word(word)) for word in item], "]"))


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
    # ruff puts the arguments of a call on one line of their own where they fit there, never the items of a list.
    a_call = document.opening[:-1]
    if a_call and not _commented(document) and len(document.items) > 1 and indent + 4 + len(inner) <= WIDTH:
        return [document.opening, " " * (indent + 4) + inner, " " * indent + document.closing]
    item_lines = [line for item in document.items for line in _item(item, indent + 4)]
    return [document.opening, *item_lines, " " * indent + document.closing.lstrip(",")]


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


def _once(items: list[Item], comment_on_whole: str) -> list[Item]:
    """The items, without a comment that an earlier item or the whole has already."""
    seen = {comment_on_whole}
    for item in items:
        if item.why in seen:
            item.why = ""
        seen.add(item.why)
    return items


def _string(text: str | bytes) -> str:
    # ruff's quotes: double, unless the text holds some.
    mark = "b" if isinstance(text, bytes) else ""
    plain = repr(text).removeprefix(mark)
    return mark + (f'"{plain[1:-1]}"' if plain[0] == "'" and '"' not in plain else plain)
