"""Families without experts: config.json -> fields of NeMo's class.

Each function raises `RefusedError` where the class computes something else. Source: transformers 4.57.6,
models/*/modeling_*.py; NeMo 2.7.3, llm/gpt/model.
"""

from __future__ import annotations

from superpod.planner.formats.hf_config import HFConfig
from superpod.weights.families.nemo_fields import NemoFields, RefusedError, biases, common, no_bias, rope, window


def llama(c: HFConfig) -> NemoFields:
    """Llama and what is named so: Yi, SmolLM, Falcon 3, distilled DeepSeek-R1."""
    rotary = rope(c, "LlamaModel", llama3=True)
    config = "Llama31Config" if "scale_factor" in rotary else None
    return NemoFields(common(c) | biases(c, "LlamaModel") | rotary, config)


def granite(c: HFConfig) -> NemoFields:
    """Granite whose factors are one: a Llama with a scale of the softmax."""
    for key in ("embedding_multiplier", "logits_scaling", "residual_multiplier"):
        if c.values[key] != 1.0:
            raise RefusedError(f"{key} is {c.values[key]}; NeMo's LlamaModel has no such factor")
    nemo = llama(c)
    nemo.fields["softmax_scale"] = float(c.values["attention_multiplier"])
    return nemo


def smollm3(c: HFConfig) -> NemoFields:
    """SmolLM3: a Llama with layers that do not rotate."""
    if c.values.get("use_sliding_window") or "sliding_attention" in (c.values.get("layer_types") or []):
        raise RefusedError("use_sliding_window is set; NeMo's LlamaModel has no windows")
    nemo = llama(c)
    every = c.values["no_rope_layer_interval"]
    rotated = c.values.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(c.layers)]
    if len(rotated) != c.layers:
        raise RefusedError(f"no_rope_layers has {len(rotated)} entries for {c.layers} layers")
    if not all(rotated):
        nemo.fields["no_rope_freq"] = [int(not on) for on in rotated]
    return nemo


def seed_oss(c: HFConfig) -> NemoFields:
    """Seed-OSS: a Llama with biases of q, k and v."""
    no_bias(c, "LlamaModel", "attention_out_bias", "mlp_bias")
    nemo = llama(c)
    nemo.fields["add_qkv_bias"] = c.qkv_bias
    return nemo


def mistral(c: HFConfig) -> NemoFields:
    """Mistral, windowed or not."""
    fields = common(c) | rope(c, "MistralModel") | window(c)
    # Transformer Engine 2.9 has windows over context-parallel ranks by all-to-all only; NeMo's importer sets the same.
    fields["cp_comm_type"] = "a2a" if fields["window_size"] else None
    return NemoFields(fields)


def qwen2(c: HFConfig) -> NemoFields:
    """Qwen 2 and 2.5."""
    return NemoFields(common(c) | rope(c, "Qwen2Model") | window(c) | {"add_qkv_bias": True})


def qwen3(c: HFConfig) -> NemoFields:
    """Qwen 3 without experts."""
    no_bias(c, "Qwen3Model", "attention_bias")
    fields = common(c) | rope(c, "Qwen3Model") | window(c)
    return NemoFields(fields | {"qk_layernorm": True, "add_qkv_bias": False})


def gemma(c: HFConfig) -> NemoFields:
    """Gemma 1."""
    no_bias(c, "GemmaModel", "attention_bias")
    return NemoFields(common(c) | rope(c, "GemmaModel"))


def gemma2(c: HFConfig) -> NemoFields:
    """Gemma 2; its windows are corrected on loading (`mended`)."""
    no_bias(c, "Gemma2Model", "attention_bias")
    fields = common(c, act="hidden_activation") | rope(c, "Gemma2Model") | window(c)
    # Always set, because without the list NeMo's class has places of its own.
    fields["window_attn_skip_freq"] = [int(on) for on in c.windowed] if fields["window_size"] else None
    for key in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        fields[key] = c.values[key]
    return NemoFields(fields)


def gemma3(c: HFConfig) -> NemoFields:
    """Gemma 3's language model alone."""
    no_bias(c, "Gemma3Model", "attention_bias")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if c.values.get(key):
            raise RefusedError(f"{key} is {c.values[key]!r}; NeMo's Gemma3Model has none")
    fields = common(c, act="hidden_activation") | rope(c, "Gemma3Model")
    if not c.tied:
        raise RefusedError("tie_word_embeddings is false; NeMo's Gemma3Model ties them")
    if not window(c)["window_size"] and not c.window:
        raise RefusedError("sliding_window is null; NeMo's Gemma3Model has a window")
    windowed = list(c.windowed)
    # NeMo's class repeats (local, global) layers; where no layer is global, so many local ones that none is reached.
    size = windowed.index(False) + 1 if False in windowed else c.layers + 1
    if windowed != [(layer + 1) % size != 0 for layer in range(c.layers)]:
        raise RefusedError("layer_types does not repeat some windowed layers and one full one, as NeMo's class does")
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
    """Nemotron 3 and 4."""
    return NemoFields(
        common(c, eps="norm_eps") | biases(c, "NemotronModel") | rope(c, "NemotronModel", partial=True),
    )


def phi3(c: HFConfig) -> NemoFields:
    """Phi 3 and 4 without longrope."""
    no_bias(c, "Phi3Model")
    return NemoFields(common(c) | rope(c, "Phi3Model", partial=True) | window(c))


def starcoder2(c: HFConfig) -> NemoFields:
    """StarCoder 2."""
    fields = common(c, eps="norm_epsilon") | rope(c, "Starcoder2Model") | window(c)
    return NemoFields(fields | {"add_bias_linear": bool(c.values["use_bias"])})
