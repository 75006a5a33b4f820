"""A model's shape from a Hugging Face `config.json`. Needs neither transformers nor the network.

`hf_families.py` reads each architecture. One that it does not know is planned as a Llama where all its keys are a
Llama's, which is said, and refused otherwise, with the command for a shape by hand. Multi-token prediction is off, as
in the table of models: `replace(mtp_layers=1)` turns it on.
"""

from __future__ import annotations

from pathlib import Path

from superpod.errors import UserError
from superpod.planner.formats import hf_values
from superpod.planner.formats.files import read_json
from superpod.planner.formats.hf_families import FAMILIES
from superpod.planner.formats.hf_keys import Config
from superpod.planner.models import ModelShape

CONFIG = "a Hugging Face config.json, or the folder it lies in"
BY_HAND = "give the shape by hand: recipes plan {shape} --gpu h100 --nodes 1"

SHAPE_KEYS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
}
"""Keys of a Llama that are sizes -> fields of a shape by hand."""
NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")

LLAMA_KEYS = {
    *SHAPE_KEYS,
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "hidden_act", "hidden_activation", "activation_function"),
    *(
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    ),
    *("rope_type", "partial_rotary_factor", "max_position_embeddings", "initializer_range", "attention_dropout"),
    *("hidden_dropout", "resid_pdrop", "embd_pdrop", "embedding_dropout", "embedding_multiplier", "logits_scaling"),
    *("residual_multiplier", "attention_multiplier", "logit_scale", "pretraining_tp", "use_cache", "model_type"),
    *("architectures", "auto_map", "_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"),
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "quantization_config",
    ),
    *("output_attentions", "output_hidden_states", "return_dict", "_attn_implementation", "attn_implementation"),
    *("id2label", "label2id", "num_labels", "tokenizer_class", "task_specific_params", "problem_type", "torchscript"),
    *("is_decoder", "is_encoder_decoder", "add_cross_attention", "chunk_size_feed_forward", "unsloth_version"),
    *("mask_token_id", "decoder_start_token_id", "use_flash_attention", "model_max_length", "summary_type"),
}
"""Keys that say the shape of a Llama, or do not change one: with only these, an unknown architecture can be planned."""

NULL_IS_NONE = {"sliding_window": 0, "attn_logit_softcapping": 0}
"""Keys whose null says that a model has no such thing, though its family's default has one; other nulls are absent."""


def from_config(path: str | Path, *, vocab_divisible_by: int = 128) -> ModelShape:
    """The model that a `config.json`, or the folder it lies in, describes.

    Args:
        path: the file, or a folder with it.
        vocab_divisible_by: Megatron's padding of the vocabulary (make_vocab_size_divisible_by); 1 = no padding.

    Raises:
        UserError: when the file cannot be read, a key is missing or no size, or keys of an architecture that is not one
            of `FAMILIES` say more than a Llama's shape.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path, CONFIG)
    hf_values.check(config, str(path))
    kind, config, notes = _text_part(config)
    config = _without_nulls(config)
    if kind not in FAMILIES:
        notes.append(_refuse_strange(config, kind, path))
    try:
        shape = FAMILIES.get(kind, FAMILIES["llama"])(config)
    except KeyError as missing:
        raise UserError(f"{path}: {missing.args[0]} is missing", f"a {kind} configuration has it") from missing
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as wrong:
        raise UserError(f"{path}: a value has the wrong type for {kind}: {wrong}") from wrong
    name = str(config.get("_name_or_path") or path.absolute().parent.name or kind).rstrip("/").rpartition("/")[2]
    notes.append(str(shape.pop("approximate", "")))
    approximate = "; ".join(filter(None, notes))
    shape = {"vocab_divisible_by": vocab_divisible_by, "source": str(path), **shape, "approximate": approximate}
    return ModelShape.from_mapping(name, shape, str(path))


def _text_part(config: Config) -> tuple[str, Config, list[str]]:
    """The architecture, its keys, and what is left out: of a model that also sees or hears, the decoder of text."""
    kind, text = str(config.get("model_type") or ""), config.get("text_config")
    if not isinstance(text, dict):
        return kind, config, []
    inner = str(text.get("model_type") or "")
    other = [key for key in ("vision_config", "audio_config", "speech_config") if config.get(key)]
    notes = [f"its decoder of text only, without its {' and '.join(key[:-7] for key in other)} part"] if other else []
    return kind if kind in FAMILIES else inner or kind, {**config, **text}, notes


def _without_nulls(config: Config) -> Config:
    values = {key: NULL_IS_NONE.get(key) if value is None else value for key, value in config.items()}
    return {key: value for key, value in values.items() if value is not None}


def _refuse_strange(config: Config, kind: str, path: Path) -> str:
    """What is said of an architecture that is planned as a Llama.

    Raises:
        UserError: a key that a Llama does not have, or one that it needs is missing.
    """
    stated = config.get("architectures") or [kind or "no model_type"]
    names = ", ".join(map(str, stated)) if isinstance(stated, list) else str(stated)
    known = {field: config[key] for key, field in SHAPE_KEYS.items() if config.get(key)}
    hint = BY_HAND.format(shape=",".join(f"{field}={value}" for field, value in known.items()) or "layers=..,hidden=..")
    what = f"{path}: the architecture {names} (model_type {kind!r}) is not known"
    if missing := [key for key in NEEDED if config.get(key) is None]:
        raise UserError(f"{what}, and {missing[0]} is missing", f"{hint}; known: {', '.join(FAMILIES)}")
    if strange := sorted(key for key in config.keys() - LLAMA_KEYS if config[key] not in (None, False)):
        raise UserError(f"{what}, and {strange[0]} is no key of a Llama: its sizes may say more than these", hint)
    return f"model_type {kind!r} is not known: planned as a Llama of these sizes, which its keys do not contradict"
