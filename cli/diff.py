"""`recipes diff`: what differs between two recipes, and why it matters."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.request_options import AsJson, Nodes
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.recipes.export.diff import Difference

Recipe = Annotated[str, typer.Argument(help="A recipe, or one of NeMo's own: nemo:llama3_8b.finetune_recipe.")]
WHY = 24
"""Least width of the last column, in characters."""


def diff(
    a: Recipe,
    b: Recipe,
    num_nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    """Show what differs between two recipes, ours or NeMo's own, and why it matters."""
    from superpod.cli.progress import quiet_wait

    _need_nemo()
    with quiet_wait("building both recipes with NeMo (10 to 20 s)"):
        from superpod.recipes.export import diff as diffs

        differences = diffs.differences(diffs.load(a, num_nodes), diffs.load(b, num_nodes))
    if as_json:
        print(json.dumps([vars(difference) for difference in differences], indent=1))
    elif differences:
        _show(a, b, differences)
    else:
        print(f"{a} and {b} are the same recipe")


def _need_nemo() -> None:
    import importlib.util

    if importlib.util.find_spec("nemo") is None:
        raise UserError("comparing recipes builds them, which needs NeMo", "`recipes doctor` says how to install it")


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
