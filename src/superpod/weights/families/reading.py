"""What readers of a config.json share: how its keys become fields of NeMo's class. Imports no NeMo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from superpod.weights.families.hf_keys import Config, Refused


@dataclass
class Reading:
    """What a reader makes of a configuration."""

    fields: dict[str, Any]
    config: str = ""
    """Another configuration class than the family's."""
    model: str = ""
    """Another model class than the family's."""
    doubts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Family:
    """A `model_type` of transformers and the NeMo class that computes it."""

    model: str
    config: str
    architecture: str
    """The one class of transformers that is meant."""
    read: Callable[[Config, Config], Reading]
    keys: frozenset[str]
    defaults: Config
    quantizations: tuple[str, ...] = ()


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

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def common(c: Config, raw: Config, eps: str = "rms_norm_eps", act: str = "hidden_act") -> dict[str, Any]:
    """The fields that every class has."""
    heads = c["num_attention_heads"]
    groups = stated(c, raw, "num_key_value_heads") or heads
    if heads % groups:
        raise Refused(f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
    head_dim = stated(c, raw, "head_dim")
    if not head_dim and c["hidden_size"] % heads:
        raise Refused(f"hidden_size {c['hidden_size']} is no multiple of num_attention_heads {heads}")
    if (channels := head_dim or c["hidden_size"] // heads) % 2:
        raise Refused(f"a head has {channels} channels, and rotation takes pairs")
    return {
        "num_layers": c["num_hidden_layers"],
        "hidden_size": c["hidden_size"],
        "ffn_hidden_size": c["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": channels,
        "layernorm_epsilon": float(c[eps]),
        "vocab_size": c["vocab_size"],
        "seq_length": c["max_position_embeddings"],
        "init_method_std": c.get("initializer_range", 0.02),
        "share_embeddings_and_output_weights": bool(c["tie_word_embeddings"]),
        "activation_func": activation(c, act),
    }


def stated(c: Config, raw: Config, key: str) -> Any:
    """The value, where null is not the default that an absent key has."""
    return None if key in raw and raw[key] is None else c.get(key)


def activation(c: Config, key: str) -> str:
    """Our name of the activation.

    Raises:
        Refused: NeMo has no such function.
    """
    if c[key] not in ACTIVATIONS:
        raise Refused(f"{key} is {c[key]!r}; NeMo's classes take {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[c[key]]


def biases(c: Config, own: str) -> dict[str, Any]:
    """Megatron has biases in all linear layers or in none (`add_bias_linear`)."""
    attention, mlp = bool(c.get("attention_bias")), bool(c.get("mlp_bias"))
    if attention != mlp:
        raise Refused(
            f"attention_bias is {attention} and mlp_bias {mlp}; NeMo's {own} has biases in all linear layers or in none"
        )
    return {"add_bias_linear": attention}


def no_bias(c: Config, own: str, *keys: str) -> None:
    """Refuse biases that the class has no place for."""
    for key in keys or ("attention_bias", "mlp_bias"):
        if c.get(key):
            raise Refused(f"{key} is {c[key]!r}; NeMo's {own} has no such biases, and they would be lost")


def rope(c: Config, own: str, *, llama3: bool = False, partial: bool = False) -> dict[str, Any]:
    """Fields of the rotary embedding; `llama3`: of Llama31Config.

    Raises:
        Refused: a kind that the class does not compute.
    """
    share = c.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not partial:
        raise Refused(f"partial_rotary_factor is {share}; NeMo's {own} rotates whole heads")
    if c.get("rope_interleaved") or (c.get("rope_interleave") and c["model_type"] != "deepseek_v3"):
        raise Refused(f"rope_interleaved is set; NeMo's {own} rotates halves of a head")
    fields: dict[str, Any] = {"rotary_base": c["rope_theta"]}
    fields |= {"rotary_percent": share} if partial else {}
    kind, scaling = rope_kind(c)
    if kind == "linear":
        return fields | {"seq_len_interpolation_factor": float(scaling["factor"])}
    if kind == "llama3" and llama3:
        return fields | {
            "scale_factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "old_context_len": scaling["original_max_position_embeddings"],
        }
    if kind != "default":
        kinds = "linear and llama3" if llama3 else "linear"
        raise Refused(f"rope_scaling is of type {kind!r}; NeMo's {own} computes {kinds}")
    return fields


def rope_kind(c: Config) -> tuple[str, Config]:
    """The type of `rope_scaling`, and the object itself."""
    scaling = c.get("rope_scaling")
    if scaling is None:
        return "default", {}
    return str(scaling.get("rope_type", scaling.get("type")) or "default"), scaling


def window(width: int | None, layers: Sequence[bool]) -> dict[str, Any]:
    """Fields of a sliding window in the layers marked.

    transformers' query i sees the keys j > i - width, Megatron's (w, 0) those with j >= i - w.
    """
    if width is None or not any(layers):
        return {"window_size": None}
    skips = {} if all(layers) else {"window_attn_skip_freq": [int(on) for on in layers]}
    return {"window_size": [width - 1, 0], **skips}


def layer_types(c: Config, default: Callable[[int], bool]) -> list[bool]:
    """Whether each layer's attention has the window.

    Raises:
        Refused: a list of another length, or another kind of layer.
    """
    count, types = c["num_hidden_layers"], c.get("layer_types")
    if types is None:
        return [default(layer) for layer in range(count)]
    if len(types) != count:
        raise Refused(f"layer_types has {len(types)} entries for {count} layers")
    if others := set(types) - {"sliding_attention", "full_attention"}:
        raise Refused(f"layer_types names {', '.join(sorted(map(str, others)))}")
    return [kind == "sliding_attention" for kind in types]
