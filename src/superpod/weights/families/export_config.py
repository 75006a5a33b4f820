"""Derives transformers' configuration from a NeMo model, for exports without a Hugging Face folder.

`nemo_config.require_match` converts the result back and rejects it if it does not specify the function that NeMo
computes. Needs NeMo and transformers.
"""

from __future__ import annotations

from typing import Any

from superpod.errors import UserError
from superpod.planner.formats import hf_families
from superpod.weights.families import nemo_config
from superpod.weights.families.families import FAMILIES
from superpod.weights.transfer import load

MODEL_TYPES = {family.model: kind for kind, family in reversed(FAMILIES.items())}
"""NeMo class -> the first `model_type` that it supports."""
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}
EPSILON_KEYS = {"nemotron": "norm_eps", "starcoder2": "norm_epsilon"}


def build_hf_config(model: Any, tokenizer: Any) -> Any:
    """Return transformers' configuration for a NeMo model; `tokenizer` gives bos, eos and pad ids. Raises UserError."""
    from transformers import AutoConfig

    config, kind = model.config, find_model_type(model)
    keys = _build_common_keys(config, kind) | _build_rope_keys(config, kind) | _build_window_keys(config, kind)
    if config.num_moe_experts:
        keys |= _build_expert_keys(config, kind)
    if config.multi_latent_attention:
        keys |= _build_latent_keys(config)
    if kind in ("gemma2", "gemma3_text"):
        keys |= _build_gemma_keys(config, kind)
    if config.vocab_size is None:  # the tokenizer's vocabulary with padding
        keys["vocab_size"] = load.get_base_state_dict(model)["embedding.word_embeddings.weight"].shape[0]
    inner_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        keys[name] = getattr(inner_tokenizer, name, None)
    return AutoConfig.for_model(kind, architectures=[FAMILIES[kind].architecture], **keys)


def find_model_type(model: Any) -> str:
    """Return transformers' `model_type` for a NeMo model. Raises UserError if none is known."""
    names = [cls.__name__ for cls in type(model).__mro__]
    kind = next((MODEL_TYPES[name] for name in names if name in MODEL_TYPES), None)
    if kind is None:
        raise UserError(f"no architecture of transformers is known for NeMo's {type(model).__name__}")
    if kind == "qwen3" and model.config.num_moe_experts:
        return "qwen3_moe"
    if kind == "deepseek_v2" and model.config.moe_router_score_function == "sigmoid":
        return "deepseek_v3"
    return kind


def _build_common_keys(config: Any, kind: str) -> dict[str, Any]:
    names = {nemo_config.get_activation(name): theirs for name, theirs in ACTIVATIONS.items()}
    act = names.get(config.activation_func, "silu")
    has_bias = bool(config.add_bias_linear)
    keys = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "max_position_embeddings": config.seq_length,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": bool(config.share_embeddings_and_output_weights),
        EPSILON_KEYS.get(kind, "rms_norm_eps"): config.layernorm_epsilon,
        "hidden_activation" if kind in ("gemma2", "gemma3_text") else "hidden_act": act,
    }
    if kind == "starcoder2":
        keys["use_bias"] = has_bias
    elif kind in ("llama", "nemotron"):
        keys |= {"attention_bias": has_bias, "mlp_bias": has_bias}
    if not config.multi_latent_attention:
        keys["head_dim"] = config.kv_channels
    return keys


def _build_rope_keys(config: Any, kind: str) -> dict[str, Any]:
    base = config.rotary_base
    keys: dict[str, Any] = {"rope_theta": base}
    if kind == "gemma3_text":
        keys = {"rope_local_base_freq": base[0], "rope_theta": base[1]}
    if kind in ("nemotron", "phi3"):
        keys["partial_rotary_factor"] = config.rotary_percent
    if kind == "gpt_oss":
        return keys | {"rope_scaling": _build_gpt_oss_yarn(config)}
    factor = config.rope_scaling_factor if kind == "gemma3_text" else config.seq_len_interpolation_factor
    if factor and factor != 1.0:
        return keys | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if getattr(config, "scale_factor", 1.0) != 1.0:
        scaling = {"rope_type": "llama3", "factor": config.scale_factor, "low_freq_factor": config.low_freq_factor}
        scaling |= {"high_freq_factor": config.high_freq_factor}
        return keys | {"rope_scaling": scaling | {"original_max_position_embeddings": config.old_context_len}}
    if config.multi_latent_attention and config.rope_type == "yarn":
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        scaling = {"rope_type": "yarn", "factor": config.rotary_scaling_factor}
        return keys | {"rope_scaling": scaling | {name: getattr(config, name) for name in names}}
    return keys


