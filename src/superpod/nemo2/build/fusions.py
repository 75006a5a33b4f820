"""Set fused kernels, expert dispatcher and padding, and the precision of the optimizer's moments, for all models.

NeMo's configuration classes are inconsistent: half of those with rotary embeddings disable the fused kernel, and
Mixtral runs its experts sequentially. NVIDIA's published runs set these fields manually (NeMo 2.7.3,
scripts/performance: helpers.py, llm/pretrain_*.py). Each rule below has a field and its value, the condition under
which Megatron-Core 0.15.3 and Transformer Engine 2.9 support it, and the reason. A value that the model's file sets
takes precedence. The planner assumes these settings: fused activations, grouped GEMMs, and that DeepEP sends each token
once to every NVLink domain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from superpod.collection.recipe_job import choose_loss_impl, choose_moments, uses_deepep
from superpod.nemo2.options import use_bf16_moments
from superpod.planner.hardware import Gpu
from superpod.planner.layout import Layout
from superpod.planner.rules.job_rules import FP8

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.registry import Recipe

MIN_EXPERTS_FP32_ROUTER = 32
"""Minimum number of experts for which Megatron recommends a router in FP32 (transformer_config.py:1508)."""


@dataclass(frozen=True)
class Fusion:
    """A field of the model's configuration, its value, and the condition under which it is set."""

    field: str
    value: object
    when: Callable[[Any, Recipe], bool]
    """Returns whether to set the field, for the model's configuration and the recipe."""
    why: str


def _has_fused_rope(config: Any, recipe: Recipe) -> bool:
    """Return whether the fused kernel computes the same rotary embeddings as the unfused code.

    The kernel has no mscale factor, which GPT-OSS's YaRN needs (rope_utils.py:286; attention.py:833). For packed
    samples it does not support interleaved pairs (rope_utils.py:289), so fine-tuned Llama 4 and ChatGLM do not use it.
    The kernel for latent attention is experimental (fused_mla_yarn_rope_apply.py:327): it raises in the first forward
    pass unless a callback enables every experimental path of Megatron, as NVIDIA's scripts do
    (pretrain_deepseek_v3.py:94). It stays off here, as in NeMo's recipes.
    """
    if config.position_embedding_type != "rope" or config.multi_latent_attention or not _is_decoder(config, recipe):
        return False
    return recipe.task == "pretrain" or not config.rotary_interleaved


def _is_swiglu(config: Any, recipe: Recipe) -> bool:
    """Return whether the MLPs or experts use SwiGLU (mlp.py:156, transformer_config.py:1202).

    The fused kernel of GeLU is not used, because it is an approximation.
    """
    return getattr(config.activation_func, "__name__", "") == "silu" and bool(config.gated_linear_unit)


def _is_decoder(config: Any, recipe: Recipe) -> bool:
    return recipe.model.family not in ("ssm", "encoders")


def _is_moe(config: Any, recipe: Recipe) -> bool:
    return bool(config.num_moe_experts)


def _has_expert_biases(config: Any) -> bool:
    """Return whether experts have biases, with which grouped experts support no fused dropout (experts.py:762)."""
    return bool(config.num_moe_experts and config.add_bias_linear)


FUSIONS = (
    Fusion("apply_rope_fusion", True, _has_fused_rope, "one kernel instead of five passes over queries and keys"),
    Fusion("bias_activation_fusion", True, _is_swiglu, "stores only the input of SwiGLU, as the planner assumes"),
    Fusion(
        "bias_dropout_fusion",
        True,
        lambda config, recipe: (
            _is_decoder(config, recipe) and recipe.model.family != "nemotron" and not _has_expert_biases(config)
        ),
        "NeMo disables it for Nemotron, and enables it for GPT-3 under the field's old name, which Megatron ignores",
    ),
    Fusion(
        "masked_softmax_fusion",
        False,
        lambda config, recipe: recipe.shape.soft_capped,
        "the model's own attention would import APEX's kernel (fused_softmax.py:357)",
    ),
    Fusion(
        "cross_entropy_fusion_impl",
        "te",
        lambda config, recipe: (
            choose_loss_impl(recipe.model.name, recipe.task) == "te" and config.cross_entropy_loss_fusion
        ),
        "works in place on the BF16 logits: 2 bytes instead of 10 per logit (helpers.py:377)",
    ),
    Fusion("moe_grouped_gemm", True, _is_moe, "one launch for all experts; recomputation of moe_act requires it"),
    Fusion("moe_permute_fusion", True, _is_moe, "one kernel sorts tokens by expert; Transformer Engine 2.1 and later"),
    Fusion(
        "moe_router_dtype",
        "fp32",
        lambda config, recipe: (config.num_moe_experts or 0) >= MIN_EXPERTS_FP32_ROUTER,
        "probabilities of many experts are close to each other; DeepEP requires FP32 (token_dispatcher.py:1115)",
    ),
)
"""Rules in the order of the network's layers."""


def apply(partial: run.Partial, recipe: Recipe, layout: Layout, gpu: Gpu) -> None:
    """Set the fields of `FUSIONS` that apply to a recipe, its expert dispatcher and padding, and Adam's moments."""
    if recipe.model.family == "tiny":
        return
    config = partial.model.config
    set_by_model = set(config.__arguments__)
    for fusion in FUSIONS:
        is_applicable = fusion.field not in set_by_model and fusion.when(config, recipe)
        if is_applicable and getattr(config, fusion.field) != fusion.value:
            setattr(config, fusion.field, fusion.value)
    if uses_deepep(recipe.shape, gpu, layout):
        _use_deepep(partial)
    if recipe.precision in FP8 and _has_expert_biases(config):
        _pad_tokens_of_experts(partial)
    if choose_moments(recipe.model.name, recipe.task, recipe.precision, layout.sharding) == "bf16":
        use_bf16_moments(partial)


def _use_deepep(partial: run.Partial) -> None:
    import nemo_run as run
    from nemo.lightning.pytorch.callbacks.deepep import DeepEPCallback

    partial.trainer.callbacks.append(run.Config(DeepEPCallback))


def _pad_tokens_of_experts(partial: run.Partial) -> None:
    """Let the router pad the number of tokens per expert, which experts with biases (GPT-OSS) need in FP8.

    Megatron-Core 0.15.3 otherwise pads inside the experts, removes the padding, and then splits the output by the
    padded counts to add the bias (experts.py:958-960), which fails in the first forward pass. It accepts the setting
    only with `fp8` (transformer_config.py:1326), which NeMo's precision plugin sets after the configuration has been
    built, to the same values.
    """
    config, plugin = partial.model.config, partial.trainer.plugins
    config.moe_router_padding_for_fp8 = True
    config.fp8, config.fp8_recipe = plugin.fp8, plugin.fp8_recipe
