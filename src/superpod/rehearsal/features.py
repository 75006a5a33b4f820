"""Features of layouts and models that rehearsals should cover, with a recipe for each.

The recipe is found by its layout and model, not by its name, because a new plan may change any layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob

LEAST_RANKS, MOST_RANKS = 4, 8
QUICK_RANKS = 4
"""Maximum number of ranks for a quick feature."""


@dataclass(frozen=True)
class Feature:
    """A recipe feature that a rehearsal should exercise."""

    title: str
    recipes: str
    """Prefix of recipe names: model and task, and possibly the GPU."""
    applies: Callable[[Layout, ModelShape], object]
    """Function that returns whether a layout of a model has the feature; the shrunk layout must have it, too."""
    quick: bool = False
    """Whether the quicker tests also rehearse it."""

    @property
    def key(self) -> str:
        """The name on the command line and in docs/rehearsals.json."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.title).lower().split())


@dataclass(frozen=True)
class FeatureRecipe:
    """A recipe that has a feature, at one of its sizes."""

    recipe: str
    nodes: int
    job: PlannedJob


def find_recipe(feature: Feature) -> FeatureRecipe:
    """Return the first recipe with the feature whose rehearsal has 4 to 8 ranks, or 4 if the feature is quick.

    Raises:
        UserError: no suitable layout has the feature.
    """
    from superpod.collection import recipe_job
    from superpod.collection.registry import recipes
    from superpod.rehearsal.training.shrink import shrink

    max_ranks = QUICK_RANKS if feature.quick else MOST_RANKS
    matching = {name: recipe for name, recipe in recipes().items() if name.startswith(feature.recipes)}
    for name, recipe in matching.items():
        for nodes in recipe.nodes:
            job = recipe_job.job(recipe, nodes)
            if not feature.applies(job.layout, job.model):
                continue
            small_job = shrink(job).job
            if LEAST_RANKS <= small_job.gpus <= max_ranks and feature.applies(small_job.layout, job.model):
                return FeatureRecipe(name, nodes, job)
    raise UserError(
        f"no layout of {feature.recipes}* has this feature: {feature.title}", "choose other recipes in features.py"
    )


FEATURES = (
    Feature("dense, GQA: TP with SP, DP", "llama3_8b_pretrain", lambda la, m: la.tp > 1 and la.pp == la.cp == 1, True),
    Feature("biases of Q, K, V; TP x PP x DP; FP8", "qwen25_14b_pretrain_h100_fp8ds", lambda la, m: la.tp * la.pp >= 4),
    Feature("long context: CP", "llama3_8b_64k_pretrain", lambda la, m: la.cp > 1, True),
    Feature("interleaved stages, CP, TP", "llama3_70b_pretrain", lambda la, m: la.vp and la.cp > 1),
    Feature(
        "uneven stages: the ends count as layers, interleaved",
        "llama31_405b_pretrain",
        lambda la, m: la.embedding_as_layer and la.loss_as_layer and la.vp,
    ),
    Feature(
        "SFT; tied embeddings on two stages, interleaved", "llama32_3b_sft", lambda la, m: la.pp > 1 and la.vp, True
    ),
    Feature("LoRA: TP x PP", "llama3_70b_lora", lambda la, m: la.tp > 1 and la.pp > 1 and not la.vp),
    Feature("LoRA: TP x DP", "qwen3_32b_lora", lambda la, m: la.tp > 1 and not la.vp, True),
    Feature("LoRA beside experts, EP", "qwen3_30b_a3b_lora", lambda la, m: la.ep > 1 and not la.vp),
    Feature("attention sinks, windows, experts with biases; TP, EP", "gpt_oss_20b_pretrain", lambda la, m: la.ep > 1),
    Feature("DoRA; PP, CP", "llama2_70b_dora", lambda la, m: la.pp > 1 and la.cp > 1),
    Feature(
        "GPT-3: learned positions, biases, LayerNorm; PP", "gpt3_175b_pretrain", lambda la, m: la.pp > 1 and not la.vp
    ),
    Feature("MoE: EP, QK norms", "qwen3_30b_a3b_pretrain", lambda la, m: la.ep > 1),
    Feature("MoE with TP, PP, VP and EP", "mixtral_8x", lambda la, m: la.tp > 1 and la.pp > 1 and la.vp and la.ep > 1),
    Feature("MoE with expert tensor parallelism", "mixtral_8x7b_pretrain", lambda la, m: la.etp not in (None, la.tp)),
    Feature("MoE in every other layer, a shared expert", "llama4_maverick_pretrain", lambda la, m: la.ep > 1),
    Feature(
        "MoE, uneven stages, full recomputation",
        "qwen3_235b_a22b_pretrain",
        lambda la, m: la.embedding_as_layer and la.recompute == "full",
    ),
    Feature("latent attention, shared experts, EP", "deepseek_v2_lite_pretrain", lambda la, m: la.ep > 1),
    Feature(
        "latent attention, groups of experts, given chunks, multi-token prediction",
        "deepseek_v3_pretrain",
        lambda la, m: la.chunks,
    ),
    Feature("windows in every other layer, soft caps, norms after; TP", "gemma2_9b_sft", lambda la, m: la.tp > 1, True),
    Feature(
        "squared ReLU, zero-centred LayerNorm, LoRA",
        "nemotron4_340b_lora",
        lambda la, m: la.tp * la.pp > 2 and not la.vp,
    ),
    Feature("a window, biases; TP", "starcoder2_15b_pretrain", lambda la, m: la.tp > 1),
    Feature("multi-query attention", "starcoder_15b_", lambda la, m: la.model_parallel > 1),
    Feature("half of each head rotated", "chatglm3_6b_", lambda la, m: la.model_parallel > 1, True),
    Feature("heads together wider than the hidden state; TP", "mistral_nemo_12b_pretrain", lambda la, m: la.tp > 1),
    Feature("full recomputation by block", "llama3_70b_16k_pretrain", lambda la, m: la.recompute_method == "block"),
    Feature(
        "recomputed MLPs",
        "nemotron3_22b_",
        lambda la, m: la.recompute == "selective" and la.recompute_modules == ("mlp",),
    ),
)
"""docs/rehearsal.md contains a table of their rehearsals."""
