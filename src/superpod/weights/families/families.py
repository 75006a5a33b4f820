"""Table of the model families for which NeMo 2.7.3 has a class. Does not import NeMo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from superpod.planner.formats import hf_families
from superpod.planner.formats.hf_config import HFConfig
from superpod.weights.families import families_dense as dense
from superpod.weights.families import families_moe as moe
from superpod.weights.families.nemo_fields import NemoFields


@dataclass(frozen=True)
class Family:
    """NeMo's model class and configuration class for a `model_type` of transformers."""

    model: str
    config: str
    architecture: str
    """The only supported class of transformers."""
    convert: Callable[[HFConfig], NemoFields]
    more_keys: tuple[str, ...] = ()
    """Keys without a default that `convert` supports, in addition to common ones."""
    quantizations: tuple[str, ...] = ()


_COMMON = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "max_position_embeddings"),
        *("rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "partial_rotary_factor"),
        *("attention_bias", "mlp_bias", "num_nextn_predict_layers", "_sliding_window_pattern"),
    }
)
_WINDOW, _LAYERS = ("sliding_window",), ("layer_types",)
_LATENT = ("scoring_func", "moe_layer_freq", "qk_head_dim")
_V2 = (*_LATENT, *sorted(hf_families.FAMILIES["deepseek_v3"].keys))
_V3 = (*_LATENT, *sorted(hf_families.FAMILIES["deepseek_v2"].keys))
_GEMMA3 = (*_LAYERS, "use_bidirectional_attention", "sliding_window_pattern")
_SMOLLM3 = (*_WINDOW, *_LAYERS, "use_sliding_window", "max_window_layers", "no_rope_layers")
_GPT_OSS = (*_LAYERS, "swiglu_limit", "swiglu_alpha", "experts_per_token")

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaModel", "LlamaConfig", "LlamaForCausalLM", dense.convert_llama),
    "mistral": Family("MistralModel", "MistralConfig7B", "MistralForCausalLM", dense.convert_mistral),
    "mixtral": Family("MixtralModel", "MixtralConfig8x7B", "MixtralForCausalLM", moe.convert_mixtral, _WINDOW),
    "qwen2": Family("Qwen2Model", "Qwen2Config", "Qwen2ForCausalLM", dense.convert_qwen2, _LAYERS),
    "qwen3": Family("Qwen3Model", "Qwen3Config", "Qwen3ForCausalLM", dense.convert_qwen3, _LAYERS),
    "qwen3_moe": Family(
        "Qwen3Model", "Qwen3MoEConfig", "Qwen3MoeForCausalLM", moe.convert_qwen3_moe, (*_LAYERS, "mlp_only_layers")
    ),
    "gemma": Family("GemmaModel", "GemmaConfig", "GemmaForCausalLM", dense.convert_gemma),
    "gemma2": Family("Gemma2Model", "Gemma2Config", "Gemma2ForCausalLM", dense.convert_gemma2, _LAYERS),
    "gemma3_text": Family("Gemma3Model", "Gemma3Config1B", "Gemma3ForCausalLM", dense.convert_gemma3, _GEMMA3),
    "nemotron": Family("NemotronModel", "NemotronConfig", "NemotronForCausalLM", dense.convert_nemotron),
    "phi3": Family("Phi3Model", "Phi3Config", "Phi3ForCausalLM", dense.convert_phi3, _WINDOW),
    "starcoder2": Family(
        "Starcoder2Model", "Starcoder2Config", "Starcoder2ForCausalLM", dense.convert_starcoder2, _WINDOW
    ),
    "deepseek_v2": Family("DeepSeekModel", "DeepSeekConfig", "DeepseekV2ForCausalLM", moe.convert_deepseek_v2, _V2),
    "deepseek_v3": Family("DeepSeekModel", "DeepSeekConfig", "DeepseekV3ForCausalLM", moe.convert_deepseek_v3, _V3),
    "gpt_oss": Family("GPTOSSModel", "GPTOSSConfig", "GptOssForCausalLM", moe.convert_gpt_oss, _GPT_OSS, ("mxfp4",)),
    "granite": Family("LlamaModel", "LlamaConfig", "GraniteForCausalLM", dense.convert_granite),
    "smollm3": Family("LlamaModel", "LlamaConfig", "SmolLM3ForCausalLM", dense.convert_smollm3, _SMOLLM3),
    "seed_oss": Family("LlamaModel", "LlamaConfig", "SeedOssForCausalLM", dense.convert_seed_oss),
}
"""`model_type` -> family."""


def known_keys(kind: str) -> frozenset[str]:
    """Return the keys of config.json that the import of model type `kind` supports."""
    return _COMMON | hf_families.FAMILIES[kind].keys | frozenset(FAMILIES[kind].more_keys) | hf_families.HARMLESS_KEYS
