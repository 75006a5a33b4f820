"""Parse a Hugging Face config.json to `HFConfig`, a description of the decoder.

`hf_shape.py` converts it to a shape for planning, and `weights/families` to the configuration of a NeMo class. Needs
neither transformers nor the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from superpod.errors import UserError
from superpod.planner.formats import hf_values
from superpod.planner.formats.hf_families import FAMILIES, Config, ExpertKeys, Family, WindowKeys

NULL_MEANS_NONE = frozenset(
    {
        *("num_key_value_heads", "head_dim", "q_lora_rank", "sliding_window", "rope_scaling"),
        *("attn_logit_softcapping", "final_logit_softcapping"),
    }
)
"""Keys for which null means that the model does not have the feature; for all other keys, null means absent."""

LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Keys of latent attention."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings."""

    theta: float
    local_theta: float | None
    """`theta` of layers with a sliding window, if different."""
    share: float
    """Fraction of a head's channels that are rotated."""
    is_interleaved: bool
    kind: str
    """Type of the RoPE scaling; `default` = none."""
    scaling: Config


class InconsistentConfigError(ValueError):
    """Two keys of a config.json are inconsistent; the message names both."""


@dataclass(frozen=True)
class HFConfig:
    """A decoder as described by its config.json. 0 means "none" unless documented otherwise.

    Sizes have the same names as in `ModelShape`.
    """

    model_type: str
    layers: int
    hidden: int
    ffn: int
    """Width of the dense MLP."""
    heads: int
    kv_heads: int
    """0 = same as heads."""
    head_dim: int
    """0 = hidden / heads."""
    vocab: int
    tied: bool
    qkv_bias: bool
    proj_bias: bool
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool
    window: int
    """Size of the sliding window in tokens."""
    windowed: tuple[bool, ...]
    """Whether each layer has the window."""
    window_period: int
    """Every `window_period`-th layer has no window, according to the architecture's rule; 0 = no such rule."""
    layer_kinds: tuple[str, ...] | None
    """The kind of each layer; None if the file does not list them or the architecture ignores the list."""
    experts: int
    topk: int
    expert_ffn: int
    shared_ffn: int
    """Total width of all shared experts."""
    dense_first: int
    """Number of layers with a dense MLP before the first MoE layer."""
    moe_every: int
    """Every `moe_every`-th layer is an MoE layer."""
    kv_lora: int
    """0 = no latent attention."""
    q_lora: int
    """0 = queries are projected from the hidden state directly."""
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int
    values: Config
    """All keys, with the architecture's defaults for absent ones; used for keys that only one architecture has."""
    stated: Config
    """The keys in the file."""
    left_out: str = ""
    """The parts of a multimodal model that are not included, such as `vision and audio`."""

    def rope(self) -> Rope:
        """Return the rotary position embeddings, from the keys of transformers 4 or 5.

        Raises:
            InconsistentConfigError: the keys of transformers 4 and 5 differ (see `to_transformers4_keys`).
        """
        values = _with_defaults(to_transformers4_keys(self.stated), FAMILIES[self.model_type].defaults)
        scaling = values.get("rope_scaling") or {}
        return Rope(
            theta=values["rope_theta"],
            local_theta=values.get("rope_local_base_freq"),
            share=values.get("partial_rotary_factor", 1.0),
            is_interleaved=bool(values.get("rope_interleaved") or values.get("rope_interleave")),
            kind=str(scaling.get("rope_type", scaling.get("type")) or "default"),
            scaling=scaling,
        )


def decoder_keys(config: Mapping[str, Any], where: str) -> Config:
    """Return the keys of the decoder; in a multimodal model, those of `text_config` override the outer keys.

    Args:
        config: the JSON object in the file.
        where: name of the file, for messages.

    Raises:
        UserError: a key has an invalid value.
    """
    hf_values.check(config, where)
    text = config.get("text_config")
    if not isinstance(text, dict):
        return dict(config)
    outer, inner = str(config.get("model_type") or ""), str(text.get("model_type") or "")
    kind = outer if outer in FAMILIES or not inner else inner
    return {**config, **text, "model_type": kind}


