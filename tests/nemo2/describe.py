"""describe.py FILE [--all]: import NeMo once, and write everything that the recipe tests need to FILE as JSON.

Covers the first recipe of each model and task, or with --all every recipe.
"""

import copy
import dataclasses
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner.layout import Layout

OVERRIDES = (
    "trainer.max_steps=10",
    "model.config.num_layers*=2",
    "trainer.callbacks[1].gc_interval_train=7",
    "trainer.devices=4",
    "trainer.max_stepz=10",
    "trainer.strategy.tensor_model_paralel_size=2",
    "optim.config.lr=fast",
    "trainer.max_steps=1e3",
    "trainer.max_steps=1000.5",
    "trainer.callbacks[9].gc_interval_train=1",
    "trainer.max_steps.more=1",
    "max_steps",
    "__class__=1",
    "with=full_recompute",
    "with=offload_optimizer",
    "with=offload_activations",
    "with=fsdp",
    "with=precision_aware",
    "with=cuda_graphs",
    "with=stragglers",
    "with=fault_tolerance",
    "with=deterministic",
    "with=full_recompute,fsdpp",
    "with=offload_activations,full_recompute",
)


def main() -> None:
    from superpod.collection import registry
    from superpod.nemo2.export.flatten import flatten
    from superpod.recipes import build

    chosen = dict(registry.recipes() if "--all" in sys.argv else {r.name: r for r in firsts().values()})
    built = {name: resolved(recipe) for name, recipe in chosen.items()}
    lines = {name: [[i.path, i.value, i.where] for i in flatten(partial)] for name, partial in built.items()}
    smallest = {
        name: [*read(partial, chosen[name].nodes[0]), partial.log.ckpt.every_n_train_steps]
        for name, partial in built.items()
    }
    sizes = [[name, *read(build(name, nodes), nodes)] for name, nodes in one_of_each_layout(chosen).values()]
    overrides = {text: override(text) for text in OVERRIDES}
    overrides["tiny_llama3_lora with=full_recompute"] = override("with=full_recompute", "tiny_llama3_lora")
    shards = {
        name: [bool(partial.optim.config.use_distributed_optimizer), *(refusal(partial, option) for option in SHARDED)]
        for name, partial in built.items()
    }
    answer = {"lines": lines, "smallest": smallest, "sizes": sizes, "overrides": overrides, "shards": shards}
    Path(sys.argv[1]).write_text(json.dumps(answer | {"factories": factories(), "round_trips": round_trips()}))


SHARDED = ("precision_aware", "offload_optimizer")
"""Options that need the distributed optimizer."""


def refusal(partial: Any, option: str) -> list[str]:
    """Return message and hint with which a recipe refuses an option, or [] if it accepts the option."""
    from superpod.nemo2 import options

    try:
        options.apply(copy.deepcopy(partial), option)
    except UserError as error:
        return [str(error), error.hint]
    return []


def read(partial: Any, nodes: int) -> list[Any]:
    """Return the requested and the built number of nodes, and the layout read from the configuration."""
    from superpod.nemo2.build.layout import read_layout

    return [nodes, partial.trainer.num_nodes, vars(read_layout(partial))]


def firsts() -> dict[str, Any]:
    """Return the reference recipe of each model and task: on H100 in BF16; for DoRA that of LoRA."""
    from superpod.collection import registry

    firsts_of: dict[str, Any] = {}
    for recipe in registry.recipes().values():
        usual = recipe.name.endswith("_h100_bf16") and recipe.seq <= recipe.model.seq
        if recipe.task != "dora" and (usual or recipe.model.family == "tiny"):
            firsts_of.setdefault(golden_of(recipe), recipe)
    return firsts_of


def golden_of(recipe: Any) -> str:
    """Return the model and task of the reference recipe."""
    return f"{recipe.model.name}_{'lora' if recipe.task == 'dora' else recipe.task}"


def one_of_each_layout(chosen: dict[str, Any]) -> dict[Layout, tuple[str, int]]:
    """Return a recipe and a size for every distinct layout."""
    return {layout: (name, n) for name, recipe in chosen.items() for n, layout in recipe.layouts.items()}


ROUND_TRIPS = (
    Layout(),
    Layout(tp=2, pp=4, vp=2, sp=True, gbs=8, embedding_as_layer=True, loss_as_layer=True, sharding="none"),
    Layout(pp=4, gbs=4, first_layers=1, last_layers=3, recompute="full", recompute_method="block", recompute_layers=2),
    Layout(pp=2, vp=2, gbs=4, chunks=(1, 2, 2, 1), recompute="full", recompute_layers=1),
    Layout(gbs=4, recompute="selective", recompute_modules=("mlp", "layernorm"), sharding="zero2"),
    Layout(gbs=4, ep=2, etp=1, cp=2, recompute="selective", sharding="zero3"),
)
"""Layouts for the round-trip test."""


def round_trips() -> list[list[dict[str, Any]]]:
    from superpod.collection import registry
    from superpod.nemo2.build import partial
    from superpod.nemo2.build.layout import read_layout

    pairs = []
    for layout in ROUND_TRIPS:
        recipe = dataclasses.replace(registry.recipes()["tiny_llama3"], layouts={1: layout})
        pairs.append([vars(layout), vars(read_layout(partial.build(recipe)))])
    return pairs


def override(text: str, name: str = "tiny_llama3") -> list[str]:
    from superpod.nemo2 import overrides
    from superpod.nemo2.export.flatten import flatten
    from superpod.recipes import build

    recipe = build(name)
    before = {str(line) for line in flatten(recipe)}
    try:
        overrides.apply(recipe, [text])
    except UserError as error:
        return ["refused", str(error), error.hint]
    return ["changed", *sorted(f"{line}  # {line.where}" for line in flatten(recipe) if str(line) not in before)]


def resolved(recipe: Any) -> Any:
    """Resolve a recipe like `nemo llm pretrain --factory NAME` (nemo_run/cli/lazy.py), or `finetune`."""
    from nemo.collections import llm
    from nemo_run.cli.cli_parser import parse_factory

    factories()
    target: Any = llm.pretrain if recipe.task == "pretrain" else llm.finetune
    return parse_factory(target, "", target, recipe.name)


@cache
def factories() -> dict[str, list[str]]:
    """Return the factories of each entry point after NeMo-Run has loaded its plugins."""
    from nemo.collections import llm
    from nemo_run.cli import api

    return {
        target.__name__: sorted(f.wrapped.__name__ for f in api.list_factories(api.get_type_namespace(target)))
        for target in (llm.pretrain, llm.finetune)
    }


if __name__ == "__main__":
    main()
