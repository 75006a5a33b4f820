"""describe.py FILE: import NeMo once and answer everything the recipe tests ask, as JSON in FILE."""

import json
import sys
from pathlib import Path

from superpod.planner.errors import UserError

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
    Path(sys.argv[1]).write_text(json.dumps(answer | {"dry": dry(), "factories": factories()}))


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
