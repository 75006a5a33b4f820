"""The families that NeMo 2.7.3 has a class for, with the keys and defaults of their config.json. Imports no NeMo.

Keys and defaults: transformers 4.57.6, models/*/configuration_*.py; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable

from superpod.weights.families import families_dense as dense
from superpod.weights.families import families_moe as moe
from superpod.weights.families.hf_keys import Config
from superpod.weights.families.reading import SIZES, Family, Reading

_COMMON = frozenset(
    {
        *SIZES,
        *("num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "max_position_embeddings"),
        *("rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "partial_rotary_factor"),
        *("attention_bias", "mlp_bias"),
    }
)
_WINDOWS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})


_LLAMA = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
_MISTRAL = _LLAMA | {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
_QWEN = _LLAMA | {"num_key_value_heads": 32, "max_position_embeddings": 32_768}
_QWEN |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN3 = _QWEN | {"head_dim": 128}
_QWEN3_MOE = _QWEN3 | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": None}
_QWEN3_MOE |= {"moe_intermediate_size": 768, "decoder_sparse_step": 1, "norm_topk_prob": False}
_GEMMA = _LLAMA | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256}
_GEMMA |= {"tie_word_embeddings": True, "max_position_embeddings": 8192, "num_key_value_heads": 16}
_GEMMA2 = _GEMMA | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = _GEMMA2 | {"max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
_GEMMA3 |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_DEEPSEEK = _LLAMA | {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_DEEPSEEK |= {"v_head_dim": 128}
_DEEPSEEK_V2 = _DEEPSEEK | {"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2}
_DEEPSEEK_V2 |= {"routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False}
_DEEPSEEK_V2 |= {"moe_intermediate_size": 1407}
_DEEPSEEK_V3 = _DEEPSEEK | {"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8}
_DEEPSEEK_V3 |= {"routed_scaling_factor": 2.5, "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True}
_DEEPSEEK_V3 |= {"moe_intermediate_size": 2048, "max_position_embeddings": 4096, "rope_interleave": True}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}
_GPT_OSS = _LLAMA | {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rope_theta": 150_000.0}
_GPT_OSS |= {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_scaling": _YARN, "attention_bias": True}
_GPT_OSS |= {"num_experts_per_tok": 4, "num_local_experts": 128}

_LATENT_KEYS = frozenset({*_DEEPSEEK_V2, *_DEEPSEEK_V3, "scoring_func", "moe_layer_freq", "head_dim", "qk_head_dim"})
_GEMMA3_KEYS = frozenset({*_GEMMA3, "use_bidirectional_attention", "sliding_window_pattern"})


def _family(
    model: str, config: str, architecture: str, read: Callable[[Config, Config], Reading], defaults: Config, *keys: str
) -> Family:
    known = _COMMON | frozenset(defaults) | frozenset(keys)
    return Family(model, config, f"{architecture}ForCausalLM", read, known, defaults)


FAMILIES: dict[str, Family] = {
    "llama": _family("LlamaModel", "LlamaConfig", "Llama", dense.llama, _LLAMA),
    "mistral": _family(
        "MistralModel", "MistralConfig7B", "Mistral", dense.mistral, _MISTRAL | {"sliding_window": 4096}
    ),
    "mixtral": _family(
        "MixtralModel",
        "MixtralConfig8x7B",
        "Mixtral",
        moe.mixtral,
        _MISTRAL | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2, "num_local_experts": 8},
        "sliding_window",
    ),
    "qwen2": _family("Qwen2Model", "Qwen2Config", "Qwen2", dense.qwen2, _QWEN, "layer_types"),
    "qwen3": _family("Qwen3Model", "Qwen3Config", "Qwen3", dense.qwen3, _QWEN3, "layer_types"),
    "qwen3_moe": _family(
        "Qwen3Model", "Qwen3MoEConfig", "Qwen3Moe", moe.qwen3_moe, _QWEN3_MOE, "mlp_only_layers", *_WINDOWS
    ),
    "gemma": _family("GemmaModel", "GemmaConfig", "Gemma", dense.gemma, _GEMMA),
    "gemma2": _family("Gemma2Model", "Gemma2Config", "Gemma2", dense.gemma2, _GEMMA2, "layer_types"),
    "gemma3_text": _family(
        "Gemma3Model", "Gemma3Config1B", "Gemma3", dense.gemma3, _GEMMA3, *_GEMMA3_KEYS, "layer_types"
    ),
    "nemotron": _family(
        "NemotronModel",
        "NemotronConfig",
        "Nemotron",
        dense.nemotron,
        _LLAMA
        | {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
    ),
    "phi3": _family(
        "Phi3Model",
        "Phi3Config",
        "Phi3",
        dense.phi3,
        _LLAMA | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
        "sliding_window",
    ),
    "starcoder2": _family(
        "Starcoder2Model",
        "Starcoder2Config",
        "Starcoder2",
        dense.starcoder2,
        _LLAMA
        | {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "num_key_value_heads": 2, "use_bias": True}
        | {"tie_word_embeddings": True, "max_position_embeddings": 4096},
        "sliding_window",
    ),
    "deepseek_v2": _family(
        "DeepSeekModel", "DeepSeekConfig", "DeepseekV2", moe.deepseek_v2, _DEEPSEEK_V2, *_LATENT_KEYS
    ),
    "deepseek_v3": _family(
        "DeepSeekModel", "DeepSeekConfig", "DeepseekV3", moe.deepseek_v3, _DEEPSEEK_V3, *_LATENT_KEYS
    ),
    "gpt_oss": Family(
        "GPTOSSModel",
        "GPTOSSConfig",
        "GptOssForCausalLM",
        moe.gpt_oss,
        _COMMON | frozenset({*_GPT_OSS, "layer_types", "swiglu_limit", "swiglu_alpha", "experts_per_token"}),
        _GPT_OSS,
        ("mxfp4",),
    ),
    "granite": _family(
        "LlamaModel",
        "LlamaConfig",
        "Granite",
        dense.granite,
        _LLAMA
        | dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0),
    ),
    "smollm3": _family(
        "LlamaModel",
        "LlamaConfig",
        "SmolLM3",
        dense.smollm3,
        _LLAMA
        | {"num_key_value_heads": 4, "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0}
        | {"tie_word_embeddings": True, "no_rope_layer_interval": 4},
        "no_rope_layers",
        *_WINDOWS,
    ),
    "seed_oss": _family(
        "LlamaModel",
        "LlamaConfig",
        "SeedOss",
        dense.seed_oss,
        _LLAMA
        | {"num_key_value_heads": 8, "max_position_embeddings": 524_288, "head_dim": 128, "attention_bias": True},
        "attention_out_bias",
    ),
}
"""By `model_type`."""
