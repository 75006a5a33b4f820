"""A model's shape from a Hugging Face `config.json`. Needs neither transformers nor the network.

The keys are those of transformers' configuration classes (4.57; `glm_moe_dsa` and `qwen3_5` of 5.x). Families give an
absent key different meanings, so every function below has its own defaults. Multi-token prediction is off, as in the
table of models: `replace(mtp_layers=1)` turns it on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner.files import text_of
from superpod.planner.models import ModelShape

Config = dict[str, Any]


def from_config(path: str | Path, *, vocab_divisible_by: int = 128) -> ModelShape:
    """The model that a `config.json`, or the folder it lies in, describes.

    Args:
        path: the file, or a folder with it.
        vocab_divisible_by: Megatron's padding of the vocabulary (make_vocab_size_divisible_by); 1 = no padding.

    Raises:
        UserError: when the file cannot be read, its architecture is not one of `FAMILIES`, or a key is missing.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    config = _read(path)
    kind = str(config.get("model_type") or "")
    if kind not in FAMILIES:
        stated = config.get("architectures") or [kind or "no model_type"]
        names = ", ".join(map(str, stated)) if isinstance(stated, list) else str(stated)
        hint = f"known: {', '.join(FAMILIES)}; or give the shape by hand"
        raise UserError(f"{path}: the architecture {names} (model_type {kind!r}) is not known", hint)
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    try:
        shape = FAMILIES[kind](config)
    except KeyError as missing:
        raise UserError(f"{path}: {missing.args[0]} is missing", f"a {kind} configuration has it") from missing
    except (TypeError, ValueError, AttributeError) as wrong:
        raise UserError(f"{path}: a value has the wrong type for {kind}: {wrong}") from wrong
    name = str(config.get("_name_or_path") or path.parent.name or kind).rstrip("/").rpartition("/")[2]
    shape = {"vocab_divisible_by": vocab_divisible_by, "source": str(path), **shape}
    return ModelShape.from_mapping(name, shape, str(path))


def _read(path: Path) -> Config:
    try:
        config = json.loads(text_of(path))
    except (ValueError, RecursionError) as broken:
        raise UserError(f"{path} is not JSON: {broken}") from broken
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no configuration", "a config.json is one JSON object")
    return config


def _common(c: Config, *, tied: bool = False) -> Config:
    """The keys that all families share; `tied` is the meaning of an absent tie_word_embeddings."""
    for key in ("attention_bias", "mlp_bias"):
        if c.get(key) and c.get("model_type") != "gpt_oss":
            raise UserError(f"{c.get('model_type')} with {key} is not modelled", "give the shape by hand: bias = true")
    return {
        "layers": c["num_hidden_layers"],
        "hidden": c["hidden_size"],
        "ffn": c.get("intermediate_size") or 0,
        "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or 0,
        "head_dim": c.get("head_dim") or 0,
        "vocab": c["vocab_size"],
        "tied": c.get("tie_word_embeddings", tied),
    }


def _llama(c: Config) -> Config:
    return _common(c)


def _windowed(c: Config) -> Config:
    return _common(c) | {"window": c.get("sliding_window") or 0}


def _qwen2(c: Config) -> Config:
    window = c.get("sliding_window") or 0 if c.get("use_sliding_window") else 0
    return _common(c) | {"qkv_bias": True, "window": window}


def _qwen3(c: Config) -> Config:
    return _common(c) | {"head_dim": c.get("head_dim", 128), "qk_norm": True}


def _mixtral(c: Config) -> Config:
    moe = {"experts": c["num_local_experts"], "topk": c["num_experts_per_tok"], "expert_ffn": c["intermediate_size"]}
    return _windowed(c) | moe


