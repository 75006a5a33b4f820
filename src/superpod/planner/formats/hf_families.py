"""The keys of a Hugging Face config.json for each architecture, and their defaults.

Keys and defaults are those of transformers' configuration classes (4.57.6, models/*/configuration_*.py; `glm_moe_dsa`
and `qwen3_5` from 5.x), or of the files in the model's repository on the Hub if transformers has no class.
tests/planner/formats/test_hf_config.py compares the defaults, and test_hf_families.py the parameters, with those of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class WindowKeys:
    """The keys that specify which layers of an architecture have a sliding window."""

    size: str = "sliding_window"
    switch: str = ""
    """A key that must be true for the window to apply."""
    period: int = 0
    """Every `period`-th layer attends to all tokens; 0 = no layer does."""
    period_keys: tuple[str, ...] = ()
    """Keys that set a different period."""
    first: str = ""
    """The key of the first layer with a window."""
    by_layer: bool = True
    """Whether `layer_types`, if present, specifies the layers with a window."""


@dataclass(frozen=True)
class ExpertKeys:
    """The keys that specify the mixture of experts of an architecture."""

    count: str
    ffn: str = "moe_intermediate_size"
    shared_ffn: str = ""
    """The key of the total width of all shared experts."""
    shared_count: str = ""
    """The key of the number of shared experts, if each is as wide as a routed expert."""
    dense_first: str = ""
    every: str = ""
    is_optional: bool = False
    """Whether models of this architecture can have no experts."""


@dataclass(frozen=True)
class Family:
    """The keys of one `model_type`, where they differ from those of Llama."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key -> default value."""
    default_sizes: Mapping[str, Any] = field(default_factory=dict)
    """Key -> default value, for sizes of experts and latent attention that must be set to plan the model."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Llama's key -> key of this architecture."""
    derived: Callable[[Config], Config] | None = None
    """Computes the Llama keys that do not correspond to a single key of this architecture."""
    windows: WindowKeys | None = None
    experts: ExpertKeys | None = None
    has_latent_attention: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """The keys that have a default."""
        return frozenset({*self.defaults, *self.default_sizes})


def _derive_falcon(c: Config) -> Config:
    if c.get("new_decoder_architecture"):
        groups = c.get("num_kv_heads") or c["num_attention_heads"]
    else:
        groups = 1 if c.get("multi_query", True) else 0
    return {"num_key_value_heads": groups, "intermediate_size": c.get("ffn_hidden_size") or 4 * c["hidden_size"]}


def _derive_gpt_bigcode(c: Config) -> Config:
    return _derive_gpt2(c) | {"num_key_value_heads": 1 if c.get("multi_query", True) else 0}


def _derive_gpt2(c: Config) -> Config:
    return {"intermediate_size": c.get("n_inner") or 4 * c["n_embd"]}


def _derive_chatglm(c: Config) -> Config:
    groups = c["multi_query_group_num"] if c.get("multi_query_attention") else 0
    return {"num_key_value_heads": groups, "vocab_size": c.get("padded_vocab_size") or c["vocab_size"]}


def _derive_ernie(c: Config) -> Config:
    has_bias = c.get("use_bias", False)
    return {"attention_bias": has_bias, "mlp_bias": has_bias}


def _derive_internlm3(c: Config) -> Config:
    """Return `qkv_bias`, and `bias` for all other layers (internlm/internlm3-8b-instruct on the Hub)."""
    has_bias = c.get("bias", False)
    return {"attention_bias": has_bias, "mlp_bias": has_bias, "qkv_bias": c.get("qkv_bias", False)}


SLIDING = WindowKeys(by_layer=False)
"""All layers have the window."""
BY_LAYER = WindowKeys()
SWITCHED = WindowKeys(switch="use_sliding_window")
FROM_LAYER = replace(SWITCHED, first="max_window_layers")

PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
LOCAL = ExpertKeys("num_local_experts", ffn="intermediate_size")
ROUTED = ExpertKeys("n_routed_experts", shared_count="n_shared_experts", dense_first="first_k_dense_replace")
QWEN_EXPERTS = ExpertKeys("num_experts", every="decoder_sparse_step")
SHARED_QWEN = replace(QWEN_EXPERTS, shared_ffn="shared_expert_intermediate_size")

