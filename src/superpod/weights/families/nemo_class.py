"""Finds the NeMo class, and the values of its fields, that compute the same function as a Hugging Face config.json.

A key that affects the function is either converted to a field of NeMo's class, or must have the only value that the
class supports; otherwise the folder is rejected. Keys and defaults are those of transformers 4.57. Each import verifies
the result with `forward_check`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner.formats.config_files import read_json
from superpod.planner.formats.hf_config import InconsistentConfigError, decoder_keys, missing_key, parse_config
from superpod.planner.formats.hf_families import Config
from superpod.weights.families.families import FAMILIES, Family, known_keys
from superpod.weights.families.nemo_fields import UnsupportedError


@dataclass(frozen=True)
class NemoClass:
    """NeMo's model class, configuration class and field values for a config.json."""

    model: str
    """Class of `nemo.collections.llm`."""
    config: str
    """Its configuration class."""
    fields: dict[str, Any]
    """Fields of the configuration; `activation_func` is a name in `ACTIVATIONS`."""
    unknown: tuple[str, ...] = ()
    """Keys of config.json that are unknown to transformers and to this module."""
    doubts: tuple[str, ...] = ()
    """Known differences between transformers and the original implementation of the model."""


def find_nemo_class(config: Mapping[str, Any], where: str = "config.json") -> NemoClass:
    """Return the NeMo class that computes the same function as a configuration.

    Args:
        config: the content of a config.json.
        where: name of the file for messages.

    Raises:
        UserError: no class of NeMo 2.7.3 computes this function; the message names the key.
    """
    keys = decoder_keys(config, where)
    kind = str(config.get("model_type") or "")
    if kind not in FAMILIES:
        reason = UNSUPPORTED_FAMILIES.get(kind, "NeMo 2.7.3 has no class that computes it")
        hint = f"supported model types: {', '.join(FAMILIES)}"
        raise UserError(f"{where}: NeMo 2.7.3 cannot import model_type {kind!r}: {reason}", hint)
    family = FAMILIES[kind]
    try:
        _require_causal_model(config, family)
        decoder = parse_config(keys, where, default_sizes=True)
        if not decoder.ffn:
            raise UnsupportedError("intermediate_size is missing")
        nemo = family.convert(decoder)
    except InconsistentConfigError as conflict:
        raise UserError(f"{where}: {conflict}", "keep the value that the model was trained with") from None
    except UnsupportedError as refused:
        raise UserError(f"{where}: {refused}", WORKAROUND) from None
    except KeyError as missing:
        raise missing_key(missing, kind, where) from None
    known = known_keys(kind)
    unknown = tuple(sorted(key for key, value in config.items() if key not in known and value is not None))
    return NemoClass(family.model, nemo.config or family.config, nemo.fields, unknown, tuple(nemo.doubts))


def read_nemo_class(folder: Path) -> NemoClass:
    """Return the NeMo class for a folder's config.json. Raises UserError like `read_config` and `find_nemo_class`."""
    return find_nemo_class(read_config(folder), str(folder / "config.json"))


def read_config(folder: Path) -> Config:
    """Return the content of a folder's config.json. Raises UserError if it is missing or not a JSON object."""
    file = folder / "config.json"
    if os.path.lexists(file):
        return read_json(file, f"a Hugging Face folder; {DOWNLOAD}")
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} is not a Hugging Face folder of a model: it contains a PEFT adapter without its base model",
            MERGE_ADAPTER,
        )
    raise UserError(f"{folder} is not a Hugging Face folder: it has no config.json", DOWNLOAD)


def _require_causal_model(c: Mapping[str, Any], family: Family) -> None:
    """Raise UnsupportedError for a quantized model, an encoder, or another architecture than causal language models."""
    architectures = c.get("architectures") or [family.architecture]
    if not isinstance(architectures, list) or family.architecture not in architectures:
        heads = ", ".join(map(str, architectures)) if isinstance(architectures, list) else repr(architectures)
        raise UnsupportedError(
            f"architectures is {heads}, but NeMo imports only {family.architecture} (a causal language model)"
        )
    quantized = c.get("quantization_config")
    method = quantized.get("quant_method", "quantized") if isinstance(quantized, dict) else quantized
    if quantized and method not in family.quantizations:
        raise UnsupportedError(
            f"quantization_config: the weights are in {method}, but NeMo imports bf16, fp16 and fp32; dequantize them "
            "with transformers (`model.dequantize()`, then save_pretrained), or use the original weights"
        )
    for key, only in CAUSAL_MODEL_VALUES.items():
        if key in c and c[key] not in (None, only):
            raise UnsupportedError(f"{key} is {c[key]!r}, but NeMo's {family.model} supports only {only!r}")


CAUSAL_MODEL_VALUES: Config = {
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "vision_config": None,
    "audio_config": None,
    "text_config": None,
    "compression_config": None,
    "sparsity_config": None,
}
"""Key of config.json -> its value in a causal language model."""

UNSUPPORTED_FAMILIES = {
    "olmo": "it clips queries and has norms without weights",
    "olmo2": "its norms follow attention and MLP, and q and k are normalized over all heads together",
    "olmo3": "its norms follow attention and MLP, and q and k are normalized over all heads together",
    "cohere": "attention and MLP are parallel, and logits are scaled",
    "cohere2": "attention and MLP are parallel, and logits are scaled",
    "gemma3": "it has an image encoder; save only its language model as Gemma3ForCausalLM (gemma3_text)",
    "llama4": "it has an image encoder",
    "llama4_text": "its chunked attention differs from NeMo's class",
    "qwen2_vl": "it has an image encoder",
    "qwen2_5_vl": "it has an image encoder",
    "mistral3": "it has an image encoder",
    "mllama": "it has an image encoder",
    "internlm3": "transformers 4.57 has no class to compare the import with; convert it to Llama's names first",
    "phimoe": "its router uses sparse mixer sampling",
    "qwen3_next": "NeMo 2.7.3 does not support gated delta nets",
    "nemotron_h": "NeMo imports its hybrid models from a different format",
    "gpt_neox": "attention and MLP are parallel",
    "falcon": "attention and MLP are parallel",
}
"""model_type -> reason why it cannot be imported."""

WORKAROUND = "use another model, or train its shape from scratch (docs/extending.md)"
DOWNLOAD = "download it with `hf download ORG/NAME --local-dir DIR`, then pass DIR"
MERGE_ADAPTER = "merge it first with peft: `merge_and_unload`, then `save_pretrained`"
