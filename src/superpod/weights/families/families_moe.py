"""Converts the config.json of families with experts to fields of NeMo's classes; see `families_dense`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from superpod.planner.formats.hf_config import HFConfig
from superpod.weights.families.nemo_fields import (
    NemoFields,
    UnsupportedError,
    common,
    require_no_bias,
    rope,
    window,
    yarn_scales,
)


def mixtral(c: HFConfig) -> NemoFields:
    """Convert Mixtral."""
    return NemoFields(common(c) | rope(c, "MixtralModel") | window(c) | softmax_router(c, normalized=True))


def softmax_router(c: HFConfig, *, normalized: bool) -> dict[str, Any]:
    """Return the fields of a router with a softmax over all experts (`normalized`: over the selected ones)."""
    if c.topk > c.experts:
        raise UnsupportedError(f"num_experts_per_tok is {c.topk}, which exceeds the {c.experts} experts")
    if c.topk == 1 and normalized:
        raise UnsupportedError(
            "num_experts_per_tok is 1 with normalized weights, which Megatron's router does not support"
        )
    return {
        "num_moe_experts": c.experts,
        "moe_router_topk": c.topk,
        "moe_router_pre_softmax": not normalized,
    }


def qwen3_moe(c: HFConfig) -> NemoFields:
    """Convert Qwen 3 with experts in every layer."""
    require_no_bias(c, "Qwen3Model", "attention_bias")
    if c.moe_every != 1 or c.dense_first:
        dense = c.values.get("mlp_only_layers") or []
        raise UnsupportedError(
            f"decoder_sparse_step is {c.moe_every} and mlp_only_layers is {dense}, but NeMo's class has experts in all "
            "layers"
        )
    router = softmax_router(c, normalized=bool(c.values["norm_topk_prob"]))
    moe = {"moe_ffn_hidden_size": c.expert_ffn, "qk_layernorm": True, "add_qkv_bias": False}
    return NemoFields(common(c) | rope(c, "Qwen3Model") | window(c) | router | moe)


def gpt_oss(c: HFConfig) -> NemoFields:
    """Convert gpt-oss with YaRN's factor, which transformers applies and NeMo's own importer omits."""
    if not c.values["attention_bias"]:
        raise UnsupportedError("attention_bias is false, but NeMo's GPTOSSModel has biases")
    for key, only in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if c.values.get(key, only) != only:
            raise UnsupportedError(f"{key} is {c.values[key]}, but transformers and NeMo use {only}")
    if c.values["hidden_act"] != "silu":
        raise UnsupportedError(
            f"hidden_act is {c.values['hidden_act']!r}, but transformers and NeMo use gpt-oss's own SwiGLU"
        )
    rotary = c.rope()
    if rotary.kind != "yarn":
        raise UnsupportedError(f"rope_scaling has type {rotary.kind!r}, but NeMo's GPTOSSModel supports only 'yarn'")
    mscale, all_dim, factor = yarn_scales(rotary)
    if factor:
        raise UnsupportedError(
            f"rope_scaling has attention_factor {factor}, but NeMo's GPTOSSModel computes it from factor"
        )
    fields = common(c) | softmax_router(c, normalized=True) | window(c)
    fields |= {"rotary_base": rotary.theta, "moe_ffn_hidden_size": c.expert_ffn}
    fields |= {
        "yarn_rotary_scaling_factor": rotary.scaling["factor"],
        "yarn_original_max_position_embeddings": rotary.scaling.get("original_max_position_embeddings")
        or c.values["max_position_embeddings"],
        "yarn_beta_fast": rotary.scaling.get("beta_fast") or 32,
        "yarn_beta_slow": rotary.scaling.get("beta_slow") or 1,
        "yarn_correction_range_round_to_int": rotary.scaling.get("truncate", True),
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
    }
    del fields["activation_func"]  # the class has its own
    return NemoFields(fields)


def _require_values(c: HFConfig, *allowed: tuple[str, Any]) -> None:
    """Require that keys have the only value that transformers and NeMo support."""
    for key, only in allowed:
        if c.values.get(key, only) != only:
            raise UnsupportedError(f"{key} is {c.values[key]!r}, but transformers and NeMo support only {only!r}")


def deepseek_v3(c: HFConfig) -> NemoFields:
    """Convert DeepSeek-V3 and R1."""
    if not c.values["norm_topk_prob"]:
        raise UnsupportedError("norm_topk_prob is false, but Megatron's sigmoid router normalizes the weights")
    if not c.values["rope_interleave"]:
        raise UnsupportedError("rope_interleave is false, but Megatron's latent attention rotates interleaved pairs")
    _require_values(c, ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1))
    top, groups, chosen = c.topk, c.values["n_group"], c.values["topk_group"]
    if groups > 1 and top // chosen != 2:
        raise UnsupportedError(
            f"num_experts_per_tok {top} over topk_group {chosen} must be 2: transformers ranks groups by their best "
            "two experts, but Megatron by the number of experts that it selects per group"
        )
    if top < 2:
        raise UnsupportedError("num_experts_per_tok is 1, whose weight Megatron's sigmoid router does not normalize")
    nemo = latent(c, groups)
    nemo.fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return nemo


def deepseek_v2(c: HFConfig) -> NemoFields:
    """Convert DeepSeek-V2 with the greedy or the group-limited router."""
    _require_values(c, ("scoring_func", "softmax"), ("moe_layer_freq", 1))
    require_no_bias(c, "DeepSeekModel", "mlp_bias")
    if c.values["norm_topk_prob"]:
        raise UnsupportedError("norm_topk_prob is true, which transformers and NeMo ignore, unlike DeepSeek's code")
    method, top = c.values["topk_method"], c.topk
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedError(f"topk_method is {method!r}, but Megatron supports only greedy and group_limited_greedy")
    groups = 1
    if method == "group_limited_greedy":
        groups = c.values.get("n_group") or 1
    if groups > 1 and top // c.values["topk_group"] != 1:
        raise UnsupportedError(
            f"num_experts_per_tok {top} over topk_group {c.values['topk_group']} must be 1: transformers ranks groups "
            "by their best expert, but Megatron by the number of experts that it selects per group"
        )
    nemo = latent(c, groups)
    nemo.fields |= {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
    rotary = c.rope()
    if rotary.kind == "yarn" and rotary.scaling.get("mscale_all_dim"):
        nemo.doubts.append(
            "transformers 4.57 omits YaRN's factor of DeepSeek-V2's softmax (mscale_all_dim), but DeepSeek's own code "
            "and NeMo apply it"
        )
    return nemo


def latent(c: HFConfig, groups: int) -> NemoFields:
    """Return the fields of multi-latent attention and of DeepSeek's experts in `groups` router groups."""
    require_no_bias(c, "DeepSeekModel", "attention_bias")
    if float(c.values["rms_norm_eps"]) != 1e-6:
        raise UnsupportedError(
            f"rms_norm_eps is {c.values['rms_norm_eps']}, but transformers uses 1e-6 in the latent norms, and NeMo "
            "supports only one value for all norms"
        )
    if c.kv_heads not in (0, c.heads):
        raise UnsupportedError(
            "num_key_value_heads must equal num_attention_heads: latent attention has no query groups"
        )
    if c.dense_first >= c.layers:
        raise UnsupportedError(
            f"first_k_dense_replace is {c.dense_first}, so that none of {c.layers} layers has experts"
        )
    if not c.shared_ffn:
        raise UnsupportedError("n_shared_experts is 0, but NeMo's DeepSeekModel requires shared experts")
    fields = common(replace(c, head_dim=c.qk_nope_dim, kv_heads=0))
    fields |= {
        "q_lora_rank": c.q_lora or None,
        "kv_lora_rank": c.kv_lora,
        "qk_head_dim": c.qk_nope_dim,
        "qk_pos_emb_head_dim": c.qk_rope_dim,
        "v_head_dim": c.v_dim,
        "num_moe_experts": c.experts,
        "moe_ffn_hidden_size": c.expert_ffn,
        "moe_shared_expert_intermediate_size": c.shared_ffn,
        "moe_layer_freq": [0] * c.dense_first + [1] * (c.layers - c.dense_first),
        "moe_router_topk": c.topk,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": c.values["topk_group"] if groups > 1 else None,
        "moe_router_topk_scaling_factor": c.values["routed_scaling_factor"],
        "qk_layernorm": True,
    }
    return NemoFields(fields | _latent_rope(c))


def _latent_rope(c: HFConfig) -> dict[str, Any]:
    rotary = c.rope()
    fields: dict[str, Any] = {"rotary_base": rotary.theta}
    if rotary.kind == "default":
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    scaling = rotary.scaling
    if rotary.kind != "yarn":
        raise UnsupportedError(
            f"rope_scaling has type {rotary.kind!r}, but Megatron's latent attention supports only 'yarn'"
        )
    mscale, all_dim, factor = yarn_scales(rotary)
    if factor or scaling.get("truncate") is False or (scaling.get("mscale_all_dim") and not all_dim):
        raise UnsupportedError(
            f"rope_scaling is {scaling!r}, but Megatron's latent attention computes its factors from mscale"
        )
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling["factor"],
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings")
        or c.values["max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
