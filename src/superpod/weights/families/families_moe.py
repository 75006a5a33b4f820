"""Readers of the families with experts: config.json -> fields of NeMo's class; as `families_dense`."""

from __future__ import annotations

from typing import Any

from superpod.weights.families.hf_keys import Config, Refused
from superpod.weights.families.reading import Reading, common, layer_types, no_bias, rope, rope_kind, stated, window


def mixtral(c: Config, raw: Config) -> Reading:
    """Mixtral."""
    fields = common(c, raw) | rope(c, "MixtralModel")
    fields |= window(c.get("sliding_window"), [True] * c["num_hidden_layers"])
    return Reading(fields | experts(c, "num_local_experts", normalised=True))


def experts(c: Config, count: str, *, normalised: bool) -> dict[str, Any]:
    """Fields of a router that takes the softmax over all experts (`normalised`: over the chosen ones)."""
    top = c["num_experts_per_tok"]
    if top > c[count]:
        raise Refused(f"num_experts_per_tok {top} is more than {count} {c[count]}")
    if top == 1 and normalised:
        raise Refused("num_experts_per_tok is 1, with weights that sum to one; Megatron's router has no such choice")
    return {"num_moe_experts": c[count], "moe_router_topk": top, "moe_router_pre_softmax": not normalised}


def qwen3_moe(c: Config, raw: Config) -> Reading:
    """Qwen 3 with experts in every layer."""
    no_bias(c, "Qwen3Model", "attention_bias")
    step, dense = c["decoder_sparse_step"], c.get("mlp_only_layers") or []
    if step != 1 or dense:
        raise Refused(f"decoder_sparse_step is {step} and mlp_only_layers {dense}; NeMo's class has experts everywhere")
    width = stated(c, raw, "sliding_window") if c["use_sliding_window"] else None
    fields = common(c, raw) | rope(c, "Qwen3Model") | window(width, [True] * c["num_hidden_layers"])
    fields |= experts(c, "num_experts", normalised=bool(c["norm_topk_prob"]))
    moe = {"moe_ffn_hidden_size": c["moe_intermediate_size"], "qk_layernorm": True, "add_qkv_bias": False}
    return Reading(fields | moe)


def gpt_oss(c: Config, raw: Config) -> Reading:
    """gpt-oss; NeMo's own importer leaves yarn's factor out (yarn_mscale_all_dim 1), transformers has it."""
    if not c["attention_bias"]:
        raise Refused("attention_bias is false; NeMo's GPTOSSModel has biases")
    for key, only in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if c.get(key, only) != only:
            raise Refused(f"{key} is {c[key]}; transformers and NeMo compute {only}")
    if c["hidden_act"] != "silu":
        raise Refused(f"hidden_act is {c['hidden_act']!r}; transformers and NeMo compute gpt-oss's own SwiGLU")
    kind, scaling = ("none", {}) if "rope_scaling" in raw and raw["rope_scaling"] is None else rope_kind(c)
    if kind != "yarn":
        raise Refused(f"rope_scaling is of type {kind!r}; NeMo's GPTOSSModel computes 'yarn'")
    fields = common(c, raw) | experts(c, "num_local_experts", normalised=True)
    fields |= {"rotary_base": c["rope_theta"], "moe_ffn_hidden_size": c["intermediate_size"]}
    mscale, all_dim, factor = yarn_scales(scaling)
    if factor:
        raise Refused(f"rope_scaling has attention_factor {factor}; NeMo's GPTOSSModel derives it from factor")
    fields |= {
        "yarn_rotary_scaling_factor": scaling["factor"],
        "yarn_original_max_position_embeddings": scaling.get("original_max_position_embeddings")
        or c["max_position_embeddings"],
        "yarn_beta_fast": scaling.get("beta_fast") or 32,
        "yarn_beta_slow": scaling.get("beta_slow") or 1,
        "yarn_correction_range_round_to_int": scaling.get("truncate", True),
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
    }
    fields |= window(c["sliding_window"], layer_types(c, lambda layer: layer % 2 == 0))
    del fields["activation_func"]  # the class has gpt-oss's own
    return Reading(fields)


def yarn_scales(scaling: Config) -> tuple[float, float, float | None]:
    """(mscale, mscale_all_dim, attention_factor) of yarn: the attention factor is mscale's over mscale_all_dim's."""
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return float(mscale), float(all_dim), scaling.get("attention_factor")
    return 1.0, 0.0, scaling.get("attention_factor")


