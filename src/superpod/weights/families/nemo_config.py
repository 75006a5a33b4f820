"""Builds and compares NeMo's configuration and model for a `NemoClass`. Needs NeMo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.weights.families.nemo_class import NemoClass

if TYPE_CHECKING:
    import torch
    from nemo.collections.llm import GPTConfig, GPTModel


def get_model_class(nemo_class: NemoClass) -> type[GPTModel]:
    """Return NeMo's model class, such as `llm.LlamaModel`."""
    from nemo.collections import llm

    return getattr(llm, nemo_class.model)


def build_config(nemo_class: NemoClass, dtype: torch.dtype) -> GPTConfig:
    """Build NeMo's configuration with parameters in `dtype`. Raises AttributeError if its class lacks a field."""
    import importlib
    from dataclasses import fields

    import torch

    module = importlib.import_module(get_model_class(nemo_class).__module__)
    cls = getattr(module, nemo_class.config)
    values = get_settings(nemo_class)
    values |= {"params_dtype": dtype, "bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16}
    unknown = values.keys() - {item.name for item in fields(cls)}
    if unknown:
        raise AttributeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
    return cls(**values)


def get_settings(nemo_class: NemoClass) -> dict[str, Any]:
    """Return the fields of the configuration, with `activation_func` as a function.

    `bias_activation_fusion` is set only if the fused kernel computes the same function.
    """
    values = dict(nemo_class.fields)
    name = values.get("activation_func")
    if name:
        values["activation_func"] = get_activation(name)
        # Megatron's fused GELU is always the tanh approximation.
        values["bias_activation_fusion"] = name == "silu"
    return values


def get_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of an activation (a value in `nemo_fields.ACTIVATIONS`) that NeMo can serialize."""
    import torch.nn.functional as F
    from nemo.collections.llm.fn.activation import openai_gelu, squared_relu

    functions: dict[str, Callable[..., Any]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
    return (functions | {"gelu_tanh": openai_gelu, "relu2": squared_relu})[name]


SHAPE_FIELDS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_layer_freq", "add_qkv_bias", "add_bias_linear", "qk_layernorm", "gated_linear_unit", "normalization"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "multi_latent_attention"),
    *("moe_router_enable_expert_bias", "softmax_type", "layernorm_zero_centered_gamma", "position_embedding_type"),
)
"""Fields that determine the shapes of the tensors, on which the planned layout depends."""

VALUE_FIELDS = (
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
"""Fields that affect the function, but not the shapes: with other values, the same weights give different results."""


def find_differences(config: GPTConfig, other: GPTConfig, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """Return the fields among `names` that make two configurations different functions, as (name, value, other value).

    A missing field is None. Llama 3.1's RoPE scaling with factor 1 equals no scaling.
    """
    differences: list[tuple[str, Any, Any]] = []
    scaled = hasattr(config, "scale_factor")
    unused_fields = ("kv_channels", "num_query_groups") if config.multi_latent_attention else ()
    for name in names:
        if name in unused_fields:
            continue
        new_value, old = getattr(config, name, None), getattr(other, name, None)
        if name == "scale_factor" and not scaled and old is not None:
            new_value = 1.0
        elif name in ("low_freq_factor", "high_freq_factor", "old_context_len") and not scaled:
            continue
        if name == "softmax_scale" and config.kv_channels:
            default = config.kv_channels**-0.5
            if math.isclose(new_value or default, old or default, rel_tol=1e-6):
                continue
        if name == "window_attn_skip_freq" and list_windowed_layers(config) == list_windowed_layers(other):
            continue
        if not _is_equal(new_value, old, name):
            differences.append((name, new_value, old))
    return differences


def list_windowed_layers(config: GPTConfig) -> list[bool]:
    """Return whether each layer has a sliding window."""
    from megatron.core.transformer.utils import is_layer_window_attention

    layers = range(1, config.num_layers + 1)
    skips = config.window_attn_skip_freq
    if not config.window_size:
        return [False] * config.num_layers
    if skips is None:  # all layers, except in Gemma 2's class, which has its own default
        alternates = hasattr(config, "attn_logit_softcapping")
        return [not alternates or layer % 2 == 0 for layer in layers]
    return [is_layer_window_attention((1, 0), skips, layer) for layer in layers]


def _is_equal(a: Any, b: Any, name: str) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return [*a] == [*b]
    if name in ("moe_router_num_groups", "moe_router_group_topk"):  # one group equals none
        return (a or 1) == (b or 1)
    if callable(a) and callable(b):  # NeMo and Megatron each have a quick_gelu
        return getattr(a, "__name__", a) == getattr(b, "__name__", b)
    return a == b


def require_match(nemo_class: NemoClass, model: GPTModel) -> None:
    """Check that a NeMo model computes the function of a Hugging Face configuration.

    Raises:
        UserError: it computes a different function; the message lists the fields.
    """
    cls = get_model_class(nemo_class)
    if not isinstance(model, cls):
        raise UserError(
            f"the checkpoint is a {type(model).__name__}, but the Hugging Face folder contains a {cls.__name__}"
        )
    right = build_config(nemo_class, model.config.params_dtype)
    differences = find_differences(right, model.config, SHAPE_FIELDS + VALUE_FIELDS)
    if model.config.vocab_size is None:  # the tokenizer determines the rows, and the shapes of tensors are compared
        differences = [difference for difference in differences if difference[0] != "vocab_size"]
    if differences:
        listed_differences = "; ".join(
            f"{name} is {ours!r} instead of {theirs!r}" for name, theirs, ours in differences[:6]
        )
        raise UserError(
            f"the checkpoint does not compute the function that config.json specifies: {listed_differences}; "
            "nothing was written",
            "pass the Hugging Face folder that the model came from with --like",
        )
