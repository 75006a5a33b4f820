"""How `HFConfig` becomes fields of NeMo's configurations: what all families share. Imports no NeMo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from superpod.planner.formats.hf_config import HFConfig, Rope


class RefusedError(ValueError):
    """NeMo's class computes something else; the message names the key."""


@dataclass
class NemoFields:
    """Fields of NeMo's configuration for a file."""

    fields: dict[str, Any]
    config: str | None = None
    """Another configuration class than the family's."""
    doubts: list[str] = field(default_factory=list)


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
"""Names of transformers -> ours; `nemo_config` has the functions."""


def common(c: HFConfig, eps: str = "rms_norm_eps", act: str = "hidden_act") -> dict[str, Any]:
    """The fields that every class has."""
    groups = c.kv_heads or c.heads
    if c.heads % groups:
        raise RefusedError(f"num_attention_heads {c.heads} is no multiple of num_key_value_heads {groups}")
    if not c.head_dim and c.hidden % c.heads:
        raise RefusedError(f"hidden_size {c.hidden} is no multiple of num_attention_heads {c.heads}")
    channels = c.head_dim or c.hidden // c.heads
    if channels % 2:
        raise RefusedError(f"a head has {channels} channels, and rotation takes pairs")
    return {
        "num_layers": c.layers,
        "hidden_size": c.hidden,
        "ffn_hidden_size": c.ffn,
        "num_attention_heads": c.heads,
        "num_query_groups": groups,
        "kv_channels": channels,
        "layernorm_epsilon": float(c.values[eps]),
        "vocab_size": c.vocab,
        "seq_length": c.values["max_position_embeddings"],
        "init_method_std": c.values.get("initializer_range", 0.02),
        "share_embeddings_and_output_weights": c.tied,
        "activation_func": activation(c, act),
    }


def activation(c: HFConfig, key: str) -> str:
    """Our name of the activation.

    Raises:
        RefusedError: NeMo has no such function.
    """
    name = c.values[key]
    if name not in ACTIVATIONS:
        raise RefusedError(f"{key} is {name!r}; NeMo's classes take {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def biases(c: HFConfig, model: str) -> dict[str, Any]:
    """Megatron has biases in all linear layers or in none (`add_bias_linear`)."""
    if c.proj_bias != c.mlp_bias:
        raise RefusedError(
            f"attention_bias is {c.proj_bias} and mlp_bias {c.mlp_bias}; NeMo's {model} has biases in all linear "
            "layers or in none"
        )
    return {"add_bias_linear": c.mlp_bias}


def no_bias(c: HFConfig, model: str, *keys: str) -> None:
    """Refuse biases that the class has no place for."""
    for key in keys or ("attention_bias", "mlp_bias"):
        if c.values.get(key):
            raise RefusedError(f"{key} is {c.values[key]!r}; NeMo's {model} has no such biases, and they would be lost")


def rope(c: HFConfig, model: str, *, llama3: bool = False, partial: bool = False) -> dict[str, Any]:
    """Fields of the rotary embedding; `llama3`: of Llama31Config.

    Raises:
        RefusedError: a kind that the class does not compute.
    """
    rotary = c.rope()
    if rotary.share != 1.0 and not partial:
        raise RefusedError(f"partial_rotary_factor is {rotary.share}; NeMo's {model} rotates whole heads")
    if rotary.is_interleaved:
        raise RefusedError(f"rope_interleaved is set; NeMo's {model} rotates halves of a head")
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
        raise RefusedError(f"rope_scaling is of type {rotary.kind!r}; NeMo's {model} computes {kinds}")
    return fields


def yarn_scales(rotary: Rope) -> tuple[float, float, float | None]:
    """(mscale, mscale_all_dim, attention_factor) of yarn: the attention factor is mscale's over mscale_all_dim's."""
    mscale, all_dim = rotary.scaling.get("mscale"), rotary.scaling.get("mscale_all_dim")
    factor = rotary.scaling.get("attention_factor")
    if mscale and all_dim:
        return float(mscale), float(all_dim), factor
    return 1.0, 0.0, factor


def window(c: HFConfig) -> dict[str, Any]:
    """Fields of a sliding window.

    transformers' query i sees the keys j > i - width, Megatron's (w, 0) those with j >= i - w.

    Raises:
        RefusedError: `layer_types` is of another length, or names another kind of layer.
    """
    _check_layer_kinds(c)
    if not any(c.windowed):
        return {"window_size": None}
    fields: dict[str, Any] = {"window_size": [c.window - 1, 0]}
    if not all(c.windowed):
        fields["window_attn_skip_freq"] = [int(on) for on in c.windowed]
    return fields


def _check_layer_kinds(c: HFConfig) -> None:
    if c.layer_kinds is None:
        return
    if len(c.layer_kinds) != c.layers:
        raise RefusedError(f"layer_types has {len(c.layer_kinds)} entries for {c.layers} layers")
    others = set(c.layer_kinds) - {"sliding_attention", "full_attention"}
    if others:
        raise RefusedError(f"layer_types names {', '.join(sorted(others))}")
