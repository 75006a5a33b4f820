"""`recipes tune`: adapt a recipe to a different number of nodes."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from superpod.cli import tables
from superpod.cli.options.request_options import AsJson, Name
from superpod.cli.options.size_options import Gpus
from superpod.errors import UserError, counted

if TYPE_CHECKING:
    from superpod.collection.registry import Recipe
    from superpod.collection.sizes.tune import TunedRecipe


def tune(
    name: Name,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes to plan for.")] = None,
    gpus: Gpus = None,
    gbs: Annotated[int | None, typer.Option("--gbs", help="Global batch size. Default: the recipe's.")] = None,
    lr_rule: Annotated[
        Literal["sqrt", "linear"],
        typer.Option("--lr-rule", help="Rule that scales the learning rate with the global batch size."),
    ] = "sqrt",
    write: Annotated[bool, typer.Option("--write", help="Save the layout in recipes/layouts/MODEL.toml.")] = False,
    as_json: AsJson = False,
) -> None:
    """Adapt a recipe to a different number of nodes: layout, batch size, learning rate, warm-up and steps."""
    from superpod.collection import layout_file
    from superpod.collection.registry import find
    from superpod.collection.sizes import sized
    from superpod.collection.sizes import tune as tuning

    recipe = at_size = find(name)
    if gpus is not None:
        nodes, per_node = sized.split_gpus(recipe, gpus, nodes)
        at_size = replace(recipe, gpus_per_node=per_node or recipe.gpus_per_node)
    if nodes is None:
        raise UserError("tune needs --nodes or --gpus", "add one of them")
    if write and at_size.gpus_per_node != recipe.gpus_per_node:
        raise UserError("--write accepts only sizes that use all GPUs of each node", "leave out --write")
    tuned_recipe = tuning.tune(at_size, nodes, gbs=gbs, lr_rule=lr_rule)
    if write and recipe.layout().gbs != tuned_recipe.job.layout.gbs:
        raise UserError(
            "--write requires the recipe's global batch size, because another one changes the training result",
            "leave out --gbs, or leave out --write and apply the printed changes to your run",
        )
    if as_json:
        tables.print_json(_facts(recipe, tuned_recipe))
    else:
        _print_table(recipe, tuned_recipe, tuning.LR_RULES[lr_rule])
    if write:
        print(f"wrote {layout_file.write_layout(recipe.model.name, tuned_recipe.job)}")


def _facts(recipe: Recipe, tuned: TunedRecipe) -> dict[str, object]:
    schedule = {key: getattr(tuned, key) for key in ("lr", "min_lr", "warmup_steps", "max_steps", "tokens")}
    size = {"nodes": tuned.nodes, "gpus": tuned.job.gpus, "step_time_s": tuned.step_time_s, "days": tuned.days}
    return {"recipe": recipe.name, "layout": asdict(tuned.job.layout), **size, **schedule}


def _print_table(recipe: Recipe, tuned: TunedRecipe, rule: str) -> None:
    """Print the recipe before and after tuning; `rule` describes the scaling of the learning rate."""
    own, schedule = recipe.layout(), recipe.schedule
    new_layout = tuned.job.layout
    rows = [
        ("GPUs", recipe.nodes[0] * recipe.gpus_per_node, tuned.job.gpus),
        ("layout", own.short(), new_layout.short()),
        ("recompute", own.recompute, new_layout.recompute),
        ("micro / global batch", f"{own.mbs} / {own.gbs}", f"{new_layout.mbs} / {new_layout.gbs}"),
        ("peak learning rate", f"{schedule.lr:.3g}", f"{tuned.lr:.3g}"),
        ("warm-up steps", schedule.warmup_steps, tuned.warmup_steps),
        ("steps", f"{schedule.max_steps:,}", f"{tuned.max_steps:,}"),
        ("tokens", tables.format_count(own.gbs * recipe.seq * schedule.max_steps), tables.format_count(tuned.tokens)),
        ("predicted step time", "", f"{tuned.step_time_s:.2f} s"),
        ("predicted training time", "", f"{tuned.days:.1f} days"),
    ]
    sizes = [counted(nodes, "node") for nodes in (recipe.nodes[0], tuned.nodes)]
    tables.print_rows(("", *sizes), [[str(cell) for cell in row] for row in rows])
    if new_layout.gbs == own.gbs:
        print("the global batch size, learning rate, warm-up and number of steps are unchanged")
    else:
        print(f"learning rate: {rule}; warm-up and training cover as many tokens as before")