def _qwen3_moe(c: Config) -> Config:
    dense = sorted(c.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise UserError(f"mlp_only_layers {dense} are not the first ones", "give the shape by hand: dense_first")
    moe = _experts(c, "num_experts") | {"dense_first": len(dense), "moe_every": c.get("decoder_sparse_step", 1)}
    return _common(c) | {"qk_norm": True} | moe


def _experts(c: Config, count: str) -> Config:
    return {"experts": c[count], "topk": c["num_experts_per_tok"], "expert_ffn": c["moe_intermediate_size"]}


def _qwen3_next(c: Config) -> Config:
    delta = {
        "attention_gate": True,
        "delta_every": c.get("full_attention_interval", 4),
        "delta_key_heads": c["linear_num_key_heads"],
        "delta_value_heads": c["linear_num_value_heads"],
        "delta_key_dim": c["linear_key_head_dim"],
        "delta_value_dim": c["linear_value_head_dim"],
        "conv": c.get("linear_conv_kernel_dim", 4),
        "head_dim": c.get("head_dim", 256),
    }
    if not c.get("num_experts"):
        return _qwen3(c) | delta
    return _qwen3_moe(c) | delta | {"shared_ffn": c["shared_expert_intermediate_size"], "shared_gate": True}


def _gemma(c: Config) -> Config:
    return _common(c, tied=True) | {"head_dim": c.get("head_dim", 256)}


def _gemma2(c: Config) -> Config:
    own = {"soft_capped": bool(c.get("attn_logit_softcapping", 50.0)), "refuses": "cp"}
    return _gemma(c) | own | {"post_norms": True, "window": c.get("sliding_window", 4096), "global_every": 2}


def _gemma3(c: Config) -> Config:
    every = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 6
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}  # Gemma3TextConfig's
    own = {"soft_capped": False, "refuses": "cp vp"}
    return _gemma2({**defaults, **c}) | own | {"qk_norm": True, "global_every": every}


def _deepseek(c: Config) -> Config:
    moe = _experts(c, "n_routed_experts")
    mla = {
        "q_lora": c.get("q_lora_rank") or 0,
        "kv_lora": c["kv_lora_rank"],
        "qk_nope_dim": c["qk_nope_head_dim"],
        "qk_rope_dim": c["qk_rope_head_dim"],
        "v_dim": c["v_head_dim"],
        "head_dim": 0,
        "kv_heads": 0,
        "indexer_heads": c.get("index_n_heads") or 0,
        "indexer_dim": c.get("index_head_dim") or 0,
        "indexer_topk": c.get("index_topk") or 0,
    }
    shared = (c.get("n_shared_experts") or 0) * c["moe_intermediate_size"]
    return _common(c) | moe | mla | {"shared_ffn": shared, "dense_first": c.get("first_k_dense_replace", 0)}


def _gpt_oss(c: Config) -> Config:
    moe = {"experts": c["num_local_experts"], "topk": c["num_experts_per_tok"], "expert_ffn": c["intermediate_size"]}
    return _common(c) | moe | {"bias": True, "sink": True, "window": c["sliding_window"], "global_every": 2}


def _starcoder2(c: Config) -> Config:
    style = {"norm": "layer", "gated": False, "bias": c.get("use_bias", True), "window": c.get("sliding_window") or 0}
    return _common(c, tied=True) | style


def _nemotron(c: Config) -> Config:
    return _common(c) | {"norm": "layer", "gated": False}


def _nemotron_h(c: Config) -> Config:
    mamba = {
        "mamba_heads": c["mamba_num_heads"],
        "mamba_head_dim": c["mamba_head_dim"],
        "mamba_state": c["ssm_state_size"],
        "mamba_groups": c["n_groups"],
        "conv": c.get("conv_kernel", 4),
        "head_dim": c.get("head_dim") or c.get("attention_head_dim") or 0,
    }
    shape = _common(c) | mamba | {"pattern": c["hybrid_override_pattern"], "gated": False}
    if not c.get("n_routed_experts"):
        return shape
    shared = {"shared_ffn": c["moe_shared_expert_intermediate_size"], "latent": c.get("moe_latent_size") or 0}
    return shape | _experts(c, "n_routed_experts") | shared


def _llama4(c: Config) -> Config:
    ffn = c["intermediate_size"]
    moe = {"experts": c["num_local_experts"], "topk": c["num_experts_per_tok"], "expert_ffn": ffn, "shared_ffn": ffn}
    chunks = {"window": c.get("attention_chunk_size") or 0, "chunked": True, "global_every": 4}
    return _common(c) | moe | chunks | {"ffn": c["intermediate_size_mlp"], "moe_every": c["interleave_moe_layer_step"]}


def _gpt2(c: Config) -> Config:
    return {
        "style": "gpt",
        "layers": c["n_layer"],
        "hidden": c["n_embd"],
        "heads": c["n_head"],
        "ffn": c.get("n_inner") or 4 * c["n_embd"],
        "vocab": c["vocab_size"],
        "positions": c["n_positions"],
    }


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "llama": _llama,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "mistral": _windowed,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_5_moe": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm_moe_dsa": _deepseek,
    "gpt_oss": _gpt_oss,
    "phi3": _windowed,
    "starcoder2": _starcoder2,
    "nemotron": _nemotron,
    "nemotron_h": _nemotron_h,
    "gpt2": _gpt2,
}
"""Readers of the architectures, by `model_type`."""
