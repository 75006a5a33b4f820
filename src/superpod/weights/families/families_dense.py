"""Converts the config.json of families without experts to fields of NeMo's classes.

Each function raises `UnsupportedError` if NeMo's class does not compute the same function. Sources: transformers
4.57.6, models/*/modeling_*.py; NeMo 2.7.3, llm/gpt/model.
"""

from __future__ import annotations

from superpod.planner.formats.hf_config import HFConfig
from superpod.weights.families.nemo_fields import (
    NemoFields,
    UnsupportedError,
    biases,
    common,
    require_no_bias,
    rope,
    window,
)


def llama(c: HFConfig) -> NemoFields:
    """Convert Llama and models with its architecture: Yi, SmolLM, Falcon 3, distilled DeepSeek-R1."""
    rotary = rope(c, "LlamaModel", llama3=True)
    config = "Llama31Config" if "scale_factor" in rotary else None
    return NemoFields(common(c) | biases(c, "LlamaModel") | rotary, config)


def granite(c: HFConfig) -> NemoFields:
    """Convert Granite: a Llama with a softmax scale. All other factors must be 1."""
    for key in ("embedding_multiplier", "logits_scaling", "residual_multiplier"):
        if c.values[key] != 1.0:
            raise UnsupportedError(f"{key} is {c.values[key]}, but NeMo's LlamaModel does not support this factor")
    nemo = llama(c)
    nemo.fields["softmax_scale"] = float(c.values["attention_multiplier"])
    return nemo


def smollm3(c: HFConfig) -> NemoFields:
    """Convert SmolLM3: a Llama with layers without RoPE."""
    if c.values.get("use_sliding_window") or "sliding_attention" in (c.values.get("layer_types") or []):
        raise UnsupportedError("use_sliding_window is set, but NeMo's LlamaModel does not support sliding windows")
    nemo = llama(c)
    every = c.values["no_rope_layer_interval"]
    rotated = c.values.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(c.layers)]
    if len(rotated) != c.layers:
        raise UnsupportedError(f"no_rope_layers must have {c.layers} entries, one per layer, but has {len(rotated)}")
    if not all(rotated):
        nemo.fields["no_rope_freq"] = [int(not on) for on in rotated]
    return nemo


def seed_oss(c: HFConfig) -> NemoFields:
    """Convert Seed-OSS: a Llama with biases of Q, K and V."""
    require_no_bias(c, "LlamaModel", "attention_out_bias", "mlp_bias")
    nemo = llama(c)
    nemo.fields["add_qkv_bias"] = c.qkv_bias
    return nemo


def mistral(c: HFConfig) -> NemoFields:
    """Convert Mistral with or without a sliding window."""
    fields = common(c) | rope(c, "MistralModel") | window(c)
    # Transformer Engine 2.9 supports windows only with all-to-all context parallelism, as does NeMo's importer.
    fields["cp_comm_type"] = "a2a" if fields["window_size"] else None
    return NemoFields(fields)


def qwen2(c: HFConfig) -> NemoFields:
    """Convert Qwen 2 and 2.5."""
    return NemoFields(common(c) | rope(c, "Qwen2Model") | window(c) | {"add_qkv_bias": True})


def qwen3(c: HFConfig) -> NemoFields:
    """Convert Qwen 3 without experts."""
    require_no_bias(c, "Qwen3Model", "attention_bias")
    fields = common(c) | rope(c, "Qwen3Model") | window(c)
    return NemoFields(fields | {"qk_layernorm": True, "add_qkv_bias": False})


def gemma(c: HFConfig) -> NemoFields:
    """Convert Gemma 1."""
    require_no_bias(c, "GemmaModel", "attention_bias")
    return NemoFields(common(c) | rope(c, "GemmaModel"))


def gemma2(c: HFConfig) -> NemoFields:
    """Convert Gemma 2; its windows are corrected when a model is loaded (`nemo_fixes`)."""
    require_no_bias(c, "Gemma2Model", "attention_bias")
    fields = common(c, act="hidden_activation") | rope(c, "Gemma2Model") | window(c)
    # Always set, because NeMo's class has its own default for the windowed layers.
    fields["window_attn_skip_freq"] = [int(on) for on in c.windowed] if fields["window_size"] else None
    for key in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        fields[key] = c.values[key]
    return NemoFields(fields)


def gemma3(c: HFConfig) -> NemoFields:
    """Convert Gemma 3's language model."""
    require_no_bias(c, "Gemma3Model", "attention_bias")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if c.values.get(key):
            raise UnsupportedError(f"{key} is {c.values[key]!r}, but NeMo's Gemma3Model does not support it")
    fields = common(c, act="hidden_activation") | rope(c, "Gemma3Model")
    if not c.tied:
        raise UnsupportedError("tie_word_embeddings is false, but NeMo's Gemma3Model ties the embeddings")
    if not window(c)["window_size"] and not c.window:
        raise UnsupportedError("sliding_window is null, but NeMo's Gemma3Model has a sliding window")
    windowed = list(c.windowed)
    # NeMo's class repeats a pattern of (local, global) layers. Without global layers, it must exceed the model.
    size = windowed.index(False) + 1 if False in windowed else c.layers + 1
    if windowed != [(layer + 1) % size != 0 for layer in range(c.layers)]:
        raise UnsupportedError(
            "layer_types must repeat a number of windowed layers and one full layer, as in NeMo's class"
        )
    rotary = c.rope()
    factor = fields.pop("seq_len_interpolation_factor", 1.0)
    return NemoFields(
        fields
        | {
            "rotary_base": (rotary.local_theta, rotary.theta),
            "rope_scaling_factor": factor,
            "interleaved_attn_pattern": (size - 1, 1),
            "window_size": c.window - 1,
            "softmax_scale": float(c.values["query_pre_attn_scalar"]) ** -0.5,
            "is_vision_language": False,
        }
    )


def nemotron(c: HFConfig) -> NemoFields:
    """Convert Nemotron 3 and 4."""
    return NemoFields(
        common(c, eps="norm_eps") | biases(c, "NemotronModel") | rope(c, "NemotronModel", partial=True),
    )


def phi3(c: HFConfig) -> NemoFields:
    """Convert Phi 3 and 4 without longrope."""
    require_no_bias(c, "Phi3Model")
    return NemoFields(common(c) | rope(c, "Phi3Model", partial=True) | window(c))


def starcoder2(c: HFConfig) -> NemoFields:
    """Convert StarCoder 2."""
    fields = common(c, eps="norm_epsilon") | rope(c, "Starcoder2Model") | window(c)
    return NemoFields(fields | {"add_bias_linear": bool(c.values["use_bias"])})
