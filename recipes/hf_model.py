"""A model from its Hugging Face `config.json` alone, as NeMo's class for that architecture: Llama and its kin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.planner import huggingface
from superpod.planner.files import text_of

if TYPE_CHECKING:
    import nemo_run as run

FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rope_theta": "rotary_base",
    "rms_norm_eps": "layernorm_epsilon",
    "initializer_range": "init_method_std",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
}
"""Key of a Llama's config.json -> field of NeMo's `LlamaConfig`."""

SCALING = {
    "factor": "scale_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "old_context_len",
}
"""The same of its `rope_scaling`, for NeMo's `Llama31Config`."""

FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
"""Keys that NeMo's class knows one value of."""

WITHOUT_EFFECT = {
    *("architectures", "model_type", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "vocab_size", "max_position_embeddings"),
}
"""Keys that do not change the network; its vocabulary is the tokenizer's, its length the recipe's."""


def hf_model(path: str | Path) -> run.Config:
    """NeMo's model for the `config.json` at `path`: a model function of a collection may return it.

    Raises:
        UserError: when the architecture is not Llama's, or a key says something that NeMo's class cannot.
    """
    import nemo_run as run
    from nemo.collections import llm
    from nemo.collections.llm.gpt.model.llama import Llama31Config

    path = Path(path)
    huggingface.from_config(path)  # refuses what is no configuration, or lacks a key
    config: dict[str, Any] = json.loads(text_of(path))
    _check(config, path)
    sizes = {field: config[key] for key, field in FIELDS.items() if config.get(key) is not None}
    sizes.setdefault("num_query_groups", config["num_attention_heads"])
    sizes.setdefault("rotary_base", 10_000)  # transformers' default
    scaling = config.get("rope_scaling")
    if scaling:
        sizes |= {field: scaling[key] for key, field in SCALING.items()}
    return run.Config(llm.LlamaModel, config=run.Config(Llama31Config if scaling else llm.LlamaConfig, **sizes))


def _check(config: dict[str, Any], path: Path) -> None:
    """Refuse what NeMo's Llama would compute differently."""
    if config.get("model_type") != "llama":
        hint = "write a function that returns NeMo's class for it, as recipes/models/*.py do"
        raise UserError(f"{path}: model_type is {config.get('model_type')!r}, and only llama is read here", hint)
    for key, value in FIXED.items():
        if config.get(key) not in (None, value):
            raise UserError(f"{path}: {key} is {config[key]!r}; NeMo's Llama has {value!r}", "subclass LlamaConfig")
    known = {*FIELDS, *FIXED, *WITHOUT_EFFECT, "rope_scaling"}
    if unknown := [key for key in config if key not in known]:
        hint = "delete it where it changes nothing; else subclass LlamaConfig"
        raise UserError(f"{path}: {unknown[0]} is no key of a Llama", hint)
    scaling = config.get("rope_scaling")
    if scaling and (scaling.get("rope_type") != "llama3" or set(SCALING) - set(scaling)):
        hint = f"NeMo's Llama scales by rope_type llama3, with {', '.join(SCALING)}"
        raise UserError(f"{path}: rope_scaling is {scaling!r}", hint)
