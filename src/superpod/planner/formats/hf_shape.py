"""Convert a Hugging Face `config.json` to a model shape. Needs neither transformers nor the network.

`hf_config.py` reads the file; this module adds what is not in the file, the blocks of each architecture. An unknown
architecture is planned as a Llama, with a note, if all its keys are keys of Llama; otherwise it is refused, with the
command to specify the shape manually. Multi-token prediction is disabled, as in the table of models:
`replace(mtp_layers=1)` enables it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner.formats.config_files import read_json
from superpod.planner.formats.hf_config import HFConfig, decoder_keys, missing_key, parse_config
from superpod.planner.formats.hf_families import FAMILIES, HARMLESS_KEYS, Config
from superpod.planner.models.shape import ModelShape

CONFIG = "a Hugging Face config.json, or the folder that contains it"
SHAPE_HINT = "specify the model as a shape: recipes plan {shape} --gpu h100 --nodes 1"

SHAPE_KEYS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
}
"""Size key of a Llama -> field of a manually specified shape."""
REQUIRED_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")

LLAMA_KEYS = HARMLESS_KEYS | {
    *SHAPE_KEYS,
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "hidden_act", "hidden_activation", "activation_function"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta", "rope_scaling", "rope_type"),
    *("partial_rotary_factor", "max_position_embeddings", "hidden_dropout", "embedding_multiplier", "logits_scaling"),
    *("residual_multiplier", "attention_multiplier", "logit_scale", "unk_token_id", "cls_token_id", "mask_token_id"),
    *("use_flash_attention", "model_max_length", "summary_type"),
}
"""Keys that define the shape of a Llama or do not affect it. An unknown architecture with only these can be planned."""

NORMS_BY_HEAD = "its query and key norms differ per head, so a few parameters per layer are not counted"
HEAD_BIAS = "the bias of its output layer is not counted"
LAYER_NORM = {"norm": "layer", "gated": False}
NO_OUT_BIAS = {"proj_bias": False}
POST_NORMS = {"post_norms": True}
QK_NORM = {"qk_norm": True}
QK_NORM_WHOLE = {"qk_norm": True, "qk_norm_whole": True}
CHUNKED = {"chunked": True}
GEMMA3 = {**POST_NORMS, **QK_NORM, "refuses": "cp vp"}

Blocks = dict[str, Any]
"""Fields of `ModelShape`."""


def _delta_net_blocks(c: HFConfig) -> Blocks:
    """Return the fields of models with gated delta nets in most layers (Qwen3-Next, Qwen 3.5)."""
    shared_gate = {"shared_gate": True} if c.experts else {}
    return {
        **QK_NORM,
        **shared_gate,
        "attention_gate": True,
        "delta_every": c.values["full_attention_interval"],
        "delta_key_heads": c.values["linear_num_key_heads"],
        "delta_value_heads": c.values["linear_num_value_heads"],
        "delta_key_dim": c.values["linear_key_head_dim"],
        "delta_value_dim": c.values["linear_value_head_dim"],
        "conv": c.values["linear_conv_kernel_dim"],
    }


def _mla_blocks(c: HFConfig) -> Blocks:
    """Return the fields of multi-latent attention: those of the sparse indexer (DeepSeek V3.2, GLM-5), else zeros."""
    keys = {"indexer_heads": "index_n_heads", "indexer_dim": "index_head_dim", "indexer_topk": "index_topk"}
    return {field: c.values.get(key) or 0 for field, key in keys.items()}


def _nemotron_h_blocks(c: HFConfig) -> Blocks:
    return {
        "gated": False,
        "pattern": c.values["hybrid_override_pattern"],
        "mamba_heads": c.values["mamba_num_heads"],
        "mamba_head_dim": c.values["mamba_head_dim"],
        "mamba_state": c.values["ssm_state_size"],
        "mamba_groups": c.values["n_groups"],
        "conv": c.values["conv_kernel"],
        "latent": c.values.get("moe_latent_size") or 0,
    }


def _cohere_blocks(c: HFConfig) -> Blocks:
    """Return the fields of Command R: attention and MLP share one LayerNorm without bias (as large as an RMSNorm)."""
    norms = {**QK_NORM, "approximate": NORMS_BY_HEAD} if c.values.get("use_qk_norm") else {}
    return {"one_norm": True, **norms}


def _stablelm_blocks(c: HFConfig) -> Blocks:
    norms = {**QK_NORM, "approximate": NORMS_BY_HEAD} if c.values.get("qk_layernorm") else {}
    return {"norm": "layer", "one_norm": c.values.get("use_parallel_residual", False), **norms}


def _phimoe_blocks(c: HFConfig) -> Blocks:
    head = {"approximate": HEAD_BIAS} if c.values.get("lm_head_bias") else {}
    return {"norm": "layer", **head}


def _falcon_blocks(c: HFConfig) -> Blocks:
    in_parallel = c.values.get("parallel_attn", True)
    two_norms = c.values.get("new_decoder_architecture", False) and c.values.get("num_ln_in_parallel_attn") != 1
    return {**LAYER_NORM, "bias": c.values.get("bias", False), "one_norm": in_parallel and not two_norms}


BLOCKS: dict[str, Blocks | Callable[[HFConfig], Blocks]] = {
    **dict.fromkeys(("llama4", "llama4_text"), CHUNKED),
    "qwen2": {"qkv_bias": True, "proj_bias": False},
    "qwen2_moe": {"shared_gate": True},
    **dict.fromkeys(("qwen3", "qwen3_moe", "dots1", "hunyuan_v1_dense", "exaone4"), QK_NORM),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _delta_net_blocks),
    "gemma2": lambda c: {**POST_NORMS, "soft_capped": bool(c.values["attn_logit_softcapping"]), "refuses": "cp"},
    **dict.fromkeys(("gemma3", "gemma3_text"), GEMMA3),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm_moe_dsa"), _mla_blocks),
    "gpt_oss": {"bias": True, "clamped": True, "sink": True, "qkv_bias": False, "proj_bias": False},
    "starcoder2": lambda c: {**LAYER_NORM, "bias": c.values["use_bias"]},
    "nemotron": LAYER_NORM,
    "nemotron_h": _nemotron_h_blocks,
    **dict.fromkeys(("gpt2", "gpt_bigcode"), lambda c: {"style": "gpt", "positions": c.values["n_positions"]}),
    "olmo": {"approximate": "its norms have no weights, so a few parameters too many are counted per layer"},
    **dict.fromkeys(("olmo2", "olmo3", "olmoe"), QK_NORM_WHOLE),
    "cohere": _cohere_blocks,
    "cohere2": {"one_norm": True},
    "stablelm": _stablelm_blocks,
    "phi": {**LAYER_NORM, "bias": True, "one_norm": True, "approximate": HEAD_BIAS},
    "phimoe": _phimoe_blocks,
    "gpt_neox": {**LAYER_NORM, "bias": True},
    "falcon": _falcon_blocks,
    "glm": NO_OUT_BIAS,
    "glm4": {**NO_OUT_BIAS, **POST_NORMS},
    "glm4_moe": lambda c: {**NO_OUT_BIAS, "qk_norm": c.values.get("use_qk_norm", False)},
    "helium": NO_OUT_BIAS,
    "arcee": {"gated": False},
    "chatglm": lambda c: {"bias": c.values.get("add_bias_linear", False)},
}
"""Architecture -> properties that are not in its config.json and differ from Llama."""


def from_config(path: str | Path, *, vocab_divisible_by: int = 128) -> ModelShape:
    """Return the shape of the model described by a `config.json`.

    Args:
        path: the file, or the folder that contains it.
        vocab_divisible_by: Megatron's padding of the vocabulary (make_vocab_size_divisible_by); 1 = no padding.

    Raises:
        UserError: the file cannot be read, a key is missing or invalid, or the architecture is not in `FAMILIES` and
            has keys that Llama does not have.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    location = str(path)
    keys = decoder_keys(read_json(path, CONFIG), location)
    kind = str(keys.get("model_type") or "")
    notes = [] if kind in FAMILIES else [_require_llama_keys(keys, kind, path)]
    config = parse_config(keys, location)
    if config.left_out:
        notes.insert(0, f"text decoder only, without the {config.left_out} part")
    blocks = BLOCKS.get(kind, {})
    try:
        blocks = dict(blocks(config) if callable(blocks) else blocks)
    except KeyError as missing:
        raise missing_key(missing, kind, location) from missing
    window, irregular = _window_fields(config)
    notes += [note for note in (blocks.pop("approximate", None), irregular) if note]
    name = str(keys.get("_name_or_path") or path.absolute().parent.name or kind).rstrip("/").rpartition("/")[2]
    shape = {"vocab_divisible_by": vocab_divisible_by, "source": location, **_size_fields(config), **window, **blocks}
    return ModelShape.from_mapping(name, shape | {"approximate": "; ".join(notes)}, location)


