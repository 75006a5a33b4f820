"""Check the values of all keys in a Hugging Face config.json that the planner or a weight import reads.

Without these checks, Python would treat the string "false" as true, and -1 as a valid size. Absent or null keys are not
checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from superpod.errors import UserError


@dataclass(frozen=True)
class IntegerRange:
    """An integer in a range that includes both ends."""

    minimum: int
    maximum: int

    def accepts(self, value: object) -> bool:
        """Return whether `value` is an integer in the range."""
        return isinstance(value, int) and not isinstance(value, bool) and self.minimum <= value <= self.maximum

    @property
    def words(self) -> str:
        """The valid values, as a phrase for messages."""
        return f"an integer from {self.minimum:,} to {self.maximum:,}"


@dataclass(frozen=True)
class NumberRange:
    """A finite number from 0 to `maximum`; 0 itself is valid only with `or_zero`."""

    maximum: float
    or_zero: bool = False

    def accepts(self, value: object) -> bool:
        """Return whether `value` is a finite number in the range."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return (value >= 0 if self.or_zero else value > 0) and value <= self.maximum  # False for NaN

    @property
    def words(self) -> str:
        """The valid values, as a phrase for messages."""
        return f"a number {'from 0' if self.or_zero else 'greater than 0, up'} to {self.maximum:g}"


@dataclass(frozen=True)
class JsonType:
    """A value of one JSON type."""

    type: type
    words: str

    def accepts(self, value: object) -> bool:
        """Return whether `value` is of this JSON type."""
        return isinstance(value, self.type)


@dataclass(frozen=True)
class ListOf:
    """A list whose entries are all valid values of `entry`."""

    entry: IntegerRange | NumberRange | JsonType
    words: str

    def accepts(self, value: object) -> bool:
        """Return whether `value` is a list whose entries are all valid."""
        return isinstance(value, list) and all(map(self.entry.accepts, value))


Allowed = IntegerRange | NumberRange | JsonType | ListOf

LAYERS, SIZE, SIZE_OR_ZERO = IntegerRange(1, 10_000), IntegerRange(1, 10_000_000), IntegerRange(0, 10_000_000)
TOKENS = IntegerRange(1, 2**31 - 1)
SHARE, POSITIVE, NOT_NEGATIVE = NumberRange(1), NumberRange(1e18), NumberRange(1e18, or_zero=True)
FLAG, TEXT, OBJECT = JsonType(bool, "true or false"), JsonType(str, "a string"), JsonType(dict, "an object")

KEYS: dict[str, Allowed] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), LAYERS),
    **dict.fromkeys(
        (
            *("hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads"),
            *("head_dim", "attention_head_dim", "kv_channels", "intermediate_size", "intermediate_size_mlp", "n_inner"),
            *("ffn_hidden_size", "vocab_size", "padded_vocab_size", "multi_query_group_num", "moe_intermediate_size"),
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("index_n_heads", "index_head_dim", "index_topk", "mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
            *("n_groups", "conv_kernel", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
            *("linear_value_head_dim", "linear_conv_kernel_dim", "full_attention_interval", "sliding_window_pattern"),
            *("_sliding_window_pattern", "interleave_moe_layer_step", "decoder_sparse_step", "no_rope_layer_interval"),
            *("n_group", "topk_group", "num_ln_in_parallel_attn"),
        ),
        SIZE,
    ),
    **dict.fromkeys(
        (
            *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
            *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
            *("moe_latent_size", "first_k_dense_replace", "max_window_layers"),
        ),
        SIZE_OR_ZERO,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window", "attention_chunk_size"), TOKENS),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), SHARE),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), SHARE),
    **dict.fromkeys(
        (
            *("rope_theta", "rope_local_base_freq", "rotary_emb_base", "query_pre_attn_scalar"),
            "routed_scaling_factor",
            *("attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit", "swiglu_alpha", "logits_scaling"),
            *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logit_scale"),
        ),
        POSITIVE,
    ),
    "initializer_range": NOT_NEGATIVE,
    **dict.fromkeys(
        (
            *("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_qkv_bias"),
            *("use_bias", "bias", "add_qkv_bias", "add_bias_linear", "lm_head_bias", "qk_layernorm", "use_qk_norm"),
            *("use_sliding_window", "norm_topk_prob", "rope_interleave", "rope_interleaved", "use_parallel_residual"),
            *("multi_query", "multi_query_attention", "new_decoder_architecture", "parallel_attn"),
        ),
        FLAG,
    ),
    **dict.fromkeys(
        (
            *("model_type", "hidden_act", "hidden_activation", "activation_function", "topk_method", "scoring_func"),
            "hybrid_override_pattern",
        ),
        TEXT,
    ),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "text_config", "quantization_config"), OBJECT),
    **dict.fromkeys(("layer_types", "architectures"), ListOf(TEXT, "a list of strings")),
    "mlp_only_layers": ListOf(IntegerRange(0, 10_000), "a list of layers, counted from 0"),
    "no_rope_layers": ListOf(IntegerRange(0, 1), "a list with a 0 or 1 per layer"),
}
"""Key of config.json -> valid values, in addition to null."""

