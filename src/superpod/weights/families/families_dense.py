"""Readers of the families without experts: config.json -> fields of NeMo's class.

A reader takes the configuration with transformers' defaults filled in, and as it is; it raises `Refused` where the
class computes something else. Source: transformers 4.57.6, models/*/modeling_*.py; NeMo 2.7.3, llm/gpt/model.
"""

from __future__ import annotations

from typing import Any

from superpod.weights.families.hf_keys import Config, Refused
from superpod.weights.families.reading import Reading, biases, common, layer_types, no_bias, rope, stated, window


def llama(c: Config, raw: Config) -> Reading:
    """Llama and what is named so: Yi, SmolLM, Falcon 3, distilled DeepSeek-R1."""
    rotary = rope(c, "LlamaModel", llama3=True)
    config = "Llama31Config" if "scale_factor" in rotary else ""
    return Reading(common(c, raw) | biases(c, "LlamaModel") | rotary, config)


def granite(c: Config, raw: Config) -> Reading:
    """Granite whose factors are one: a Llama with a scale of the softmax."""
    for key in ("embedding_multiplier", "logits_scaling", "residual_multiplier"):
        if c[key] != 1.0:
            raise Refused(f"{key} is {c[key]}; NeMo's LlamaModel has no such factor")
    reading = llama(c, raw)
    reading.fields["softmax_scale"] = float(c["attention_multiplier"])
    return reading


def smollm3(c: Config, raw: Config) -> Reading:
    """SmolLM3: a Llama with layers that do not rotate."""
    if c.get("use_sliding_window") or "sliding_attention" in (c.get("layer_types") or []):
        raise Refused("use_sliding_window is set; NeMo's LlamaModel has no windows")
    reading = llama(c, raw)
    every, count = c["no_rope_layer_interval"], c["num_hidden_layers"]
    rotated = c.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(count)]
    if len(rotated) != count:
        raise Refused(f"no_rope_layers has {len(rotated)} entries for {count} layers")
    if not all(rotated):
        reading.fields["no_rope_freq"] = [int(not on) for on in rotated]
    return reading


def seed_oss(c: Config, raw: Config) -> Reading:
    """Seed-OSS: a Llama with biases of q, k and v."""
    no_bias(c, "LlamaModel", "attention_out_bias", "mlp_bias")
    reading = llama({**c, "attention_bias": False}, raw)
    reading.fields["add_qkv_bias"] = bool(c["attention_bias"])
    return reading


def mistral(c: Config, raw: Config) -> Reading:
    """Mistral, windowed or not."""
    width = stated(c, raw, "sliding_window")
    fields = common(c, raw) | rope(c, "MistralModel") | window(width, [True] * c["num_hidden_layers"])
    # Transformer Engine 2.9 has windows over context-parallel ranks by all-to-all only; NeMo's importer sets the same.
    fields["cp_comm_type"] = "a2a" if fields["window_size"] else None
    return Reading(fields)


def qwen2(c: Config, raw: Config) -> Reading:
    """Qwen 2 and 2.5."""
    fields = common(c, raw) | rope(c, "Qwen2Model") | _optional_windows(c, raw)
    return Reading(fields | {"add_qkv_bias": True})


def _optional_windows(c: Config, raw: Config) -> dict[str, Any]:
    width = stated(c, raw, "sliding_window") if c["use_sliding_window"] else None
    on = layer_types(c, lambda layer: width is not None and layer >= c["max_window_layers"])
    return window(width, on)


def qwen3(c: Config, raw: Config) -> Reading:
    """Qwen 3 without experts."""
    no_bias(c, "Qwen3Model", "attention_bias")
    fields = common(c, raw) | rope(c, "Qwen3Model") | _optional_windows(c, raw)
    return Reading(fields | {"qk_layernorm": True, "add_qkv_bias": False})


def gemma(c: Config, raw: Config) -> Reading:
    """Gemma 1."""
    no_bias(c, "GemmaModel", "attention_bias")
    return Reading(common(c, raw) | rope(c, "GemmaModel"))


def gemma2(c: Config, raw: Config) -> Reading:
    """Gemma 2; its windows are mended on loading (`mended`)."""
    no_bias(c, "Gemma2Model", "attention_bias")
    fields = common(c, raw, act="hidden_activation") | rope(c, "Gemma2Model")
    on = layer_types(c, lambda layer: layer % 2 == 0)
    fields |= window(c["sliding_window"], on)
    # Always said, because without the list NeMo's class has places of its own.
    fields["window_attn_skip_freq"] = [int(windowed) for windowed in on] if fields["window_size"] else None
    fields["query_pre_attn_scalar"] = c["query_pre_attn_scalar"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields[key] = stated(c, raw, key)
    return Reading(fields)


def gemma3(c: Config, raw: Config) -> Reading:
    """Gemma 3's language model alone."""
    no_bias(c, "Gemma3Model", "attention_bias")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if c.get(key):
            raise Refused(f"{key} is {c[key]!r}; NeMo's Gemma3Model has none")
    fields = common(c, raw, act="hidden_activation") | rope(c, "Gemma3Model")
    if not fields["share_embeddings_and_output_weights"]:
        raise Refused("tie_word_embeddings is false; NeMo's Gemma3Model ties them")
    every = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 6
    on = layer_types(c, lambda layer: (layer + 1) % every != 0)
    # NeMo's class repeats (local, global) layers; where no layer is global, so many local ones that none is reached.
    size = on.index(False) + 1 if False in on else len(on) + 1
    if on != [(layer + 1) % size != 0 for layer in range(len(on))]:
        raise Refused("layer_types is no repetition of some windowed layers and one full one, which NeMo's class needs")
    factor = fields.pop("seq_len_interpolation_factor", 1.0)
    return Reading(
        fields
        | {
            "rotary_base": (c["rope_local_base_freq"], c["rope_theta"]),
            "rope_scaling_factor": factor,
            "interleaved_attn_pattern": (size - 1, 1),
            "window_size": window(c["sliding_window"], [True])["window_size"][0],
            "softmax_scale": float(c["query_pre_attn_scalar"]) ** -0.5,
            "is_vision_language": False,
        }
    )


def nemotron(c: Config, raw: Config) -> Reading:
    """Nemotron 3 and 4."""
    fields = common(c, raw, eps="norm_eps") | biases(c, "NemotronModel") | rope(c, "NemotronModel", partial=True)
    return Reading(fields)


def phi3(c: Config, raw: Config) -> Reading:
    """Phi 3 and 4 without longrope."""
    no_bias(c, "Phi3Model")
    fields = common(c, raw) | rope(c, "Phi3Model", partial=True)
    return Reading(fields | window(c.get("sliding_window"), [True] * c["num_hidden_layers"]))


def starcoder2(c: Config, raw: Config) -> Reading:
    """StarCoder 2."""
    fields = common(c, raw, eps="norm_epsilon") | rope(c, "Starcoder2Model")
    fields |= window(c.get("sliding_window"), [True] * c["num_hidden_layers"])
    return Reading(fields | {"add_bias_linear": bool(c["use_bias"])})
