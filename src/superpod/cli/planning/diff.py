"""`recipes diff`: what differs between two recipes, and why it matters."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import spellings, tables
from superpod.cli.options.request_options import AsJson, Nodes

if TYPE_CHECKING:
    import fiddle as fdl

    from superpod.nemo2.export.diff import Difference

Recipe = Annotated[
    str,
    typer.Argument(
        help="A recipe, a file with recipe(), or NeMo's own: nemo:llama3_8b.finetune_recipe.",
        callback=spellings.model_or_recipe,
    ),
]
WHY = 24
"""Least width of the last column, in characters."""


def diff(
    a: Recipe,
    b: Recipe,
    num_nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    """Show what differs between two recipes, ours, a file's or NeMo's own, and why it matters."""
    from superpod.cli.running.progress import quiet_wait

    _need_nemo()
    for name in (a, b):
        _check(name)
    with quiet_wait("building both recipes with NeMo (10 to 20 s)"):
        from superpod.nemo2.export import diff as diffs

        differences = diffs.differences(_built(a, num_nodes), _built(b, num_nodes))
    if as_json:
        print(json.dumps([vars(difference) for difference in differences], indent=1))
    elif differences:
        _show(a, b, differences)
    else:
        print(f"{a} and {b} are the same recipe")


def _need_nemo() -> None:
    from superpod.collection import installed

    installed.require("comparing recipes, which builds them,")


def _check(name: str) -> None:
    """Refuse a missing file and an unknown recipe before NeMo is imported. Raises UserError."""
    from superpod.collection.registry import find
    from superpod.requests import subject
    from superpod.requests.request import Request

    kind = subject.subject_kind(name)
    if kind == "file":
        subject.check(Request(name))
    elif kind == "recipe":
        find(name)


def _built(name: str, num_nodes: int | None) -> fdl.Buildable:
    """The recipe of a name; a file is executed, and has its own size."""
    from superpod.nemo2.export import diff as diffs
    from superpod.requests import subject
    from superpod.requests.request import Request

    return subject.build(Request(name)) if subject.subject_kind(name) == "file" else diffs.load(name, num_nodes)


def _show(a: str, b: str, differences: list[Difference]) -> None:
    rows, part = [], ""
    width = max(12, (tables.width() - max(len(_inside(difference)) for difference in differences) - WHY) // 2 - 4)
    for difference in differences:
        if difference.part != part:
            part = difference.part
            rows += [["", "", "", ""]] * bool(rows) + [[part, "", "", ""]]
        values = ("\n".join(textwrap.wrap(_short(value), width)) for value in (difference.a, difference.b))
        rows.append([f"  {_inside(difference)}", *values, difference.why])
    tables.show_folded(["path", "A", "B", "why it matters"], rows, fold=3, least=WHY)
    print(f"\n{len(differences)} differences; A is {a}, B is {b}; - is not set")


def _inside(difference: Difference) -> str:
    """The path below its part; the part itself is shown as its class."""
    inside = difference.path.removeprefix(difference.part).lstrip(".")
    return inside or "(class)"


def _short(value: str) -> str:
    """A class or a function without its package."""
    default, _, name = value.rpartition(" ")
    whole = name.replace(".", "").replace("_", "").isalnum() and not name[:1].isdigit()
    return f"{default} {name.rpartition('.')[2]}".strip() if whole else value