_LLAMA: Config = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
_TIED: Config = {"tie_word_embeddings": True}
_MISTRAL = _LLAMA | {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
_MIXTRAL = _MISTRAL | {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
_QWEN = _LLAMA | {"num_key_value_heads": 32, "max_position_embeddings": 32_768}
_QWEN |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN3 = _QWEN | {"head_dim": 128}
_QWEN3_MOE = _QWEN | {"num_key_value_heads": 4, "head_dim": None, "decoder_sparse_step": 1, "norm_topk_prob": False}
_QWEN3_NEXT: Config = {"head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
_GEMMA = _LLAMA | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256}
_GEMMA |= {"tie_word_embeddings": True, "max_position_embeddings": 8192, "num_key_value_heads": 16}
_GEMMA2 = _GEMMA | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = _GEMMA2 | {"max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
_GEMMA3 |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_GEMMA3 |= {"vocab_size": 262_208, "num_attention_heads": 8}
_DEEPSEEK_V2 = _LLAMA | {"first_k_dense_replace": 0, "q_lora_rank": None}
_DEEPSEEK_V2 |= {"routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False}
_DEEPSEEK_V3 = _LLAMA | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "q_lora_rank": None}
_DEEPSEEK_V3 |= {
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096,
    "rope_interleave": True,
}
_LATENT: Config = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_LATENT |= {"v_head_dim": 128}
_YARN: Config = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}
_GPT_OSS = _LLAMA | {"num_key_value_heads": 8, "head_dim": 64, "rope_theta": 150_000.0, "rope_scaling": _YARN}
_GPT_OSS |= {"sliding_window": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "attention_bias": True}
_MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")

_PLAIN = Family()
_DEEPSEEK = Family({"first_k_dense_replace": 0, "q_lora_rank": None}, experts=ROUTED, has_latent_attention=True)
_QWEN35 = Family(_QWEN3_NEXT | {"decoder_sparse_step": 1}, experts=replace(SHARED_QWEN, is_optional=True))
_GEMMA3_WINDOWS = WindowKeys(period=6, period_keys=PATTERN)
_HEAD_128: Config = {"head_dim": 128}
_EVERY_FOURTH = WindowKeys(period=4)
_LLAMA4 = Family(
    derived=lambda c: {"intermediate_size": c["intermediate_size_mlp"]},
    windows=WindowKeys("attention_chunk_size", period=4, by_layer=False),
    experts=ExpertKeys(
        "num_local_experts",
        ffn="intermediate_size",
        shared_ffn="intermediate_size",
        every="interleave_moe_layer_step",
    ),
)
_GRANITE_MOE = Family({"shared_intermediate_size": 0}, experts=replace(LOCAL, shared_ffn="shared_intermediate_size"))
_GPT_NAMES = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
_CHATGLM_NAMES = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "head_dim": "kv_channels",
    "qkv_bias": "add_qkv_bias",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mistral": Family(_MISTRAL | {"sliding_window": 4096}, windows=SLIDING),
    "mixtral": Family(_MIXTRAL, {"num_experts_per_tok": 2, "num_local_experts": 8}, windows=SLIDING, experts=LOCAL),
    "qwen2": Family(_QWEN, windows=FROM_LAYER),
    "qwen2_moe": Family({"qkv_bias": True, "decoder_sparse_step": 1}, experts=SHARED_QWEN),
    "qwen3": Family(_QWEN3, windows=FROM_LAYER),
    "qwen3_moe": Family(
        _QWEN3_MOE,
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        windows=replace(SWITCHED, by_layer=False),
        experts=QWEN_EXPERTS,
    ),
    "qwen3_next": _QWEN35,
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "qwen3_5_moe_text": _QWEN35,
    "gemma": Family(_GEMMA),
    "gemma2": Family(_GEMMA2, windows=WindowKeys(period=2)),
    "gemma3": Family(_GEMMA3, windows=_GEMMA3_WINDOWS),
    "gemma3_text": Family(_GEMMA3, windows=_GEMMA3_WINDOWS),
    "deepseek_v2": Family(
        _DEEPSEEK_V2,
        _LATENT | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
        experts=ROUTED,
        has_latent_attention=True,
    ),
    "deepseek_v3": Family(
        _DEEPSEEK_V3,
        _LATENT
        | {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8},
        experts=ROUTED,
        has_latent_attention=True,
    ),
    "kimi_k2": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "gpt_oss": Family(
        _GPT_OSS,
        {"num_experts_per_tok": 4, "num_local_experts": 128},
        windows=WindowKeys(period=2),
        experts=LOCAL,
    ),
    "phi3": Family(
        _LLAMA | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 1.0}, windows=SLIDING
    ),
    "starcoder2": Family(
        _LLAMA
        | {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "num_key_value_heads": 2, "use_bias": True}
        | {"tie_word_embeddings": True, "max_position_embeddings": 4096},
        windows=SLIDING,
    ),
    "nemotron": Family(
        _LLAMA
        | {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096}
    ),
    "nemotron_h": Family(
        {"conv_kernel": 4},
        derived=lambda c: {"head_dim": c.get("head_dim") or c.get("attention_head_dim") or 0},
        experts=ExpertKeys("n_routed_experts", shared_ffn="moe_shared_expert_intermediate_size", is_optional=True),
    ),
    "gpt2": Family(_TIED, names=_GPT_NAMES, derived=_derive_gpt2),
    "gpt_bigcode": Family(_TIED, names=_GPT_NAMES, derived=_derive_gpt_bigcode),
    "olmo": _PLAIN,
    "olmo2": _PLAIN,
    "olmo3": Family({"sliding_window": 4096}, windows=_EVERY_FOURTH),
    "olmoe": Family(experts=ExpertKeys("num_experts", ffn="intermediate_size")),
    "granite": Family(_LLAMA | dict.fromkeys(_MULTIPLIERS, 1.0)),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "cohere": Family(_TIED),
    "cohere2": Family(_TIED, windows=WindowKeys(period=4, period_keys=PATTERN)),
    "stablelm": Family({"use_qkv_bias": False}, names={"qkv_bias": "use_qkv_bias"}),
    "phi": _PLAIN,
    "phimoe": Family(windows=SLIDING, experts=LOCAL),
    "gpt_neox": Family(derived=lambda _: {"attention_bias": False, "num_key_value_heads": 0, "head_dim": 0}),
    "falcon": Family(_TIED, derived=_derive_falcon),
    "glm": Family({**_HEAD_128, "attention_bias": True}),
    "glm4": Family({**_HEAD_128, "attention_bias": True}),
    "glm4_moe": Family({**_HEAD_128, "first_k_dense_replace": 1, "n_shared_experts": 1}, experts=ROUTED),
    "dots1": Family({"first_k_dense_replace": 0}, experts=ROUTED),
    "ernie4_5": Family(_HEAD_128 | _TIED, derived=_derive_ernie),
    "exaone4": Family(windows=_EVERY_FOURTH),
    "smollm3": Family(
        _LLAMA
        | {"num_key_value_heads": 4, "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0}
        | {"tie_word_embeddings": True, "no_rope_layer_interval": 4},
        windows=SWITCHED,
    ),
    "seed_oss": Family(
        _LLAMA
        | {"num_key_value_heads": 8, "max_position_embeddings": 524_288, "head_dim": 128, "attention_bias": True}
        | {"attention_out_bias": False}
    ),
    "helium": Family(_HEAD_128),
    "arcee": _PLAIN,
    "hunyuan_v1_dense": _PLAIN,
    "ministral": Family(windows=BY_LAYER),
    # internlm/internlm2-7b on the Hub: `bias` applies to attention; MLPs have none.
    "internlm2": Family(derived=lambda c: {"attention_bias": c.get("bias", False)}),
    "internlm3": Family(derived=_derive_internlm3),
    "baichuan": _PLAIN,
    "chatglm": Family(names=_CHATGLM_NAMES, derived=_derive_chatglm),
}
"""`model_type` -> its keys."""

HARMLESS_KEYS = frozenset(
    {
        *("architectures", "model_type", "_name_or_path", "name_or_path", "transformers_version", "torch_dtype"),
        *("dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "initializer_range"),
        *("attention_dropout", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "auto_map"),
        *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "cache_implementation"),
        *("unsloth_version", "unsloth_fixed", "model_name", "finetuning_task", "task_specific_params", "use_bfloat16"),
        *("quantization_config", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout", "sep_token_id"),
        *("aux_loss_alpha", "seq_aux", "ep_size", "initial_context_length", "prefix", "chunk_size_feed_forward"),
        *("diversity_penalty", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "num_beam_groups", "num_return_sequences", "output_scores"),
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "return_dict_in_generate"),
        *("suppress_tokens", "tf_legacy_loss", "tie_encoder_decoder", "typical_p", "is_decoder", "add_cross_attention"),
        *("is_encoder_decoder", "cross_attention_hidden_size", "output_past", "num_labels", "classifier_dropout"),
        *("scale_attention_softmax_in_fp32", "attention_softmax_in_fp32", "bad_words_ids", "begin_suppress_tokens"),
        *("rope_parameters", "original_max_position_embeddings", "tokenizer_class", "mup", "vocab_file", "dtypes"),
        *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty"),
        *("decoder_start_token_id", "torchscript", "pruned_heads"),
    }
)
"""Keys that do not change what a trained next-token model computes, or that are checked elsewhere."""