def _build_gpt_oss_yarn(config: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": config.yarn_rotary_scaling_factor,
        "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
        "beta_fast": config.yarn_beta_fast,
        "beta_slow": config.yarn_beta_slow,
        "truncate": config.yarn_correction_range_round_to_int,
    }
    if config.yarn_mscale_all_dim:  # as in NeMo's own recipes, where the attention factor is 1
        scaling |= {"mscale": config.yarn_mscale, "mscale_all_dim": config.yarn_mscale_all_dim}
    return scaling


def _build_window_keys(config: Any, kind: str) -> dict[str, Any]:
    from megatron.core.transformer.utils import is_layer_window_attention

    if kind in ("llama", "nemotron", "gemma", "deepseek_v2", "deepseek_v3"):
        return {}
    window, layers = config.window_size, range(1, config.num_layers + 1)
    width = None
    if window:
        width = (window if isinstance(window, int) else window[0]) + 1
    keys: dict[str, Any] = {"sliding_window": width}
    if kind in ("qwen2", "qwen3", "qwen3_moe"):
        keys["use_sliding_window"] = width is not None
    if kind == "gemma3_text":
        size = sum(config.interleaved_attn_pattern)
        return keys | {"layer_types": [_name_layer_type(layer % size != 0) for layer in layers]}
    if kind in ("qwen2", "qwen3", "gpt_oss", "gemma2") and width is not None:
        skips = config.window_attn_skip_freq
        if kind == "gemma2" and skips is None:  # the default of NeMo's class
            return keys | {"layer_types": [_name_layer_type(layer % 2 == 0) for layer in layers]}
        windowed = [is_layer_window_attention((width - 1, 0), skips, layer) for layer in layers]
        keys["layer_types"] = [_name_layer_type(is_windowed) for is_windowed in windowed]
    return keys


def _name_layer_type(is_windowed: bool) -> str:
    return "sliding_attention" if is_windowed else "full_attention"


def _build_expert_keys(config: Any, kind: str) -> dict[str, Any]:
    names = hf_families.FAMILIES[kind].experts
    assert names is not None
    keys: dict[str, Any] = {names.count: config.num_moe_experts, "num_experts_per_tok": config.moe_router_topk}
    if names.ffn != "intermediate_size":
        keys[names.ffn] = config.moe_ffn_hidden_size
    if kind == "qwen3_moe":
        keys["norm_topk_prob"] = not config.moe_router_pre_softmax
    return keys


def _build_latent_keys(config: Any) -> dict[str, Any]:
    sigmoid = config.moe_router_score_function == "sigmoid"
    pattern = config.moe_layer_freq
    dense_layers = pattern.index(1) if isinstance(pattern, list) and 1 in pattern else 0
    groups = config.moe_router_num_groups
    keys = {
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_head_dim,
        "qk_rope_head_dim": config.qk_pos_emb_head_dim,
        "v_head_dim": config.v_head_dim,
        "first_k_dense_replace": dense_layers,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.moe_ffn_hidden_size,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        "n_group": groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "norm_topk_prob": sigmoid,
    }
    return keys if sigmoid else keys | {"topk_method": "group_limited_greedy" if groups else "greedy"}


def _build_gemma_keys(config: Any, kind: str) -> dict[str, Any]:
    if kind == "gemma3_text":
        scale = config.softmax_scale or config.kv_channels**-0.5
        scalar = round(scale**-2, 6)
        return {"query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar}  # transformers 5 rejects 256.0
    names = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
    return {name: getattr(config, name) for name in names}