ROPE: dict[str, Allowed] = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), POSITIVE),
    **dict.fromkeys(("attention_factor", "rope_theta", "short_mscale", "long_mscale"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NOT_NEGATIVE),
    **dict.fromkeys(("short_factor", "long_factor"), ListOf(POSITIVE, "a list of positive numbers")),
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "partial_rotary_factor": SHARE,
    "original_max_position_embeddings": TOKENS,
    "truncate": FLAG,
}
"""Key in `rope_scaling` or `rope_parameters` -> valid values (transformers 4.57, modeling_rope_utils.py)."""

REQUIRED_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
"""Type of RoPE scaling -> keys that transformers requires."""


def check(config: Mapping[str, Any], where: str) -> None:
    """Check the values of all keys in `KEYS` and `ROPE`; unknown keys and null are accepted.

    Args:
        config: the JSON object in a config.json; its `text_config` is checked as well.
        where: name of the file, for messages.

    Raises:
        UserError: a value is invalid; the message has the key, its value and the valid values.
    """
    for problem in _problems(config):
        raise UserError(f"{where}: {problem}", "correct the file; transformers' `save_pretrained` writes valid files")


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each invalid value, including those in `text_config` and of RoPE."""
    yield from _invalid_values(config, KEYS)
    if isinstance(text := config.get("text_config"), dict):
        yield from (f"text_config: {problem}" for problem in _problems({**text, "text_config": None}))
    yield from _rope_problems(config.get("rope_scaling"), "rope_scaling", config)
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    yield from _rope_problems(rope, "rope_parameters", config)
    for name in sorted(rope.keys() - ROPE.keys()):  # transformers 5: one object for each kind of layer
        yield from _rope_problems(rope[name], f"rope_parameters.{name}", config)


def _invalid_values(values: Mapping[str, Any], table: Mapping[str, Allowed], prefix: str = "") -> Iterator[str]:
    for key in sorted(table.keys() & values.keys()):
        value = values[key]
        if value is not None and not table[key].accepts(value):
            text = repr(value)
            shown_value = text if len(text) <= 60 else f"{text[:60]}..."
            yield f"{prefix}{key} is {shown_value}, not {table[key].words}"


def _rope_problems(rope: object, name: str, config: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(rope, dict):
        return
    yield from _invalid_values(rope, ROPE, f"{name}.")
    kind = rope.get("rope_type", rope.get("type"))
    for key in REQUIRED_ROPE_KEYS.get(kind, ()) if isinstance(kind, str) else ():
        if rope.get(key) is None and not (key == "original_max_position_embeddings" and config.get(key)):
            yield f"{name}.{key} is missing, which RoPE scaling of type {kind!r} requires"
