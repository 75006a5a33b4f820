"""Converts the config.json of families without experts to fields of NeMo's classes.

Each function raises `UnsupportedError` if NeMo's class does not compute the same function. Sources: transformers
4.57.6, models/*/modeling_*.py; NeMo 2.7.3, llm/gpt/model.
"""

from __future__ import annotations

from superpod.planner.formats.hf_config import HFConfig
from superpod.weights.families.nemo_fields import (
    NemoFields,
    UnsupportedError,
    convert_biases,
    convert_common,
    convert_decoder,
    convert_rope,
    convert_window,
    require_no_bias,
)


def convert_llama(config: HFConfig) -> NemoFields:
    """Convert Llama and models of its architecture: Yi, SmolLM, Falcon 3, distilled DeepSeek-R1."""
    rotary = convert_rope(config, "LlamaModel", llama3=True)
    config_class = "Llama31Config" if "scale_factor" in rotary else None
    return NemoFields(convert_common(config) | convert_biases(config, "LlamaModel") | rotary, config_class)


def convert_granite(config: HFConfig) -> NemoFields:
    """Convert Granite: Llama with a softmax scale. Its other scaling factors must be 1."""
    for key in ("embedding_multiplier", "logits_scaling", "residual_multiplier"):
        if config.values[key] != 1.0:
            raise UnsupportedError(f"{key} is {config.values[key]}, but NeMo's LlamaModel does not support this factor")
    nemo = convert_llama(config)
    nemo.fields["softmax_scale"] = float(config.values["attention_multiplier"])
    return nemo


def convert_smollm3(config: HFConfig) -> NemoFields:
    """Convert SmolLM3: Llama with some layers without RoPE."""
    if config.values.get("use_sliding_window") or "sliding_attention" in (config.values.get("layer_types") or []):
        raise UnsupportedError("use_sliding_window is set, but NeMo's LlamaModel does not support sliding windows")
    nemo = convert_llama(config)
    every = config.values["no_rope_layer_interval"]
    rope_layers = config.values.get("no_rope_layers") or [
        int((layer + 1) % every != 0) for layer in range(config.layers)
    ]
    if len(rope_layers) != config.layers:
        raise UnsupportedError(
            f"no_rope_layers must have {config.layers} entries, one per layer, but has {len(rope_layers)}"
        )
    if not all(rope_layers):
        nemo.fields["no_rope_freq"] = [int(not on) for on in rope_layers]
    return nemo


def convert_seed_oss(config: HFConfig) -> NemoFields:
    """Convert Seed-OSS: Llama with biases of Q, K and V."""
    require_no_bias(config, "LlamaModel", "attention_out_bias", "mlp_bias")
    nemo = convert_llama(config)
    nemo.fields["add_qkv_bias"] = config.qkv_bias
    return nemo


def convert_mistral(config: HFConfig) -> NemoFields:
    """Convert Mistral with or without a sliding window."""
    fields = convert_decoder(config, "MistralModel")
    # Transformer Engine 2.9 supports windows only with all-to-all context parallelism, as does NeMo's importer.
    fields["cp_comm_type"] = "a2a" if fields["window_size"] else None
    return NemoFields(fields)


def convert_qwen2(config: HFConfig) -> NemoFields:
    """Convert Qwen 2 and 2.5."""
    return NemoFields(convert_decoder(config, "Qwen2Model") | {"add_qkv_bias": True})


def convert_qwen3(config: HFConfig) -> NemoFields:
    """Convert dense Qwen 3."""
    require_no_bias(config, "Qwen3Model", "attention_bias")
    fields = convert_decoder(config, "Qwen3Model")
    return NemoFields(fields | {"qk_layernorm": True, "add_qkv_bias": False})


def convert_gemma(config: HFConfig) -> NemoFields:
    """Convert Gemma 1."""
    require_no_bias(config, "GemmaModel", "attention_bias")
    return NemoFields(convert_common(config) | convert_rope(config, "GemmaModel"))


def convert_gemma2(config: HFConfig) -> NemoFields:
    """Convert Gemma 2. `nemo_fixes` corrects its sliding windows when a model is loaded."""
    require_no_bias(config, "Gemma2Model", "attention_bias")
    fields = convert_decoder(config, "Gemma2Model", act="hidden_activation")
    # Always set, because NeMo's class has its own default for the windowed layers.
    fields["window_attn_skip_freq"] = [int(on) for on in config.windowed] if fields["window_size"] else None
    for key in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        fields[key] = config.values[key]
    return NemoFields(fields)


def convert_gemma3(config: HFConfig) -> NemoFields:
    """Convert Gemma 3's language model."""
    require_no_bias(config, "Gemma3Model", "attention_bias")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.values.get(key):
            raise UnsupportedError(f"{key} is {config.values[key]!r}, but NeMo's Gemma3Model does not support it")
    fields = convert_common(config, act="hidden_activation") | convert_rope(config, "Gemma3Model")
    if not config.tied:
        raise UnsupportedError("tie_word_embeddings is false, but NeMo's Gemma3Model ties the embeddings")
    if not convert_window(config)["window_size"] and not config.window:
        raise UnsupportedError("sliding_window is null, but NeMo's Gemma3Model has a sliding window")
    windowed = list(config.windowed)
    # NeMo's class repeats a pattern of (local, global) layers. Without global layers, it must exceed the model.
    size = windowed.index(False) + 1 if False in windowed else config.layers + 1
    if windowed != [(layer + 1) % size != 0 for layer in range(config.layers)]:
        raise UnsupportedError("layer_types must repeat N windowed layers and one full layer, as in NeMo's class")
    rotary = config.rope()
    factor = fields.pop("seq_len_interpolation_factor", 1.0)
    return NemoFields(
        fields
        | {
            "rotary_base": (rotary.local_theta, rotary.theta),
            "rope_scaling_factor": factor,
            "interleaved_attn_pattern": (size - 1, 1),
            "window_size": config.window - 1,
            "softmax_scale": float(config.values["query_pre_attn_scalar"]) ** -0.5,
            "is_vision_language": False,
        }
    )


def convert_nemotron(config: HFConfig) -> NemoFields:
    """Convert Nemotron 3 and 4."""
    return NemoFields(
        convert_common(config, eps="norm_eps")
        | convert_biases(config, "NemotronModel")
        | convert_rope(config, "NemotronModel", partial=True),
    )


def convert_phi3(config: HFConfig) -> NemoFields:
    """Convert Phi 3 and 4 without longrope."""
    require_no_bias(config, "Phi3Model")
    return NemoFields(convert_decoder(config, "Phi3Model", partial=True))


def convert_starcoder2(config: HFConfig) -> NemoFields:
    """Convert StarCoder 2."""
    fields = convert_decoder(config, "Starcoder2Model", eps="norm_epsilon")
    return NemoFields(fields | {"add_bias_linear": bool(config.values["use_bias"])})
