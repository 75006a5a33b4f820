"""NeMo's configuration and model from a `NemoClass`. Needs NeMo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.weights.families.nemo_class import NemoClass

if TYPE_CHECKING:
    import torch
    from nemo.collections.llm import GPTConfig, GPTModel


def model_class(nemo_class: NemoClass) -> type[GPTModel]:
    """The class of the model."""
    from nemo.collections import llm

    return getattr(llm, nemo_class.model)


def build(nemo_class: NemoClass, dtype: torch.dtype) -> GPTConfig:
    """The configuration, in a number format.

    Raises:
        AttributeError: the class lacks a field, so that it would be ignored.
    """
    import importlib
    from dataclasses import fields

    import torch

    module = importlib.import_module(model_class(nemo_class).__module__)
    cls = getattr(module, nemo_class.config)
    values = settings(nemo_class)
    values |= {"params_dtype": dtype, "bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16}
    if unknown := values.keys() - {item.name for item in fields(cls)}:
        raise AttributeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
    return cls(**values)


def settings(nemo_class: NemoClass) -> dict[str, Any]:
    """The fields with the activation as a function; a fused one only where it computes the same."""
    values = dict(nemo_class.fields)
    if name := values.get("activation_func"):
        values["activation_func"] = function(name)
        # Megatron's fused GELU is the tanh approximation, whatever `activation_func` is.
        values["bias_activation_fusion"] = name == "silu"
    return values


def function(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation of that name in `families.ACTIVATIONS`, as a function that NeMo can save and load."""
    import torch.nn.functional as F
    from nemo.collections.llm.fn.activation import openai_gelu, squared_relu

    functions: dict[str, Callable[..., Any]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
    return (functions | {"gelu_tanh": openai_gelu, "relu2": squared_relu})[name]


SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_layer_freq", "add_qkv_bias", "add_bias_linear", "qk_layernorm", "gated_linear_unit", "normalization"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "multi_latent_attention"),
    *("moe_router_enable_expert_bias", "softmax_type", "layernorm_zero_centered_gamma", "position_embedding_type"),
)
"""Fields that decide the tensors and what a layout was planned for."""

NUMBERS = (
    *("vocab_size", "share_embeddings_and_output_weights", "activation_func", "layernorm_epsilon", "softmax_scale"),
    *("rotary_base", "rotary_percent", "rotary_interleaved", "seq_len_interpolation_factor", "no_rope_freq"),
    *("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len", "rope_scaling_factor"),
    *("window_size", "window_attn_skip_freq", "interleaved_attn_pattern", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "glu_linear_offset", "activation_func_clamp_value"),
    *("moe_router_pre_softmax", "moe_router_score_function", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_topk_scaling_factor", "moe_expert_capacity_factor", "apply_query_key_layer_scaling"),
    *("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
    *("yarn_correction_range_round_to_int", "yarn_mscale", "yarn_mscale_all_dim", "rope_type"),
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "qk_l2_norm"),
)
"""Fields that the model computes with: with other values the weights give other results, silently."""


def differences(right: GPTConfig, other: GPTConfig, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """The fields in which `other` computes another function, as (name, right, other's); a field that one lacks is None.

    Llama 3.1's scaling by 1 is none, so that its class computes Llama's function too.
    """
    out: list[tuple[str, Any, Any]] = []
    scaled = hasattr(right, "scale_factor")
    latent = ("kv_channels", "num_query_groups") if right.multi_latent_attention else ()
    for name in names:
        if name in latent:  # which latent attention does not read
            continue
        new, old = getattr(right, name, None), getattr(other, name, None)
        if name == "scale_factor" and not scaled and old is not None:
            new = 1.0
        elif name in ("low_freq_factor", "high_freq_factor", "old_context_len") and not scaled:
            continue
        if name == "softmax_scale" and right.kv_channels:  # None is the root of a head's channels
            usual = right.kv_channels**-0.5
            if math.isclose(new or usual, old or usual, rel_tol=1e-6):
                continue
        if name == "window_attn_skip_freq" and windowed(right) == windowed(other):
            continue
        if not _same(new, old, name):
            out.append((name, new, old))
    return out


def windowed(config: GPTConfig) -> list[bool]:
    """Which layers have the window, in whatever way the configuration says it."""
    from megatron.core.transformer.utils import is_layer_window_attention

    layers = range(1, config.num_layers + 1)
    skips = config.window_attn_skip_freq
    if not config.window_size:
        return [False] * config.num_layers
    if skips is None:  # everywhere, but for Gemma 2's class, which has places of its own
        alternating = hasattr(config, "attn_logit_softcapping")
        return [not alternating or layer % 2 == 0 for layer in layers]
    return [is_layer_window_attention((1, 0), skips, layer) for layer in layers]


def _same(one: Any, two: Any, name: str) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return [*one] == [*two]
    if name in ("moe_router_num_groups", "moe_router_group_topk"):  # one group is none
        return (one or 1) == (two or 1)
    if callable(one) and callable(two):  # NeMo and Megatron each have a quick_gelu
        return getattr(one, "__name__", one) == getattr(two, "__name__", two)
    return one == two


def must_match(nemo_class: NemoClass, model: GPTModel) -> None:
    """Refuse a Hugging Face configuration that says another function than a NeMo model computes.

    Raises:
        UserError: by field.
    """
    cls = model_class(nemo_class)
    if not isinstance(model, cls):
        raise UserError(f"the checkpoint is a {type(model).__name__}, and the Hugging Face folder a {cls.__name__}")
    right = build(nemo_class, model.config.params_dtype)
    wrong = differences(right, model.config, SHAPE + NUMBERS)
    if model.config.vocab_size is None:  # as many rows as the tokenizer has: shapes are compared tensor by tensor
        wrong = [difference for difference in wrong if difference[0] != "vocab_size"]
    if wrong:
        what = "; ".join(f"{name} {ours!r}, not {theirs!r}" for name, theirs, ours in wrong[:6])
        raise UserError(
            f"the checkpoint computes another function than config.json says: {what}; nothing is written",
            "--like names the Hugging Face folder that the model came from",
        )
