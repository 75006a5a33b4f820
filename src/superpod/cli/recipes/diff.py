"""`recipes diff`: compare the configurations of two recipes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import spellings, tables
from superpod.cli.options.request_options import AsJson
from superpod.cli.options.size_options import Nodes
from superpod.errors import counted
from superpod.requests import subject

if TYPE_CHECKING:
    import fiddle as fdl

    from superpod.nemo2.export.diff import Difference

Recipe = Annotated[
    str,
    typer.Argument(
        help="Recipe, Python file with recipe(), or NeMo's own recipe: nemo:llama3_8b.finetune_recipe.",
        callback=spellings.normalize_name,
    ),
]
MIN_WHY_WIDTH = 24
"""Minimum width of the last column, in characters."""


def diff(
    a: Recipe,
    b: Recipe,
    num_nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    """Show the differences between the configurations of two recipes, and their effect."""
    from superpod.collection import installed
    from superpod.launch.display.progress_bar import quiet_spinner

    installed.require("comparing recipes, which builds them,")
    for name in (a, b):
        _check_name(name)
    with quiet_spinner("building both recipes with NeMo (10 to 20 s)"):
        from superpod.nemo2.export import diff as diffs

        differences = diffs.differences(_build(a, num_nodes), _build(b, num_nodes))
    if as_json:
        tables.print_json([vars(difference) for difference in differences])
    elif differences:
        _print_table(a, b, differences)
    else:
        print(f"{a} and {b} are identical")


def _check_name(name: str) -> None:
    """Raise UserError for a missing file or an unknown recipe, before NeMo is imported."""
    from superpod.collection.registry import find
    from superpod.requests.request import Request

    kind = subject.subject_kind(name)
    if kind == "file":
        subject.check(Request(name))
    elif kind == "recipe":
        find(name)


def _build(name: str, num_nodes: int | None) -> fdl.Buildable:
    """Return the configuration of a recipe on `num_nodes` nodes, or of a Python file, which sets its own number."""
    from superpod.nemo2.export import diff as diffs
    from superpod.requests.request import Request

    if subject.subject_kind(name) == "file":
        return subject.build(Request(name))
    return diffs.load(name, num_nodes)


def _print_table(a: str, b: str, differences: list[Difference]) -> None:
    longest_path = max(len(_path_in_part(difference)) for difference in differences)
    value_width = max(12, (tables.width() - longest_path - MIN_WHY_WIDTH) // 2 - 4)
    rows, part = [], ""
    for difference in differences:
        if difference.part != part:
            part = difference.part
            if rows:
                rows.append(["", "", "", ""])
            rows.append([part, "", "", ""])
        values = ("\n".join(textwrap.wrap(_short_name(value), value_width)) for value in (difference.a, difference.b))
        rows.append([f"  {_path_in_part(difference)}", *values, difference.why])
    tables.print_folded_table(["path", "A", "B", "why it matters"], rows, fold=3, min_width=MIN_WHY_WIDTH)
    print(f"\n{counted(len(differences), 'difference')}; A is {a}, B is {b}; - means not set")


def _path_in_part(difference: Difference) -> str:
    """Return the path of a difference below the part of the recipe; "(class)" if the class of the part differs."""
    return difference.path.removeprefix(difference.part).lstrip(".") or "(class)"


def _short_name(value: str) -> str:
    """Return the name of a class or function without its module; return other values unchanged."""
    default, _, name = value.rpartition(" ")
    is_dotted_name = name.replace(".", "").replace("_", "").isalnum() and not name[:1].isdigit()
    if not is_dotted_name:
        return value
    return f"{default} {name.rpartition('.')[2]}".strip()
