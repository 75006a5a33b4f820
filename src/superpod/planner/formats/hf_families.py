"""Readers of Hugging Face configurations, one for each architecture: keys of config.json -> fields of `ModelShape`.

The keys are those of transformers' configuration classes (4.57; `glm_moe_dsa` and `qwen3_5` of 5.x), and of the models'
own files on the hub where transformers has no class. Families give an absent key different meanings, so every function
has its own defaults. tests/planner/formats/test_hf_families.py compares parameters with transformers' own models.
"""

from __future__ import annotations

from collections.abc import Callable

from superpod.planner.formats import hf_kin
from superpod.planner.formats.hf_keys import Config, common, experts, gpt2, layer_windows, qwen3, qwen3_moe, windowed


def _llama(c: Config) -> Config:
    return common(c)


def _qwen2(c: Config) -> Config:
    window = c.get("sliding_window") or 0 if c.get("use_sliding_window") else 0
    return common(c) | {"qkv_bias": True, "proj_bias": False} | layer_windows(c, window)


def _mixtral(c: Config) -> Config:
    moe = {"experts": c["num_local_experts"], "topk": c["num_experts_per_tok"], "expert_ffn": c["intermediate_size"]}
    return windowed(c) | moe


def _qwen3_next(c: Config) -> Config:
    delta = {
        "attention_gate": True,
        "delta_every": c.get("full_attention_interval", 4),
        "delta_key_heads": c["linear_num_key_heads"],
        "delta_value_heads": c["linear_num_value_heads"],
        "delta_key_dim": c["linear_key_head_dim"],
        "delta_value_dim": c["linear_value_head_dim"],
        "conv": c.get("linear_conv_kernel_dim", 4),
        "head_dim": c.get("head_dim", 256),
    }
    if not c.get("num_experts"):
        return qwen3(c) | delta
    return qwen3_moe(c) | delta | {"shared_ffn": c["shared_expert_intermediate_size"], "shared_gate": True}


def _gemma(c: Config) -> Config:
    return common(c, tied=True) | {"head_dim": c.get("head_dim", 256)}


def _gemma2(c: Config) -> Config:
    own = {"soft_capped": bool(c.get("attn_logit_softcapping", 50.0)), "refuses": "cp"}
    return _gemma(c) | own | {"post_norms": True, "window": c.get("sliding_window", 4096), "global_every": 2}


def _gemma3(c: Config) -> Config:
    every = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 6
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}  # Gemma3TextConfig's
    own = {"soft_capped": False, "refuses": "cp vp"}
    return _gemma2({**defaults, **c}) | own | {"qk_norm": True, "global_every": every}


def _deepseek(c: Config) -> Config:
    moe = experts(c, "n_routed_experts")
    mla = {
        "q_lora": c.get("q_lora_rank") or 0,
        "kv_lora": c["kv_lora_rank"],
        "qk_nope_dim": c["qk_nope_head_dim"],
        "qk_rope_dim": c["qk_rope_head_dim"],
        "v_dim": c["v_head_dim"],
        "head_dim": 0,
        "kv_heads": 0,
        "indexer_heads": c.get("index_n_heads") or 0,
        "indexer_dim": c.get("index_head_dim") or 0,
        "indexer_topk": c.get("index_topk") or 0,
    }
    shared = (c.get("n_shared_experts") or 0) * c["moe_intermediate_size"]
    return common(c) | moe | mla | {"shared_ffn": shared, "dense_first": c.get("first_k_dense_replace", 0)}


def _gpt_oss(c: Config) -> Config:
    moe = {"experts": c["num_local_experts"], "topk": c["num_experts_per_tok"], "expert_ffn": c["intermediate_size"]}
    plain = {**c, "attention_bias": False}
    style = {"bias": True, "clamped": True, "sink": True, "window": c["sliding_window"], "global_every": 2}
    return common(plain) | moe | style


def _starcoder2(c: Config) -> Config:
    style = {"norm": "layer", "gated": False, "bias": c.get("use_bias", True), "window": c.get("sliding_window") or 0}
    return common(c, tied=True) | style


def _nemotron(c: Config) -> Config:
    return common(c) | {"norm": "layer", "gated": False}


def _nemotron_h(c: Config) -> Config:
    mamba = {
        "mamba_heads": c["mamba_num_heads"],
        "mamba_head_dim": c["mamba_head_dim"],
        "mamba_state": c["ssm_state_size"],
        "mamba_groups": c["n_groups"],
        "conv": c.get("conv_kernel", 4),
        "head_dim": c.get("head_dim") or c.get("attention_head_dim") or 0,
    }
    shape = common(c) | mamba | {"pattern": c["hybrid_override_pattern"], "gated": False}
    if not c.get("n_routed_experts"):
        return shape
    shared = {"shared_ffn": c["moe_shared_expert_intermediate_size"], "latent": c.get("moe_latent_size") or 0}
    return shape | experts(c, "n_routed_experts") | shared


def _llama4(c: Config) -> Config:
    ffn = c["intermediate_size"]
    moe = {"experts": c["num_local_experts"], "topk": c["num_experts_per_tok"], "expert_ffn": ffn, "shared_ffn": ffn}
    chunks = {"window": c.get("attention_chunk_size") or 0, "chunked": True, "global_every": 4}
    return common(c) | moe | chunks | {"ffn": c["intermediate_size_mlp"], "moe_every": c["interleave_moe_layer_step"]}


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "llama": _llama,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "mistral": windowed,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_5_moe": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm_moe_dsa": _deepseek,
    "gpt_oss": _gpt_oss,
    "phi3": windowed,
    "starcoder2": _starcoder2,
    "nemotron": _nemotron,
    "nemotron_h": _nemotron_h,
    "gpt2": gpt2,
    "olmo": hf_kin.olmo,
    "olmo2": hf_kin.olmo2,
    "olmo3": hf_kin.olmo3,
    "olmoe": hf_kin.olmoe,
    "granite": hf_kin.llama_like,
    "granitemoe": hf_kin.granite_moe,
    "granitemoeshared": hf_kin.granite_moe,
    "cohere": hf_kin.cohere_r,
    "cohere2": hf_kin.cohere2,
    "stablelm": hf_kin.stablelm,
    "phi": hf_kin.phi,
    "phimoe": hf_kin.phimoe,
    "gpt_neox": hf_kin.gpt_neox,
    "falcon": hf_kin.falcon,
    "gpt_bigcode": hf_kin.gpt_bigcode,
    "glm": hf_kin.glm,
    "glm4": hf_kin.glm4,
    "glm4_moe": hf_kin.glm4_moe,
    "dots1": hf_kin.dots1,
    "ernie4_5": hf_kin.ernie,
    "exaone4": hf_kin.exaone4,
    "smollm3": hf_kin.smollm3,
    "seed_oss": hf_kin.seed_oss,
    "helium": hf_kin.helium,
    "arcee": hf_kin.arcee,
    "hunyuan_v1_dense": hf_kin.hunyuan,
    "ministral": hf_kin.ministral,
    "qwen2_moe": hf_kin.qwen2_moe,
    "internlm2": hf_kin.internlm2,
    "internlm3": hf_kin.internlm3,
    "baichuan": hf_kin.llama_like,
    "chatglm": hf_kin.chatglm,
}
"""Readers of the architectures, by `model_type`."""
