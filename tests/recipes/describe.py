"""describe.py FILE: import NeMo once and answer everything the recipe tests ask, as JSON in FILE."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from superpod.planner.errors import UserError
from superpod.planner.layout import Layout

OVERRIDES = (
    "trainer.max_steps=10",
    "model.config.num_layers*=2",
    "trainer.callbacks[1].gc_interval_train=7",
    "trainer.devices=4",
    "trainer.max_stepz=10",
    "trainer.strategy.tensor_model_paralel_size=2",
    "optim.config.lr=fast",
    "trainer.callbacks[9].gc_interval_train=1",
    "trainer.max_steps.more=1",
    "max_steps",
    "__class__=1",
)


def main() -> None:
    from superpod.recipes import build, from_layout, registry
    from superpod.recipes.flatten import flatten

    lines = {name: [[i.path, i.value, i.where] for i in flatten(build(name))] for name in registry.recipes()}
    sizes = {
        name: {n: [build(name, n).trainer.num_nodes, vars(from_layout.read(build(name, n)))] for n in recipe.nodes}
        for name, recipe in registry.recipes().items()
    }
    answer = {"lines": lines, "sizes": sizes, "overrides": {text: override(text) for text in OVERRIDES}}
    Path(sys.argv[1]).write_text(
        json.dumps(answer | {"dry": dry(), "factories": factories(), "round_trips": round_trips()})
    )


ROUND_TRIPS = (
    Layout(),
    Layout(tp=2, pp=4, vp=2, sp=True, gbs=8, embedding_as_layer=True, loss_as_layer=True, sharding="none"),
    Layout(pp=4, gbs=4, first_layers=1, last_layers=3, recompute="full", recompute_method="block", recompute_layers=2),
    Layout(pp=2, vp=2, gbs=4, chunks=(1, 2, 2, 1), recompute="full", recompute_layers=1),
    Layout(gbs=4, recompute="selective", recompute_modules=("mlp", "layernorm"), sharding="zero2"),
    Layout(gbs=4, ep=2, etp=1, cp=2, recompute="selective", sharding="zero3"),
)
"""Layouts that a recipe is built with and that are read from it again."""


def round_trips() -> list[list[dict[str, Any]]]:
    from superpod.recipes import base, from_layout, registry

    found = []
    for layout in ROUND_TRIPS:
        recipe = dataclasses.replace(registry.recipes()["tiny_llama3"], layouts={1: layout})
        found.append([vars(layout), vars(from_layout.read(base.pretrain(recipe)))])
    return found


def override(text: str) -> list[str]:
    from superpod.recipes import build, overrides
    from superpod.recipes.flatten import flatten

    recipe = build("tiny_llama3")
    before = {str(line) for line in flatten(recipe)}
    try:
        overrides.apply(recipe, [text])
    except UserError as error:
        return ["refused", str(error), error.hint]
    return ["changed", *sorted(f"{line}  # {line.where}" for line in flatten(recipe) if str(line) not in before)]


def dry() -> dict[str, list[list[int]]]:
    """Parameters per chunk of the first, a middle and the last pipeline rank, at the smallest declared size."""
    from superpod.launchers.rehearsal import dry_build
    from superpod.recipes import build, registry

    found = {}
    for name, recipe in registry.recipes().items():
        world = recipe.nodes[0] * recipe.gpus_per_node
        pp = recipe.layout().pp
        ranks = sorted({stage * (world // pp) for stage in (0, pp // 2, pp - 1)})
        found[name] = [dry_build(build(name), rank=rank, world_size=world) for rank in ranks]
    return found


def factories() -> list[str]:
    """Names that NeMo-Run knows for llm.pretrain, after it has loaded its entry points as its CLI does."""
    from nemo.collections import llm
    from nemo_run.cli import api

    return sorted(f.wrapped.__name__ for f in api.list_factories(api.get_type_namespace(llm.pretrain)))


if __name__ == "__main__":
    main()
