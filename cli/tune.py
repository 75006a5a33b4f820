"""`recipes tune`: plan a recipe for a size that it does not declare."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from superpod.cli import spellings, tables

if TYPE_CHECKING:
    from superpod.recipes.registry import Recipe
    from superpod.recipes.sizes.tune import Tuned


def tune(
    name: Annotated[
        str, typer.Argument(help="A recipe's name, from `recipes list`.", callback=spellings.model_or_recipe)
    ],
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes to plan for.")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Number of GPUs, in place of --nodes; 1, 2 or 4 are part of a node.")
    ] = None,
    gbs: Annotated[int | None, typer.Option("--gbs", help="Global batch, samples; default: the recipe's.")] = None,
    lr_rule: Annotated[
        Literal["sqrt", "linear"], typer.Option("--lr-rule", help="How the learning rate grows with the batch.")
    ] = "sqrt",
    write: Annotated[bool, typer.Option("--write", help="Add the size to recipes/layouts/MODEL.toml.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Plan a recipe for another size: layout, batch, learning rate, warm-up, steps."""
    from superpod.errors import UserError
    from superpod.recipes import layout_file
    from superpod.recipes.registry import find
    from superpod.recipes.sizes import sized
    from superpod.recipes.sizes import tune as tuning

    recipe = at_size = find(name)
    if gpus is not None:
        nodes, per_node = sized.nodes_of(recipe, gpus, nodes)
        at_size = replace(recipe, gpus_per_node=per_node or recipe.gpus_per_node)
    if nodes is None:
        raise UserError("no size is given", "--nodes N, or --gpus N")
    if write and at_size.gpus_per_node != recipe.gpus_per_node:
        raise UserError("--write adds sizes of whole nodes to the layout file", "leave --write out")
    tuned = tuning.tune(at_size, nodes, gbs=gbs, lr_rule=lr_rule)
    if write and recipe.layout().gbs != tuned.job.layout.gbs:
        raise UserError(
            "--write adds a size with the recipe's own batch; another batch is another training",
            "leave --gbs out, or keep the printed changes beside your run",
        )
    if as_json:
        print(json.dumps(_facts(recipe, tuned), indent=1))
    else:
        _show(recipe, tuned, tuning.RULES[lr_rule])
    if write:
        print(f"written to {layout_file.write(recipe.model.name, tuned.job)}")


def _facts(recipe: Recipe, tuned: Tuned) -> dict[str, object]:
    pace = {key: getattr(tuned, key) for key in ("lr", "min_lr", "warmup_steps", "max_steps", "tokens")}
    size = {"nodes": tuned.nodes, "gpus": tuned.job.gpus, "step_time_s": tuned.step_time_s, "days": tuned.days}
    return {"recipe": recipe.name, "layout": asdict(tuned.job.layout), **size, **pace}


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count > 1)}"


def _show(recipe: Recipe, tuned: Tuned, rule: str) -> None:
    from rich.table import Table

    own, pace = recipe.layout(), recipe.schedule
    new = tuned.job.layout
    table = Table("", _nodes(recipe.nodes[0]), _nodes(tuned.nodes), box=None, pad_edge=False, header_style="bold")
    rows = [
        ("GPUs", recipe.nodes[0] * recipe.gpus_per_node, tuned.job.gpus),
        ("layout", own.short(), new.short()),
        ("recompute", own.recompute, new.recompute),
        ("micro / global batch", f"{own.mbs} / {own.gbs}", f"{new.mbs} / {new.gbs}"),
        ("peak learning rate", f"{pace.lr:.3g}", f"{tuned.lr:.3g}"),
        ("warm-up steps", pace.warmup_steps, tuned.warmup_steps),
        ("steps", f"{pace.max_steps:,}", f"{tuned.max_steps:,}"),
        ("tokens", tables.amount(own.gbs * recipe.seq * pace.max_steps), tables.amount(tuned.tokens)),
        ("planned step", "", f"{tuned.step_time_s:.2f} s"),
        ("planned training", "", f"{tuned.days:.1f} days"),
    ]
    for title, before, after in rows:
        table.add_row(title, str(before), str(after))
    tables.show(table)
    if new.gbs == own.gbs:
        print("the batch is unchanged, and so are learning rate, warm-up and steps")
    else:
        print(f"learning rate: {rule}; warm-up and steps cover the same number of tokens")
