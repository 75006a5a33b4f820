"""Converts the config.json of families with experts to fields of NeMo's classes; see `families_dense`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from superpod.planner.formats.hf_config import HFConfig
from superpod.weights.families.nemo_fields import (
    NemoFields,
    UnsupportedError,
    convert_common,
    convert_decoder,
    convert_window,
    get_yarn_scales,
    require_no_bias,
)


def convert_mixtral(config: HFConfig) -> NemoFields:
    """Convert Mixtral."""
    return NemoFields(convert_decoder(config, "MixtralModel") | convert_softmax_router(config, normalized=True))


def convert_softmax_router(config: HFConfig, *, normalized: bool) -> dict[str, Any]:
    """Return the fields of a softmax router over all experts, or over selected ones if `normalized` is set."""
    if config.topk > config.experts:
        raise UnsupportedError(f"num_experts_per_tok is {config.topk}, which exceeds the {config.experts} experts")
    if config.topk == 1 and normalized:
        raise UnsupportedError(
            "num_experts_per_tok is 1 with normalized weights, which Megatron's router does not support"
        )
    return {
        "num_moe_experts": config.experts,
        "moe_router_topk": config.topk,
        "moe_router_pre_softmax": not normalized,
    }


def convert_qwen3_moe(config: HFConfig) -> NemoFields:
    """Convert Qwen 3 with experts in every layer."""
    require_no_bias(config, "Qwen3Model", "attention_bias")
    if config.moe_every != 1 or config.dense_first:
        dense_layers = config.values.get("mlp_only_layers") or []
        raise UnsupportedError(
            f"decoder_sparse_step is {config.moe_every} and mlp_only_layers is {dense_layers}, but NeMo's class has "
            "experts in all layers"
        )
    router = convert_softmax_router(config, normalized=bool(config.values["norm_topk_prob"]))
    moe = {"moe_ffn_hidden_size": config.expert_ffn, "qk_layernorm": True, "add_qkv_bias": False}
    return NemoFields(convert_decoder(config, "Qwen3Model") | router | moe)


def convert_gpt_oss(config: HFConfig) -> NemoFields:
    """Convert gpt-oss, including YaRN's attention factor, which NeMo's own importer omits."""
    if not config.values["attention_bias"]:
        raise UnsupportedError("attention_bias is false, but NeMo's GPTOSSModel has biases")
    for key, only in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.values.get(key, only) != only:
            raise UnsupportedError(f"{key} is {config.values[key]}, but transformers and NeMo use {only}")
    if config.values["hidden_act"] != "silu":
        raise UnsupportedError(
            f"hidden_act is {config.values['hidden_act']!r}, but transformers and NeMo use gpt-oss's own SwiGLU"
        )
    rotary = config.rope()
    if rotary.kind != "yarn":
        raise UnsupportedError(f"rope_scaling has type {rotary.kind!r}, but NeMo's GPTOSSModel supports only 'yarn'")
    mscale, all_dim, factor = get_yarn_scales(rotary)
    if factor:
        raise UnsupportedError(
            f"rope_scaling has attention_factor {factor}, but NeMo's GPTOSSModel computes it from factor"
        )
    fields = convert_common(config) | convert_softmax_router(config, normalized=True) | convert_window(config)
    fields |= {"rotary_base": rotary.theta, "moe_ffn_hidden_size": config.expert_ffn}
    fields |= {
        "yarn_rotary_scaling_factor": rotary.scaling["factor"],
        "yarn_original_max_position_embeddings": rotary.scaling.get("original_max_position_embeddings")
        or config.values["max_position_embeddings"],
        "yarn_beta_fast": rotary.scaling.get("beta_fast") or 32,
        "yarn_beta_slow": rotary.scaling.get("beta_slow") or 1,
        "yarn_correction_range_round_to_int": rotary.scaling.get("truncate", True),
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
    }
    del fields["activation_func"]  # the class has its own
    return NemoFields(fields)


def _require_values(config: HFConfig, *allowed: tuple[str, Any]) -> None:
    """Raise UnsupportedError if one of the (key, value) pairs in `allowed` has another value in `config`."""
    for key, only in allowed:
        if config.values.get(key, only) != only:
            raise UnsupportedError(f"{key} is {config.values[key]!r}, but transformers and NeMo support only {only!r}")


def convert_deepseek_v3(config: HFConfig) -> NemoFields:
    """Convert DeepSeek-V3 and R1."""
    if not config.values["norm_topk_prob"]:
        raise UnsupportedError("norm_topk_prob is false, but Megatron's sigmoid router normalizes the weights")
    if not config.values["rope_interleave"]:
        raise UnsupportedError("rope_interleave is false, but Megatron's latent attention rotates interleaved pairs")
    _require_values(config, ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1))
    top, groups, chosen = config.topk, config.values["n_group"], config.values["topk_group"]
    if groups > 1 and top // chosen != 2:
        raise UnsupportedError(
            f"num_experts_per_tok {top} over topk_group {chosen} must be 2: transformers ranks groups by their best "
            "two experts, but Megatron by the number of experts that it selects per group"
        )
    if top < 2:
        raise UnsupportedError("num_experts_per_tok is 1, whose weight Megatron's sigmoid router does not normalize")
    nemo = convert_deepseek(config, groups)
    nemo.fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return nemo


def convert_deepseek_v2(config: HFConfig) -> NemoFields:
    """Convert DeepSeek-V2 with the greedy or the group-limited router."""
    _require_values(config, ("scoring_func", "softmax"), ("moe_layer_freq", 1))
    require_no_bias(config, "DeepSeekModel", "mlp_bias")
    if config.values["norm_topk_prob"]:
        raise UnsupportedError("norm_topk_prob is true, which transformers and NeMo ignore, unlike DeepSeek's code")
    method, top = config.values["topk_method"], config.topk
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedError(f"topk_method is {method!r}, but Megatron supports only greedy and group_limited_greedy")
    groups = 1
    if method == "group_limited_greedy":
        groups = config.values.get("n_group") or 1
    if groups > 1 and top // config.values["topk_group"] != 1:
        raise UnsupportedError(
            f"num_experts_per_tok {top} over topk_group {config.values['topk_group']} must be 1: transformers ranks "
            "groups by their best expert, but Megatron by the number of experts that it selects per group"
        )
    nemo = convert_deepseek(config, groups)
    nemo.fields |= {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
    rotary = config.rope()
    if rotary.kind == "yarn" and rotary.scaling.get("mscale_all_dim"):
        nemo.doubts.append(
            "transformers 4.57 omits YaRN's factor of DeepSeek-V2's softmax (mscale_all_dim), but DeepSeek's own code "
            "and NeMo apply it"
        )
    return nemo


def convert_deepseek(config: HFConfig, groups: int) -> NemoFields:
    """Convert multi-latent attention and DeepSeek's experts, which form `groups` router groups."""
    require_no_bias(config, "DeepSeekModel", "attention_bias")
    if float(config.values["rms_norm_eps"]) != 1e-6:
        raise UnsupportedError(
            f"rms_norm_eps is {config.values['rms_norm_eps']}, but transformers uses 1e-6 in the latent norms, and "
            "NeMo supports only one value for all norms"
        )
    if config.kv_heads not in (0, config.heads):
        raise UnsupportedError(
            "num_key_value_heads must equal num_attention_heads: latent attention has no query groups"
        )
    if config.dense_first >= config.layers:
        raise UnsupportedError(
            f"first_k_dense_replace is {config.dense_first}, so that none of {config.layers} layers has experts"
        )
    if not config.shared_ffn:
        raise UnsupportedError("n_shared_experts is 0, but NeMo's DeepSeekModel requires shared experts")
    fields = convert_common(replace(config, head_dim=config.qk_nope_dim, kv_heads=0))
    fields |= {
        "q_lora_rank": config.q_lora or None,
        "kv_lora_rank": config.kv_lora,
        "qk_head_dim": config.qk_nope_dim,
        "qk_pos_emb_head_dim": config.qk_rope_dim,
        "v_head_dim": config.v_dim,
        "num_moe_experts": config.experts,
        "moe_ffn_hidden_size": config.expert_ffn,
        "moe_shared_expert_intermediate_size": config.shared_ffn,
        "moe_layer_freq": [0] * config.dense_first + [1] * (config.layers - config.dense_first),
        "moe_router_topk": config.topk,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": config.values["topk_group"] if groups > 1 else None,
        "moe_router_topk_scaling_factor": config.values["routed_scaling_factor"],
        "qk_layernorm": True,
    }
    return NemoFields(fields | _convert_latent_rope(config))


def _convert_latent_rope(config: HFConfig) -> dict[str, Any]:
    rotary = config.rope()
    fields: dict[str, Any] = {"rotary_base": rotary.theta}
    if rotary.kind == "default":
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    scaling = rotary.scaling
    if rotary.kind != "yarn":
        raise UnsupportedError(
            f"rope_scaling has type {rotary.kind!r}, but Megatron's latent attention supports only 'yarn'"
        )
    mscale, all_dim, factor = get_yarn_scales(rotary)
    if factor or scaling.get("truncate") is False or (scaling.get("mscale_all_dim") and not all_dim):
        raise UnsupportedError(
            f"rope_scaling is {scaling!r}, but Megatron's latent attention computes its factors from mscale"
        )
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling["factor"],
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings")
        or config.values["max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