def _size_fields(c: HFConfig) -> Blocks:
    """Return the sizes that `HFConfig` and `ModelShape` share; latent attention has no head_dim and kv_heads."""
    shared = {field.name for field in fields(HFConfig)} & {field.name for field in fields(ModelShape)}
    sizes = {name: getattr(c, name) for name in shared}
    return sizes | {"head_dim": 0, "kv_heads": 0} if c.kv_lora else sizes


def _window_fields(c: HFConfig) -> tuple[Blocks, str | None]:
    """Return the fields of the sliding window, and a note if its layers follow no period that `ModelShape` supports."""
    if not any(c.windowed):
        return {"window": 0}, None
    layers, windowed = len(c.windowed), sum(c.windowed)
    first_without = c.windowed.index(False) + 1 if windowed < layers else 0
    for period in (c.window_period, first_without):
        if _has_period(c.windowed, period):
            return {"window": c.window, "global_every": period}, None
    period = round(layers / (layers - windowed))
    note = (
        f"{windowed} of {layers} layers have a sliding window, in an irregular pattern; planned as all except every "
        f"{period}th layer"
    )
    return {"window": c.window, "global_every": period}, note


def _has_period(is_windowed: Sequence[bool], period: int) -> bool:
    """Return whether every layer has a window except each `period`-th; period 0 = all layers have one."""
    return all(window == (period == 0 or layer % period != 0) for layer, window in enumerate(is_windowed, start=1))


