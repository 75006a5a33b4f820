"""Families with experts: config.json -> fields of NeMo's class; as `families_dense`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from superpod.planner.formats.hf_config import HFConfig
from superpod.weights.families.nemo_fields import (
    NemoFields,
    RefusedError,
    common,
    no_bias,
    rope,
    window,
    yarn_scales,
)


def mixtral(c: HFConfig) -> NemoFields:
    """Mixtral."""
    return NemoFields(common(c) | rope(c, "MixtralModel") | window(c) | softmax_router(c, normalised=True))


def softmax_router(c: HFConfig, *, normalised: bool) -> dict[str, Any]:
    """Fields of a router that takes the softmax over all experts (`normalised`: over the chosen ones)."""
    if c.topk > c.experts:
        raise RefusedError(f"num_experts_per_tok {c.topk} is more than the {c.experts} experts")
    if c.topk == 1 and normalised:
        raise RefusedError(
            "num_experts_per_tok is 1, with weights that sum to one; Megatron's router has no such choice"
        )
    return {
        "num_moe_experts": c.experts,
        "moe_router_topk": c.topk,
        "moe_router_pre_softmax": not normalised,
    }


def qwen3_moe(c: HFConfig) -> NemoFields:
    """Qwen 3 with experts in every layer."""
    no_bias(c, "Qwen3Model", "attention_bias")
    if c.moe_every != 1 or c.dense_first:
        dense = c.values.get("mlp_only_layers") or []
        raise RefusedError(
            f"decoder_sparse_step is {c.moe_every} and mlp_only_layers {dense}; NeMo's class has experts everywhere"
        )
    router = softmax_router(c, normalised=bool(c.values["norm_topk_prob"]))
    moe = {"moe_ffn_hidden_size": c.expert_ffn, "qk_layernorm": True, "add_qkv_bias": False}
    return NemoFields(common(c) | rope(c, "Qwen3Model") | window(c) | router | moe)


def gpt_oss(c: HFConfig) -> NemoFields:
    """gpt-oss; NeMo's own importer leaves yarn's factor out (yarn_mscale_all_dim 1), transformers has it."""
    if not c.values["attention_bias"]:
        raise RefusedError("attention_bias is false; NeMo's GPTOSSModel has biases")
    for key, only in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if c.values.get(key, only) != only:
            raise RefusedError(f"{key} is {c.values[key]}; transformers and NeMo compute {only}")
    if c.values["hidden_act"] != "silu":
        raise RefusedError(
            f"hidden_act is {c.values['hidden_act']!r}; transformers and NeMo compute gpt-oss's own SwiGLU"
        )
    rotary = c.rope()
    if rotary.kind != "yarn":
        raise RefusedError(f"rope_scaling is of type {rotary.kind!r}; NeMo's GPTOSSModel computes 'yarn'")
    mscale, all_dim, factor = yarn_scales(rotary)
    if factor:
        raise RefusedError(f"rope_scaling has attention_factor {factor}; NeMo's GPTOSSModel derives it from factor")
    fields = common(c) | softmax_router(c, normalised=True) | window(c)
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
    del fields["activation_func"]  # the class has gpt-oss's own
    return NemoFields(fields)


def _refuse_other(c: HFConfig, *allowed: tuple[str, Any]) -> None:
    """Refuse keys with a value other than the one that transformers and NeMo compute."""
    for key, only in allowed:
        if c.values.get(key, only) != only:
            raise RefusedError(f"{key} is {c.values[key]!r}; transformers and NeMo compute {only!r}")


def deepseek_v3(c: HFConfig) -> NemoFields:
    """DeepSeek-V3 and R1."""
    if not c.values["norm_topk_prob"]:
        raise RefusedError("norm_topk_prob is false; Megatron's sigmoid router makes the weights sum to one")
    if not c.values["rope_interleave"]:
        raise RefusedError("rope_interleave is false; Megatron's latent attention takes interleaved pairs")
    _refuse_other(c, ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1))
    top, groups, chosen = c.topk, c.values["n_group"], c.values["topk_group"]
    if groups > 1 and top // chosen != 2:
        raise RefusedError(
            f"num_experts_per_tok {top} over topk_group {chosen} is not 2: transformers ranks groups by their best two "
            "experts, Megatron by as many as it takes of a group"
        )
    if top < 2:
        raise RefusedError("num_experts_per_tok is 1; Megatron's sigmoid router then leaves its weight as it is")
    nemo = latent(c, groups)
    nemo.fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return nemo


def deepseek_v2(c: HFConfig) -> NemoFields:
    """DeepSeek-V2, greedy or limited to groups."""
    _refuse_other(c, ("scoring_func", "softmax"), ("moe_layer_freq", 1))
    no_bias(c, "DeepSeekModel", "mlp_bias")
    if c.values["norm_topk_prob"]:
        raise RefusedError(
            "norm_topk_prob is true; transformers leaves it out, NeMo does too, DeepSeek's own code does not"
        )
    method, top = c.values["topk_method"], c.topk
    if method not in ("greedy", "group_limited_greedy"):
        raise RefusedError(f"topk_method is {method!r}; Megatron has greedy and group_limited_greedy")
    groups = c.values.get("n_group") or 1 if method == "group_limited_greedy" else 1
    if groups > 1 and top // c.values["topk_group"] != 1:
        raise RefusedError(
            f"num_experts_per_tok {top} over topk_group {c.values['topk_group']} is not 1: transformers ranks groups "
            "by their best expert, Megatron by as many as it takes of a group"
        )
    nemo = latent(c, groups)
    nemo.fields |= {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
    rotary = c.rope()
    if rotary.kind == "yarn" and rotary.scaling.get("mscale_all_dim"):
        nemo.doubts.append(
            "transformers 4.57 leaves DeepSeek-V2's yarn factor of the softmax (mscale_all_dim) out, which DeepSeek's "
            "own code and NeMo have"
        )
    return nemo


def latent(c: HFConfig, groups: int) -> NemoFields:
    """Multi-latent attention and DeepSeek's experts, whose router chooses among `groups` of them."""
    no_bias(c, "DeepSeekModel", "attention_bias")
    if float(c.values["rms_norm_eps"]) != 1e-6:
        raise RefusedError(
            f"rms_norm_eps is {c.values['rms_norm_eps']}; transformers has 1e-6 in the latent norms, NeMo one for all"
        )
    if c.kv_heads not in (0, c.heads):
        raise RefusedError("num_key_value_heads differs from num_attention_heads; latent attention has no groups")
    if c.dense_first >= c.layers:
        raise RefusedError(f"first_k_dense_replace {c.dense_first} leaves none of {c.layers} layers with experts")
    if not c.shared_ffn:
        raise RefusedError("n_shared_experts is 0; NeMo's DeepSeekModel has shared experts")
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
        raise RefusedError(f"rope_scaling is of type {rotary.kind!r}; Megatron's latent attention computes 'yarn'")
    mscale, all_dim, factor = yarn_scales(rotary)
    if factor or scaling.get("truncate") is False or (scaling.get("mscale_all_dim") and not all_dim):
        raise RefusedError(f"rope_scaling is {scaling!r}; Megatron's latent attention derives its factors from mscale")
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
