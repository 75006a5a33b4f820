"""A registered recipe as the planner's `Job`: by its facts, which needs no NeMo, or as it was built and changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.planner import hardware, models
from superpod.planner.hardware import Hardware
from superpod.planner.job import Job
from superpod.recipes.registry import Recipe

if TYPE_CHECKING:
    import nemo_run as run

SHAPE = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
}
"""Fields of the planner's `Model` that a user's override of NeMo's model config changes."""


def job(recipe: Recipe, num_nodes: int | None = None, *, facts: Hardware | None = None) -> Job:
    """The run that a recipe describes at `num_nodes` (default: its smallest size), on its GPU's DGX and fabric.

    Raises:
        UserError: when the recipe does not declare that size.
    """
    facts = facts or hardware.builtin()
    size = recipe.nodes[0] if num_nodes is None else num_nodes
    node = facts.node(recipe.gpu)
    return Job(
        model=models.find(recipe.model.name),
        node=node,
        fabric=facts.fabric_of(node),
        gpus=size * recipe.gpus_per_node,
        seq=recipe.seq,
        precision=recipe.precision,
        layout=recipe.layout(size),
        task="lora" if recipe.task in ("lora", "dora") else "sft" if recipe.task == "sft" else "pretrain",
    )


def of_partial(partial: run.Partial, recipe: Recipe) -> Job:
    """The run that a built recipe describes, overrides included.

    Raises:
        UserError: when its model's sizes contradict each other.
    """
    from superpod.recipes import from_layout

    base, config = job(recipe), partial.model.config
    sizes = {mine: getattr(config, theirs) for mine, theirs in SHAPE.items()}
    return base.replace(
        model=base.model.replace(**{key: value for key, value in sizes.items() if value}),
        gpus=partial.trainer.devices * partial.trainer.num_nodes,
        seq=partial.data.seq_length,
        layout=from_layout.read(partial),
    )