def parse_config(keys: Config, where: str, *, default_sizes: bool = False) -> HFConfig:
    """Parse the decoder in a config.json; an unknown architecture is parsed as a Llama.

    Args:
        keys: result of `decoder_keys`.
        where: name of the file, for messages.
        default_sizes: use transformers' defaults for absent sizes of experts and latent attention.

    Raises:
        UserError: a key that the architecture requires is missing.
    """
    kind = str(keys.get("model_type") or "")
    family = FAMILIES.get(kind, FAMILIES["llama"])
    defaults = {**family.defaults, **family.default_sizes} if default_sizes else family.defaults
    try:
        decoder = _parse_decoder(_with_defaults(keys, defaults), keys, family)
    except KeyError as missing:
        raise missing_key(missing, kind, where) from missing
    return replace(decoder, model_type=kind, left_out=_omitted_modalities(keys))


def missing_key(error: KeyError, kind: str, where: str) -> UserError:
    """Convert the KeyError for a required key to a UserError; `kind` is the model_type, `where` the file."""
    return UserError(
        f"{where}: {error.args[0]} is missing", f"use a complete {kind} configuration, as written by transformers"
    )


def _omitted_modalities(keys: Config) -> str:
    """Return the encoders of a multimodal model that are not parsed, such as `vision and audio`; "" if none."""
    if not isinstance(keys.get("text_config"), dict):
        return ""
    other_parts = [key for key in ("vision_config", "audio_config", "speech_config") if keys.get(key)]
    return " and ".join(key.removesuffix("_config") for key in other_parts)


def _with_defaults(config: Config, defaults: Mapping[str, Any]) -> Config:
    """Return `config` with the defaults of absent keys; see `NULL_MEANS_NONE` for null."""
    given_keys = {key: value for key, value in config.items() if value is not None or key in NULL_MEANS_NONE}
    return {**defaults, **given_keys}


def _parse_decoder(values: Config, config: Config, family: Family) -> HFConfig:
    """Parse the decoder from `values`, the keys of the file with defaults, and `config`, those without.

    Raises:
        KeyError: a required key is missing.
    """
    llama = dict(values)
    for name, theirs in family.names.items():
        if theirs in values:
            llama[name] = values[theirs]
    if family.derived:
        llama |= family.derived(values)

    def size(key: str) -> int:
        if key not in llama:
            raise KeyError(family.names.get(key, key))
        return llama[key]

    bias = bool(llama.get("attention_bias"))
    layers = size("num_hidden_layers")
    layer_types = llama.get("layer_types")
    kinds = tuple(layer_types) if layer_types is not None and family.windows and family.windows.by_layer else None
    window, windowed, period = _parse_windows(llama, family.windows, kinds, layers)
    latent = values if family.has_latent_attention else dict.fromkeys(LATENT, 0)
    return HFConfig(
        model_type="",
        layers=layers,
        hidden=size("hidden_size"),
        ffn=llama.get("intermediate_size") or 0,
        heads=size("num_attention_heads"),
        kv_heads=llama.get("num_key_value_heads") or 0,
        head_dim=llama.get("head_dim") or 0,
        vocab=size("vocab_size"),
        tied=llama.get("tie_word_embeddings", False),
        qkv_bias=llama.get("qkv_bias", bias),
        proj_bias=llama.get("attention_out_bias", bias),
        mlp_bias=llama.get("mlp_bias") or False,
        window=window,
        windowed=windowed,
        window_period=period,
        layer_kinds=kinds,
        **_parse_experts(values, family.experts),
        kv_lora=latent["kv_lora_rank"],
        q_lora=latent["q_lora_rank"] or 0,
        qk_nope_dim=latent["qk_nope_head_dim"],
        qk_rope_dim=latent["qk_rope_head_dim"],
        v_dim=latent["v_head_dim"],
        values=llama,
        stated=config,
    )


