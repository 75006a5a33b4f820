"""Converts the parts of config.json that all families share to fields of NeMo's configurations, without NeMo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from superpod.planner.formats.hf_config import HFConfig, Rope


class UnsupportedError(ValueError):
    """NeMo's class does not compute the same function; the message names the key of config.json."""


@dataclass
class NemoFields:
    """Field values of NeMo's configuration class for a config.json."""

    fields: dict[str, Any]
    config: str | None = None
    """The configuration class if it is not the default of the family."""
    doubts: list[str] = field(default_factory=list)
    """Known differences between transformers and the model's original implementation."""


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Activation in transformers -> name of its function in `nemo_config.get_activation`."""


def convert_common(config: HFConfig, eps: str = "rms_norm_eps", act: str = "hidden_act") -> dict[str, Any]:
    """Return the fields of all NeMo classes; `eps` and `act` are keys of config.json. Raises UnsupportedError."""
    groups = config.kv_heads or config.heads
    if config.heads % groups:
        raise UnsupportedError(f"num_attention_heads {config.heads} is not a multiple of num_key_value_heads {groups}")
    if not config.head_dim and config.hidden % config.heads:
        raise UnsupportedError(f"hidden_size {config.hidden} is not a multiple of num_attention_heads {config.heads}")
    channels = config.head_dim or config.hidden // config.heads
    if channels % 2:
        raise UnsupportedError(f"a head has {channels} channels, but RoPE requires an even number")
    return {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.ffn,
        "num_attention_heads": config.heads,
        "num_query_groups": groups,
        "kv_channels": channels,
        "layernorm_epsilon": float(config.values[eps]),
        "vocab_size": config.vocab,
        "seq_length": config.values["max_position_embeddings"],
        "init_method_std": config.values.get("initializer_range", 0.02),
        "share_embeddings_and_output_weights": config.tied,
        "activation_func": convert_activation(config, act),
    }


def convert_activation(config: HFConfig, key: str) -> str:
    """Return the activation at `key` as a value of `ACTIVATIONS`. Raises UnsupportedError if NeMo does not have it."""
    name = config.values[key]
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"{key} is {name!r}, but NeMo's classes support only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def convert_biases(config: HFConfig, model: str) -> dict[str, Any]:
    """Return the field `add_bias_linear`. Raises UnsupportedError if only some linear layers have biases."""
    if config.proj_bias != config.mlp_bias:
        raise UnsupportedError(
            f"attention_bias is {config.proj_bias} and mlp_bias is {config.mlp_bias}, but NeMo's {model} has biases in "
            "all linear layers or in none"
        )
    return {"add_bias_linear": config.mlp_bias}


def require_no_bias(config: HFConfig, model: str, *keys: str) -> None:
    """Raise UnsupportedError if one of `keys` (default: all biases) is set, because NeMo's `model` has no biases."""
    for key in keys or ("attention_bias", "mlp_bias"):
        if config.values.get(key):
            raise UnsupportedError(
                f"{key} is {config.values[key]!r}, but NeMo's {model} does not support these "
                "biases, which would be lost"
            )


def convert_rope(config: HFConfig, model: str, *, llama3: bool = False, partial: bool = False) -> dict[str, Any]:
    """Return the fields of the rotary embedding.

    Args:
        config: the configuration.
        model: NeMo's class, for messages.
        llama3: whether the class supports Llama 3.1's scaling (Llama31Config).
        partial: whether the class supports partial rotation.

    Raises:
        UnsupportedError: the class does not support this kind of rotary embedding.
    """
    rotary = config.rope()
    if rotary.share != 1.0 and not partial:
        raise UnsupportedError(f"partial_rotary_factor is {rotary.share}, but NeMo's {model} rotates complete heads")
    if rotary.is_interleaved:
        raise UnsupportedError(f"rope_interleaved is set, but NeMo's {model} rotates the halves of a head")
    fields: dict[str, Any] = {"rotary_base": rotary.theta}
    if partial:
        fields["rotary_percent"] = rotary.share
    scaling = rotary.scaling
    if rotary.kind == "linear":
        return fields | {"seq_len_interpolation_factor": float(scaling["factor"])}
    if rotary.kind == "llama3" and llama3:
        return fields | {
            "scale_factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "old_context_len": scaling["original_max_position_embeddings"],
        }
    if rotary.kind != "default":
        kinds = "linear and llama3" if llama3 else "linear"
        raise UnsupportedError(f"rope_scaling has type {rotary.kind!r}, but NeMo's {model} supports only {kinds}")
    return fields


def get_yarn_scales(rotary: Rope) -> tuple[float, float, float | None]:
    """Return (mscale, mscale_all_dim, attention_factor) of YaRN; (1, 0, ...) unless both scales are set."""
    mscale, all_dim = rotary.scaling.get("mscale"), rotary.scaling.get("mscale_all_dim")
    factor = rotary.scaling.get("attention_factor")
    if mscale and all_dim:
        return float(mscale), float(all_dim), factor
    return 1.0, 0.0, factor


def convert_window(config: HFConfig) -> dict[str, Any]:
    """Return the fields of a sliding window.

    In transformers, query i attends to keys j > i - width; in Megatron with (w, 0), to keys j >= i - w.

    Raises:
        UnsupportedError: `layer_types` has the wrong length, or contains an unsupported kind of layer.
    """
    _check_layer_types(config)
    if not any(config.windowed):
        return {"window_size": None}
    fields: dict[str, Any] = {"window_size": [config.window - 1, 0]}
    if not all(config.windowed):
        fields["window_attn_skip_freq"] = [int(on) for on in config.windowed]
    return fields


def convert_decoder(
    config: HFConfig, model: str, *, eps: str = "rms_norm_eps", act: str = "hidden_act", partial: bool = False
) -> dict[str, Any]:
    """Return the common fields and those of rotary embedding and sliding window; see the functions above."""
    return convert_common(config, eps, act) | convert_rope(config, model, partial=partial) | convert_window(config)


def _check_layer_types(config: HFConfig) -> None:
    if config.layer_kinds is None:
        return
    if len(config.layer_kinds) != config.layers:
        raise UnsupportedError(
            f"layer_types must have {config.layers} entries, one per layer, but has {len(config.layer_kinds)}"
        )
    other_kinds = set(config.layer_kinds) - {"sliding_attention", "full_attention"}
    if other_kinds:
        raise UnsupportedError(f"layer_types contains {', '.join(sorted(other_kinds))}, which is not supported")
