"""Fused kernels, the experts' dispatcher and the precision of the optimizer's moments: decided here, for all families.

NeMo's classes differ by who wrote them: of those with rotary embeddings half leave the fused kernel off, and Mixtral
runs one expert after the other. NVIDIA's published runs set these by hand (NeMo 2.7.3, scripts/performance:
helpers.py, llm/pretrain_*.py). A rule below says what is set, where Megatron-Core 0.15.3 and Transformer Engine 2.9
take it, and why. What a model's own file sets stays. The planner counts with these: fused activations, grouped
products, and a dispatch that sends a token once to each NVLink domain, as DeepEP does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from superpod.collection.recipe_job import loss_impl, moments, uses_deepep
from superpod.planner.hardware import Gpu
from superpod.planner.layout import Layout

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.registry import Recipe

ROUTED_IN_FP32 = 32
"""Experts from which Megatron warns of a router that is not in FP32 (transformer_config.py:1508)."""


@dataclass(frozen=True)
class Fusion:
    """A field of the model's configuration, and when it is set."""

    field: str
    value: object
    when: Callable[[Any, Recipe], bool]
    """Of the configuration and its recipe."""
    why: str


def _rotates(config: Any, recipe: Recipe) -> bool:
    """Rotary embeddings whose fused kernel computes the same.

    It takes no mscale, which GPT-OSS's YaRN multiplies by (rope_utils.py:286; attention.py:833). Of packed samples it
    knows no interleaved pairs (rope_utils.py:289, no argument for them), so that fine-tuned Llama 4 and ChatGLM do
    without. Latent attention's own kernel is experimental (fused_mla_yarn_rope_apply.py:327): it raises in the first
    forward pass unless a callback switches on every experimental path of Megatron, as NVIDIA's scripts do
    (pretrain_deepseek_v3.py:94); NeMo's recipes leave it off, and so do these.
    """
    if config.position_embedding_type != "rope" or recipe.model.family in ("ssm", "encoders"):
        return False
    if config.multi_latent_attention:
        return False
    return recipe.task == "pretrain" or not config.rotary_interleaved


def _is_swiglu(config: Any, recipe: Recipe) -> bool:
    """SwiGLU, of dense layers and of experts (mlp.py:156, transformer_config.py:1202). GeLU's approximates it."""
    return getattr(config.activation_func, "__name__", "") == "silu" and bool(config.gated_linear_unit)


def _decodes(config: Any, recipe: Recipe) -> bool:
    return recipe.model.family not in ("ssm", "encoders")


def _is_moe(config: Any, recipe: Recipe) -> bool:
    return bool(config.num_moe_experts)


FUSIONS = (
    Fusion("apply_rope_fusion", True, _rotates, "one kernel in place of five passes over queries and keys"),
    Fusion("bias_activation_fusion", True, _is_swiglu, "keeps the product before SwiGLU only, as memory is planned"),
    Fusion(
        "bias_dropout_fusion",
        True,
        lambda config, recipe: (
            _decodes(config, recipe)
            and recipe.model.family != "nemotron"
            and not (config.num_moe_experts and config.add_bias_linear)  # grouped experts refuse it (experts.py:762)
        ),
        "NeMo's Nemotron has it off under the field's older name, its GPT-3 on, which Megatron does not read",
    ),
    Fusion(
        "masked_softmax_fusion",
        False,
        lambda config, recipe: recipe.shape.soft_capped,
        "attention of its own would import APEX's kernel (fused_softmax.py:357); Transformer Engine's has none",
    ),
    Fusion(
        "cross_entropy_fusion_impl",
        "te",
        lambda config, recipe: loss_impl(recipe.model.name, recipe.task) == "te" and config.cross_entropy_loss_fusion,
        "in place on the BF16 logits, 2 bytes in place of 10 (helpers.py:377)",
    ),
    Fusion("moe_grouped_gemm", True, _is_moe, "one launch for all experts; what recomputes moe_act asks for it"),
    Fusion("moe_permute_fusion", True, _is_moe, "one kernel sorts tokens by expert; Transformer Engine 2.1 and later"),
    Fusion(
        "moe_router_dtype",
        "fp32",
        lambda config, recipe: (config.num_moe_experts or 0) >= ROUTED_IN_FP32,
        "many probabilities lie close together; DeepEP takes no others (token_dispatcher.py:1115)",
    ),
)
"""In the order of the network."""


def apply(partial: run.Partial, recipe: Recipe, layout: Layout, gpu: Gpu) -> None:
    """Set what `FUSIONS` decide of this recipe, its dispatcher, and its optimizer's moments."""
    config, own = partial.model.config, set(partial.model.config.__arguments__)
    if recipe.model.family == "tiny":
        return
    for fusion in FUSIONS:
        if fusion.field in own or not fusion.when(config, recipe):
            continue
        if getattr(config, fusion.field) != fusion.value:
            setattr(config, fusion.field, fusion.value)
    if uses_deepep(recipe.shape, gpu, layout):
        _deepep(partial)
    if moments(recipe.model.name, recipe.task, recipe.precision, layout.sharding) == "bf16":
        _bf16_moments(partial)


def _deepep(partial: run.Partial) -> None:
    import nemo_run as run
    from nemo.lightning.pytorch.callbacks.deepep import DeepEPCallback

    partial.trainer.callbacks.append(run.Config(DeepEPCallback))


def _bf16_moments(partial: run.Partial) -> None:
    import torch

    partial.optim.config.use_precision_aware_optimizer = True
    partial.optim.config.exp_avg_dtype = partial.optim.config.exp_avg_sq_dtype = torch.bfloat16