def deepseek_v3(c: Config, raw: Config) -> Reading:
    """DeepSeek-V3 and R1."""
    if not c["norm_topk_prob"]:
        raise Refused("norm_topk_prob is false; Megatron's sigmoid router makes the weights sum to one")
    if not c["rope_interleave"]:
        raise Refused("rope_interleave is false; Megatron's latent attention takes interleaved pairs")
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if c.get(key, only) != only:
            raise Refused(f"{key} is {c[key]!r}; transformers and NeMo compute {only!r}")
    top, chosen = c["num_experts_per_tok"], c["topk_group"]
    if c["n_group"] > 1 and top // chosen != 2:
        raise Refused(
            f"num_experts_per_tok {top} over topk_group {chosen} is not 2: transformers ranks groups by their best two "
            "experts, Megatron by as many as it takes of a group"
        )
    if top < 2:
        raise Refused("num_experts_per_tok is 1; Megatron's sigmoid router then leaves its weight as it is")
    reading = latent(c, raw)
    reading.fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return reading


def deepseek_v2(c: Config, raw: Config) -> Reading:
    """DeepSeek-V2, greedy or limited to groups."""
    for key, only in (("scoring_func", "softmax"), ("moe_layer_freq", 1)):
        if c.get(key, only) != only:
            raise Refused(f"{key} is {c[key]!r}; transformers and NeMo compute {only!r}")
    no_bias(c, "DeepSeekModel", "mlp_bias")
    if c["norm_topk_prob"]:
        raise Refused("norm_topk_prob is true; transformers leaves it out, NeMo does too, DeepSeek's own code does not")
    groups = c.get("n_group") if c["topk_method"] == "group_limited_greedy" else None
    if c["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise Refused(f"topk_method is {c['topk_method']!r}; Megatron has greedy and group_limited_greedy")
    if groups and groups > 1 and c["num_experts_per_tok"] // c["topk_group"] != 1:
        raise Refused(
            f"num_experts_per_tok {c['num_experts_per_tok']} over topk_group {c['topk_group']} is not 1: transformers "
            "ranks groups by their best expert, Megatron by as many as it takes of a group"
        )
    reading = latent({**c, "n_group": groups, "topk_group": c.get("topk_group") if groups else None}, raw)
    reading.fields["moe_router_score_function"] = "softmax"
    reading.fields["moe_router_enable_expert_bias"] = False
    kind, scaling = rope_kind(c)
    if kind == "yarn" and scaling.get("mscale_all_dim"):
        reading.doubts.append(
            "transformers 4.57 leaves DeepSeek-V2's yarn factor of the softmax (mscale_all_dim) out, which DeepSeek's "
            "own code and NeMo have"
        )
    return reading


def latent(c: Config, raw: Config) -> Reading:
    """Multi-latent attention and DeepSeek's experts."""
    no_bias(c, "DeepSeekModel", "attention_bias")
    if float(c["rms_norm_eps"]) != 1e-6:
        raise Refused(
            f"rms_norm_eps is {c['rms_norm_eps']}; transformers has 1e-6 in the latent norms, NeMo one for all"
        )
    if c.get("num_key_value_heads") not in (None, c["num_attention_heads"]):
        raise Refused("num_key_value_heads differs from num_attention_heads; latent attention has no groups")
    layers, dense = c["num_hidden_layers"], c["first_k_dense_replace"]
    if dense >= layers:
        raise Refused(f"first_k_dense_replace {dense} leaves none of {layers} layers with experts")
    if not c["n_shared_experts"]:
        raise Refused("n_shared_experts is 0; NeMo's DeepSeekModel has shared experts")
    fields = common({**c, "head_dim": c["qk_nope_head_dim"], "num_key_value_heads": None}, {})
    groups = c.get("n_group") or 1
    fields |= {
        "q_lora_rank": stated(c, raw, "q_lora_rank"),
        "kv_lora_rank": c["kv_lora_rank"],
        "qk_head_dim": c["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": c["qk_rope_head_dim"],
        "v_head_dim": c["v_head_dim"],
        "num_moe_experts": c["n_routed_experts"],
        "moe_ffn_hidden_size": c["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": c["moe_intermediate_size"] * c["n_shared_experts"],
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_router_topk": c["num_experts_per_tok"],
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": c["topk_group"] if groups > 1 else None,
        "moe_router_topk_scaling_factor": c["routed_scaling_factor"],
        "qk_layernorm": True,
    }
    return Reading(fields | _latent_rope(c))


def _latent_rope(c: Config) -> dict[str, Any]:
    kind, scaling = rope_kind(c)
    fields: dict[str, Any] = {"rotary_base": c["rope_theta"]}
    if kind == "default":
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    if kind != "yarn":
        raise Refused(f"rope_scaling is of type {kind!r}; Megatron's latent attention computes 'yarn'")
    mscale, all_dim, factor = yarn_scales(scaling)
    if factor or scaling.get("truncate") is False or (scaling.get("mscale_all_dim") and not all_dim):
        raise Refused(f"rope_scaling is {scaling!r}; Megatron's latent attention derives its factors from mscale")
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling["factor"],
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings")
        or c["max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
