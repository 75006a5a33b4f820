"""`recipes list` and `recipes show`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables

if TYPE_CHECKING:
    from superpod.recipes.registry import Recipe


WHY_COLUMN = 58


def list_(
    words: Annotated[list[str] | None, typer.Argument(help="Only recipes whose names hold every one of these.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the recipes that hold all words in their names; without any, the models that there are recipes of."""
    from superpod.recipes.registry import recipes

    if not words and not as_json:
        _models()
        return
    found = [r for r in recipes().values() if all(w in r.name for w in words or [])]
    if as_json:
        print(json.dumps([_facts(r) for r in found], indent=1))
        return
    from rich.table import Table

    table = Table("recipe", "nodes", "GPUs/node", "layout", "seq", "gbs", box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.no_wrap = True
    for r in found:
        sizes = str(r.nodes[0]) if len(r.nodes) == 1 else f"{r.nodes[0]}..{r.nodes[-1]}"
        layout = r.layout()
        other = "" if len(set(r.layouts.values())) == 1 else " *"
        table.add_row(r.name, sizes, str(r.gpus_per_node), layout.short() + other, str(r.seq), str(layout.gbs))
    if not found:
        print(f"no recipe's name holds {' and '.join(words or [])}")
        return
    tables.show(table)
    if any(len(set(r.layouts.values())) > 1 for r in found):
        print("* at the smallest size; another layout at larger ones: recipes show NAME --nodes N")


def _models() -> None:
    from superpod.recipes.registry import models, recipes

    every = recipes().values()
    rows = []
    for model in models().values():
        mine = [r for r in every if r.model is model]
        long = dict.fromkeys(f"{r.seq // 1024}k" for r in mine if r.seq > model.seq)
        tasks = ", ".join(dict.fromkeys(r.task for r in mine))
        rows.append((model.name, f"{len(mine)}", tasks + (f"; pretrain at {' '.join(long)}" if long else "")))
    tables.show_folded(("model", "recipes", "tasks"), rows, fold=2)
    gpus, precisions = (dict.fromkeys(getattr(r, key) for r in every) for key in ("gpu", "precision"))
    print(f"{len(every):,} recipes, MODEL_TASK_GPU_PRECISION: {', '.join(gpus)}; {', '.join(precisions)}")
    print("recipes list llama3_8b sft h100 shows those whose names hold all the words")


def _facts(r: Recipe) -> dict:
    return {
        "name": r.name,
        "model": r.model.name,
        "title": r.model.title,
        "task": r.task,
        "gpu": r.gpu,
        "precision": r.precision,
        "seq": r.seq,
        "gpus_per_node": r.gpus_per_node,
        "layouts": {n: vars(layout) for n, layout in r.layouts.items()},
    }


def show(
    name: Annotated[str, typer.Argument(help="A recipe's name, from `recipes list`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as trainer.max_steps=10.")] = None,
    why: Annotated[bool, typer.Option("--why", help="Name the file and line that set each value.")] = False,
    num_nodes: Annotated[int | None, typer.Option("--nodes", help="Size; default: its smallest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print a recipe whole, as lines of path = value."""
    lines = _lines(name, overrides or [], num_nodes)
    if as_json:
        print(json.dumps({line.path: {"value": line.value, "where": line.where} for line in lines}, indent=1))
        return
    for line in lines:
        print(f"{line!s:{WHY_COLUMN}}  # {line.where}" if why and line.where else line)


def _lines(name: str, overrides: list[str], num_nodes: int | None) -> list:
    from superpod.lifecycle.quiet import quietly
    from superpod.recipes import build
    from superpod.recipes.registry import find

    find(name).layout(num_nodes)
    with quietly():
        partial = build(name, num_nodes)
        from superpod.recipes import flatten
        from superpod.recipes import overrides as changes

        changes.apply(partial, overrides)
        return flatten.flatten(partial)
