"""The families that NeMo 2.7.3 has a class for. Imports no NeMo."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from superpod.planner.formats import hf_families
from superpod.planner.formats.hf_config import HFConfig
from superpod.weights.families import families_dense as dense
from superpod.weights.families import families_moe as moe
from superpod.weights.families.nemo_fields import NemoFields


@dataclass(frozen=True)
class Family:
    """A `model_type` of transformers and the NeMo class that computes it."""

    model: str
    config: str
    architecture: str
    """The one class of transformers that is meant."""
    convert: Callable[[HFConfig], NemoFields]
    keys: frozenset[str]
    """Keys of config.json that `convert` takes into account."""
    quantizations: tuple[str, ...] = ()


_COMMON = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "max_position_embeddings"),
        *("rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "partial_rotary_factor"),
        *("attention_bias", "mlp_bias", "num_nextn_predict_layers", "_sliding_window_pattern"),
    }
)
_LLAMA = ("LlamaModel", "LlamaConfig")
_QWEN3_MOE_KEYS = ("mlp_only_layers", "layer_types")
_GEMMA3_KEYS = ("use_bidirectional_attention", "sliding_window_pattern", "layer_types")
_LATENT_KEYS = frozenset(
    {
        *hf_families.FAMILIES["deepseek_v2"].keys,
        *hf_families.FAMILIES["deepseek_v3"].keys,
        *("scoring_func", "moe_layer_freq", "qk_head_dim"),
    }
)
_GPT_OSS_KEYS = ("layer_types", "swiglu_limit", "swiglu_alpha", "experts_per_token")
_SMOLLM3_KEYS = ("no_rope_layers", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

_TABLE: dict[str, tuple[str, str, str, Callable[[HFConfig], NemoFields], Iterable[str]]] = {
    "llama": (*_LLAMA, "Llama", dense.llama, ()),
    "mistral": ("MistralModel", "MistralConfig7B", "Mistral", dense.mistral, ()),
    "mixtral": ("MixtralModel", "MixtralConfig8x7B", "Mixtral", moe.mixtral, ("sliding_window",)),
    "qwen2": ("Qwen2Model", "Qwen2Config", "Qwen2", dense.qwen2, ("layer_types",)),
    "qwen3": ("Qwen3Model", "Qwen3Config", "Qwen3", dense.qwen3, ("layer_types",)),
    "qwen3_moe": ("Qwen3Model", "Qwen3MoEConfig", "Qwen3Moe", moe.qwen3_moe, _QWEN3_MOE_KEYS),
    "gemma": ("GemmaModel", "GemmaConfig", "Gemma", dense.gemma, ()),
    "gemma2": ("Gemma2Model", "Gemma2Config", "Gemma2", dense.gemma2, ("layer_types",)),
    "gemma3_text": ("Gemma3Model", "Gemma3Config1B", "Gemma3", dense.gemma3, _GEMMA3_KEYS),
    "nemotron": ("NemotronModel", "NemotronConfig", "Nemotron", dense.nemotron, ()),
    "phi3": ("Phi3Model", "Phi3Config", "Phi3", dense.phi3, ("sliding_window",)),
    "starcoder2": ("Starcoder2Model", "Starcoder2Config", "Starcoder2", dense.starcoder2, ("sliding_window",)),
    "deepseek_v2": ("DeepSeekModel", "DeepSeekConfig", "DeepseekV2", moe.deepseek_v2, _LATENT_KEYS),
    "deepseek_v3": ("DeepSeekModel", "DeepSeekConfig", "DeepseekV3", moe.deepseek_v3, _LATENT_KEYS),
    "gpt_oss": ("GPTOSSModel", "GPTOSSConfig", "GptOss", moe.gpt_oss, _GPT_OSS_KEYS),
    "granite": (*_LLAMA, "Granite", dense.granite, ()),
    "smollm3": (*_LLAMA, "SmolLM3", dense.smollm3, _SMOLLM3_KEYS),
    "seed_oss": (*_LLAMA, "SeedOss", dense.seed_oss, ()),
}


def _family(kind: str) -> Family:
    model, config, architecture, convert, keys = _TABLE[kind]
    known = _COMMON | hf_families.FAMILIES[kind].keys | frozenset(keys)
    packed = ("mxfp4",) if kind == "gpt_oss" else ()
    return Family(model, config, f"{architecture}ForCausalLM", convert, known, packed)


FAMILIES: dict[str, Family] = {kind: _family(kind) for kind in _TABLE}
"""By `model_type`."""
