"""Readers of Llama's kin: OLMo, Granite, Command R, StableLM, Phi, GLM and others, and older architectures.

As `hf_families.py`, whose table names them.
"""

from __future__ import annotations

from superpod.planner.formats.hf_keys import (
    Config,
    common,
    experts,
    gpt2,
    layer_windows,
    qwen3_moe,
    windowed,
    with_head,
)


def llama_like(c: Config) -> Config:
    """Llama with other norms' places, multipliers or rotary shares, none of which changes a size."""
    return common(c)


def olmo(c: Config) -> Config:
    """model_type olmo."""
    return common(c) | {"approximate": "its norms have no weights: a few numbers a layer too many"}


def olmo2(c: Config) -> Config:
    """model_type olmo2."""
    return common(c) | {"qk_norm": True, "qk_norm_whole": True}


def olmo3(c: Config) -> Config:
    """model_type olmo3."""
    kinds = c.get("layer_types") or ["sliding"] * 3 + ["full"]
    return olmo2(c) | layer_windows({**c, "layer_types": kinds}, c.get("sliding_window", 4096))


def olmoe(c: Config) -> Config:
    """model_type olmoe."""
    return olmo2(c) | experts({**c, "moe_intermediate_size": c["intermediate_size"]}, "num_experts")


def granite_moe(c: Config) -> Config:
    """model_type granite_moe."""
    moe = experts({**c, "moe_intermediate_size": c["intermediate_size"]}, "num_local_experts")
    return common(c) | moe | {"shared_ffn": c.get("shared_intermediate_size") or 0}


def cohere(c: Config) -> Config:
    """Command R and Aya: attention and MLP read one norm, a LayerNorm without bias (as large as an RMSNorm)."""
    return common(c, tied=True) | {"one_norm": True}


def cohere_r(c: Config) -> Config:
    """model_type cohere_r."""
    norms = "its norms of queries and keys differ by head: a few numbers a layer too few"
    return cohere(c) | ({"qk_norm": True, "approximate": norms} if c.get("use_qk_norm") else {})


def cohere2(c: Config) -> Config:
    """model_type cohere2."""
    every = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 4
    kinds = c.get("layer_types") or ["sliding"] * (every - 1) + ["full"]
    return cohere(c) | layer_windows({**c, "layer_types": kinds}, c.get("sliding_window") or 0)


def stablelm(c: Config) -> Config:
    """model_type stablelm."""
    shape = common(c) | {"norm": "layer", "qkv_bias": c.get("use_qkv_bias", False)}
    if c.get("qk_layernorm"):
        shape |= {"qk_norm": True, "approximate": "its norms of queries and keys differ by head: a few numbers too few"}
    return shape | {"one_norm": c.get("use_parallel_residual", False)}


def phi(c: Config) -> Config:
    """model_type phi."""
    head = "its output head has a bias, which is not counted"
    style = {"norm": "layer", "gated": False, "bias": True, "one_norm": True, "approximate": head}
    return common(c) | style


def phimoe(c: Config) -> Config:
    """model_type phimoe."""
    moe = experts({**c, "moe_intermediate_size": c["intermediate_size"]}, "num_local_experts")
    head = {"approximate": "its output head has a bias, which is not counted"} if c.get("lm_head_bias") else {}
    return windowed(c) | moe | {"norm": "layer"} | head


def gpt_neox(c: Config) -> Config:
    """model_type gpt_neox."""
    style = {"norm": "layer", "gated": False, "bias": True}
    return common({**c, "attention_bias": False, "num_key_value_heads": 0, "head_dim": 0}) | style


def falcon(c: Config) -> Config:
    """model_type falcon."""
    new = c.get("new_decoder_architecture", False)
    groups = c.get("num_kv_heads") or c["num_attention_heads"] if new else 1 if c.get("multi_query", True) else 0
    one = c.get("parallel_attn", True) and (not new or c.get("num_ln_in_parallel_attn") == 1)
    sizes = {"intermediate_size": c.get("ffn_hidden_size") or 4 * c["hidden_size"], "num_key_value_heads": groups}
    style = {"norm": "layer", "gated": False, "bias": c.get("bias", False), "one_norm": one}
    return common({**c, **sizes}, tied=True) | style