def _parse_windows(
    c: Config, keys: WindowKeys | None, kinds: tuple[str, ...] | None, layers: int
) -> tuple[int, tuple[bool, ...], int]:
    """Return (window size in tokens, whether each layer has a window, period of the layers without one; 0 = none)."""
    no_windows = (False,) * layers
    if keys is None or (keys.switch and not c.get(keys.switch)):
        return 0, no_windows, 0
    window = c.get(keys.size) or 0
    period = next((c[key] for key in keys.period_keys if c.get(key)), keys.period)
    if not window:
        return 0, no_windows, period
    if kinds is not None:
        return window, tuple("sliding" in kind for kind in kinds), period
    if keys.first:
        return window, tuple(layer >= c[keys.first] for layer in range(layers)), period
    if period:
        return window, tuple((layer + 1) % period != 0 for layer in range(layers)), period
    return window, (True,) * layers, period


def _parse_experts(c: Config, keys: ExpertKeys | None) -> dict[str, Any]:
    """Return the fields of `HFConfig` for experts; without experts, the sizes are 0."""
    if keys is None or (keys.is_optional and not c.get(keys.count)):
        return {"experts": 0, "topk": 0, "expert_ffn": 0, "shared_ffn": 0, "dense_first": 0, "moe_every": 1}
    expert_ffn, shared_ffn = c[keys.ffn], 0
    if keys.shared_count:
        shared_ffn = expert_ffn * (c.get(keys.shared_count) or 0)
    elif keys.shared_ffn:
        shared_ffn = c[keys.shared_ffn]
    dense_layers = sorted(c.get("mlp_only_layers") or [])
    if dense_layers != list(range(len(dense_layers))):
        raise UserError(
            f"mlp_only_layers {dense_layers}: only the first layers can be dense",
            "specify the model as a shape with dense_first=N",
        )
    return {
        "experts": c[keys.count],
        "topk": c["num_experts_per_tok"],
        "expert_ffn": expert_ffn,
        "shared_ffn": shared_ffn,
        "dense_first": c[keys.dense_first] if keys.dense_first else len(dense_layers),
        "moe_every": c[keys.every] if keys.every else 1,
    }


def to_transformers4_keys(config: Config) -> Config:
    """Convert `rope_parameters` of transformers 5 to the keys of transformers 4.

    Raises:
        InconsistentConfigError: old and new keys differ (transformers 4 reads the old ones, 5 some of the new ones), or
            layers with a window have a separate scaling, for which there is no old key.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return config
    parts = {key: value for key, value in rope.items() if isinstance(value, dict)}
    full_attention = dict(parts.get("full_attention", {}) if parts else rope)
    local = parts.get("sliding_attention", {})
    local_kind = local.get("rope_type", "default")
    if local_kind != "default":
        raise InconsistentConfigError(
            f"rope_parameters sets type {local_kind!r} for layers with a sliding window; NeMo's classes support RoPE "
            "scaling only for full attention"
        )
    moved_keys = ("rope_theta", "partial_rotary_factor")
    rope_fields = {key: full_attention.pop(key) for key in moved_keys if key in full_attention}
    if "rope_theta" in local:
        rope_fields["rope_local_base_freq"] = local["rope_theta"]
    rope_fields["rope_scaling"] = None if full_attention.get("rope_type", "default") == "default" else full_attention
    for key, value in rope_fields.items():
        if config.get(key) is not None and _normalize_scaling(config[key]) != _normalize_scaling(value):
            raise InconsistentConfigError(
                f"{key} is {config[key]!r}, but {value!r} in rope_parameters; keep one of the two"
            )
    return {**config, **rope_fields}


def _normalize_scaling(value: Any) -> Any:
    """Convert a RoPE scaling to transformers 5's keys, or None if it scales nothing; return other values unchanged."""
    if not isinstance(value, dict):
        return value
    kind = value.get("rope_type", value.get("type"))
    if kind in (None, "default"):
        return None
    moved_keys = ("type", "rope_theta", "partial_rotary_factor")
    return {**{key: entry for key, entry in value.items() if key not in moved_keys}, "rope_type": kind}