def _require_llama_keys(keys: Config, kind: str, path: Path) -> str:
    """Check that an unknown architecture can be planned as a Llama, and return a note on it.

    Raises:
        UserError: the config has a key that Llama does not have, or a required key is missing.
    """
    stated_names = keys.get("architectures") or [kind or "no model_type"]
    names = ", ".join(map(str, stated_names)) if isinstance(stated_names, list) else str(stated_names)
    known_fields = {field: keys[key] for key, field in SHAPE_KEYS.items() if keys.get(key)}
    hint = SHAPE_HINT.format(
        shape=",".join(f"{field}={value}" for field, value in known_fields.items()) or "layers=..,hidden=.."
    )
    what = f"{path}: the architecture {names} (model_type {kind!r}) is not supported"
    missing_keys = [key for key in REQUIRED_KEYS if keys.get(key) is None]
    if missing_keys:
        raise UserError(f"{what}, and {missing_keys[0]} is missing", f"{hint}; known: {', '.join(FAMILIES)}")
    unknown_keys = sorted(key for key in keys.keys() - LLAMA_KEYS if keys[key] not in (None, False))
    if unknown_keys:
        raise UserError(f"{what}, and Llama models have no key {unknown_keys[0]}, so it may change the sizes", hint)
    return f"model_type {kind!r} is unknown: planned as a Llama of these sizes, because it has only Llama keys"