def gpt_bigcode(c: Config) -> Config:
    """model_type gpt_bigcode."""
    return gpt2(c) | {"kv_heads": 1 if c.get("multi_query", True) else 0}


def glm(c: Config) -> Config:
    """model_type glm."""
    return with_head({**c, "attention_bias": c.get("attention_bias", True)}, 128) | {"proj_bias": False}


def glm4(c: Config) -> Config:
    """model_type glm4."""
    return glm(c) | {"post_norms": True}


def glm4_moe(c: Config) -> Config:
    """model_type glm4_moe."""
    moe = experts(c, "n_routed_experts") | {"dense_first": c.get("first_k_dense_replace", 1)}
    shared = {"shared_ffn": c.get("n_shared_experts", 1) * c["moe_intermediate_size"]}
    return with_head(c, 128) | moe | shared | {"proj_bias": False, "qk_norm": c.get("use_qk_norm", False)}


def dots1(c: Config) -> Config:
    """model_type dots1."""
    moe = experts(c, "n_routed_experts") | {"dense_first": c.get("first_k_dense_replace", 0)}
    shared = {"shared_ffn": (c.get("n_shared_experts") or 0) * c["moe_intermediate_size"]}
    return common(c) | moe | shared | {"qk_norm": True}


def ernie(c: Config) -> Config:
    """model_type ernie."""
    biased = c.get("use_bias", False)
    return with_head({**c, "attention_bias": biased, "mlp_bias": biased}, 128, tied=True)


def exaone4(c: Config) -> Config:
    """model_type exaone4."""
    kinds = c.get("layer_types") or ["sliding"] * 3 + ["full"]
    return common(c) | {"qk_norm": True} | layer_windows({**c, "layer_types": kinds}, c.get("sliding_window") or 0)


def smollm3(c: Config) -> Config:
    """model_type smollm3."""
    return common(c, tied=True) | layer_windows(c, c.get("sliding_window") or 0 if c.get("use_sliding_window") else 0)


def seed_oss(c: Config) -> Config:
    """model_type seed_oss."""
    biases = {"qkv_bias": c.get("attention_bias", True), "proj_bias": c.get("attention_out_bias", False)}
    return with_head(c, 128) | biases


def helium(c: Config) -> Config:
    """model_type helium."""
    return with_head(c, 128) | {"proj_bias": False}


def arcee(c: Config) -> Config:
    """model_type arcee."""
    return common(c) | {"gated": False}


def hunyuan(c: Config) -> Config:
    """model_type hunyuan."""
    return common(c) | {"qk_norm": True}


def ministral(c: Config) -> Config:
    """model_type ministral."""
    return common(c) | layer_windows(c, c.get("sliding_window") or 0)


def qwen2_moe(c: Config) -> Config:
    """model_type qwen2_moe."""
    return qwen3_moe(c) | {
        "qk_norm": False,
        "qkv_bias": c.get("qkv_bias", True),
        "shared_ffn": c["shared_expert_intermediate_size"],
        "shared_gate": True,
    }


def internlm2(c: Config) -> Config:
    """Files of the hub (internlm/internlm2-7b): one `bias` for attention, MLPs without."""
    return common({**c, "attention_bias": c.get("bias", False)})


def internlm3(c: Config) -> Config:
    """Files of the hub (internlm/internlm3-8b-instruct): `qkv_bias`, and `bias` for all else."""
    biased = c.get("bias", False)
    return common({**c, "attention_bias": biased, "mlp_bias": biased}) | {"qkv_bias": c.get("qkv_bias", False)}


def chatglm(c: Config) -> Config:
    """Files of the hub (THUDM/chatglm3-6b)."""
    names = {"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size", "head_dim": "kv_channels"}
    sizes = {key: c[name] for key, name in names.items()}
    groups = c["multi_query_group_num"] if c.get("multi_query_attention") else 0
    biases = {"qkv_bias": c.get("add_qkv_bias", False), "bias": c.get("add_bias_linear", False)}
    vocab = c.get("padded_vocab_size") or c["vocab_size"]
    return common({**c, **sizes, "num_key_value_heads": groups, "vocab_size": vocab}) | biases
