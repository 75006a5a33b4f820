"""`recipes export` and `recipes diff`: a recipe as a file of one's own, and what differs between two."""

from __future__ import annotations

import json
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.launchers.local import Job
    from superpod.recipes.export.diff import Difference

Recipe = Annotated[str, typer.Argument(help="A recipe, or one of NeMo's own: nemo:llama3_8b.finetune_recipe.")]
WHY = 24
"""Columns of the last column, at the least."""
NumNodes = Annotated[int | None, typer.Option("--nodes", help="Size; default: its smallest.")]


def export(
    name: Annotated[str, typer.Argument(help="A recipe's name, from `recipes list`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as trainer.max_steps=10.")] = None,
    to: Annotated[Path, typer.Option("--to", help="The Python file to write.")] = ...,  # type: ignore[assignment]
    data: Annotated[Path | None, typer.Option(help="A folder made by `recipes data`; default: mock data.")] = None,
    num_nodes: NumNodes = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a recipe as one Python file that needs NeMo and NeMo-Run only, and that runs."""
    from superpod.launchers import local
    from superpod.lifecycle.quiet import quietly
    from superpod.recipes.export import target_file

    target_file.check(to, force=force)
    job = local.Job(name, overrides or [], data.absolute() if data else None, num_nodes)
    local.check(job)
    with quietly():
        text = _text(job)
    target_file.write(text, to, force=force)
    print(f"wrote {to}: {len(text.splitlines())} lines, an equal recipe")


def _text(job: Job) -> str:
    from superpod.launchers import local
    from superpod.recipes import build
    from superpod.recipes.registry import find

    partial = build(job.recipe, job.num_nodes)
    from superpod.recipes import overrides
    from superpod.recipes.export import recipe_source

    if job.data:
        local.use_data(partial, job.data)
    overrides.apply(partial, job.overrides)
    said = {"--nodes": job.num_nodes, "--data": job.data}
    words = [word for option, value in said.items() if value for word in (option, str(value))]
    command = shlex.join(["recipes", "export", job.recipe, *job.overrides, *words])
    return recipe_source.render(partial, recipe_source.heading(find(job.recipe), partial, command))


def diff(
    a: Recipe,
    b: Recipe,
    num_nodes: NumNodes = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what differs between two recipes, ours or NeMo's own, and why it matters."""
    from superpod.lifecycle.quiet import quietly

    _need_nemo()
    with quietly():
        from superpod.recipes.export import diff as diffs

        found = diffs.differences(diffs.load(a, num_nodes), diffs.load(b, num_nodes))
    if as_json:
        print(json.dumps([vars(each) for each in found], indent=1))
    elif found:
        _show(a, b, found)
    else:
        print(f"{a} and {b} are the same recipe")


def _need_nemo() -> None:
    import importlib.util

    if importlib.util.find_spec("nemo") is None:
        raise UserError("comparing recipes builds them, which needs NeMo", "`recipes doctor` says how to install it")


def _show(a: str, b: str, found: list[Difference]) -> None:
    rows, part = [], ""
    width = max(12, (tables.width() - max(len(_inside(each)) for each in found) - WHY) // 2 - 4)
    for each in found:
        if each.part != part:
            part = each.part
            rows += [["", "", "", ""]] * bool(rows) + [[part, "", "", ""]]
        values = ("\n".join(textwrap.wrap(_short(value), width)) for value in (each.a, each.b))
        rows.append([f"  {_inside(each)}", *values, each.why])
    tables.show_folded(["path", "A", "B", "why it matters"], rows, fold=3, least=WHY)
    print(f"\n{len(found)} differences; A is {a}, B is {b}; - is not set")


def _inside(difference: Difference) -> str:
    """The path from its part on; a part itself is called by its class."""
    inside = difference.path.removeprefix(difference.part).lstrip(".")
    return inside or "(class)"


def _short(value: str) -> str:
    """A class or a function without its package."""
    default, _, name = value.rpartition(" ")
    whole = name.replace(".", "").replace("_", "").isalnum() and not name[:1].isdigit()
    return f"{default} {name.rpartition('.')[2]}".strip() if whole else value
