"""Finds recipes of different shape by their layouts and models, not by name: a new plan may change any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob

LEAST_RANKS, MOST_RANKS = 4, 8
QUICK_RANKS = 4
"""Ranks of a quick shape."""


@dataclass(frozen=True)
class Shape:
    """A property of recipes that a rehearsal should cover."""

    what: str
    recipes: str
    """Start of the recipes' names: model and task, perhaps the GPU."""
    has: Callable[[Layout, ModelShape], object]
    """Whether a layout of a model has it; tried on the recipe's layout and on the shrunk one."""
    quick: bool = False
    """Whether the quicker tests rehearse it too."""

    @property
    def key(self) -> str:
        """Its name in a command."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.what).lower().split())


@dataclass(frozen=True)
class ShapeExample:
    """A recipe of a shape, at one of its sizes."""

    recipe: str
    nodes: int
    job: PlannedJob


def find(shape: Shape) -> ShapeExample:
    """The first recipe of the shape that a rehearsal runs on 4 to 8 ranks; on 4 if the shape is quick.

    Raises:
        UserError: no layout has it any more.
    """
    from superpod.collection import recipe_job
    from superpod.collection.registry import recipes
    from superpod.rehearsal.training.shrink import shrink

    most = QUICK_RANKS if shape.quick else MOST_RANKS
    for name, recipe in recipes().items():
        for nodes in recipe.nodes if name.startswith(shape.recipes) else ():
            whole = recipe_job.job(recipe, nodes)
            if shape.has(whole.layout, whole.model):
                small = shrink(whole).job
                if LEAST_RANKS <= small.gpus <= most and shape.has(small.layout, whole.model):
                    return ShapeExample(name, nodes, whole)
    raise UserError(f"no layout of {shape.recipes}* has this shape any more: {shape.what}", "look for it elsewhere")


SHAPES = (
    Shape("dense, GQA: TP with SP, DP", "llama3_8b_pretrain", lambda la, m: la.tp > 1 and la.pp == la.cp == 1, True),
    Shape("biases of Q, K, V; TP x PP x DP; FP8", "qwen25_14b_pretrain_h100_fp8ds", lambda la, m: la.tp * la.pp >= 4),
    Shape("long context: CP", "llama3_8b_64k_pretrain", lambda la, m: la.cp > 1, True),
    Shape("interleaved stages, CP, TP", "llama3_70b_pretrain", lambda la, m: la.vp and la.cp > 1),
    Shape(
        "uneven stages: the ends count as layers, interleaved",
        "llama31_405b_pretrain",
        lambda la, m: la.embedding_as_layer and la.loss_as_layer and la.vp,
    ),
    Shape("SFT; tied embeddings on two stages, interleaved", "llama32_3b_sft", lambda la, m: la.pp > 1 and la.vp, True),
    Shape("LoRA: TP x PP", "llama3_70b_lora", lambda la, m: la.tp > 1 and la.pp > 1 and not la.vp),
    Shape("LoRA: TP x DP", "qwen3_32b_lora", lambda la, m: la.tp > 1 and not la.vp, True),
    Shape("LoRA beside experts, EP", "qwen3_30b_a3b_lora", lambda la, m: la.ep > 1 and not la.vp),
    Shape("attention sinks, windows, experts with biases; TP, EP", "gpt_oss_20b_pretrain", lambda la, m: la.ep > 1),
    Shape("DoRA; PP, CP", "llama2_70b_dora", lambda la, m: la.pp > 1 and la.cp > 1),
    Shape(
        "GPT-3: learned positions, biases, LayerNorm; PP", "gpt3_175b_pretrain", lambda la, m: la.pp > 1 and not la.vp
    ),
    Shape("MoE: EP, QK norms", "qwen3_30b_a3b_pretrain", lambda la, m: la.ep > 1),
    Shape("MoE with TP, PP, VP and EP", "mixtral_8x", lambda la, m: la.tp > 1 and la.pp > 1 and la.vp and la.ep > 1),
    Shape("MoE with expert tensor parallelism", "mixtral_8x7b_pretrain", lambda la, m: la.etp not in (None, la.tp)),
    Shape("MoE in every other layer, a shared expert", "llama4_maverick_pretrain", lambda la, m: la.ep > 1),
    Shape(
        "MoE, uneven stages, full recomputation",
        "qwen3_235b_a22b_pretrain",
        lambda la, m: la.embedding_as_layer and la.recompute == "full",
    ),
    Shape("latent attention, shared experts, EP", "deepseek_v2_lite_pretrain", lambda la, m: la.ep > 1),
    Shape(
        "latent attention, groups of experts, given chunks, multi-token prediction",
        "deepseek_v3_pretrain",
        lambda la, m: la.chunks,
    ),
    Shape("windows in every other layer, soft caps, norms after; TP", "gemma2_9b_sft", lambda la, m: la.tp > 1, True),
    Shape(
        "squared ReLU, zero-centred LayerNorm, LoRA",
        "nemotron4_340b_lora",
        lambda la, m: la.tp * la.pp > 2 and not la.vp,
    ),
    Shape("a window, biases; TP", "starcoder2_15b_pretrain", lambda la, m: la.tp > 1),
    Shape("multi-query attention", "starcoder_15b_", lambda la, m: la.model_parallel > 1),
    Shape("half of each head rotated", "chatglm3_6b_", lambda la, m: la.model_parallel > 1, True),
    Shape("heads together wider than the hidden state; TP", "mistral_nemo_12b_pretrain", lambda la, m: la.tp > 1),
    Shape("full recomputation by block", "llama3_70b_16k_pretrain", lambda la, m: la.recompute_method == "block"),
    Shape(
        "recomputed MLPs",
        "nemotron3_22b_",
        lambda la, m: la.recompute == "selective" and la.recompute_modules == ("mlp",),
    ),
)
"""docs/rehearsal.md has a table of their rehearsals."""
