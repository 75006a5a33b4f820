"""Which NeMo class computes the function of a Hugging Face config.json, and with which fields. Imports no NeMo.

A key that changes the function is either taken over into a field of NeMo's class or must have the one value that the
class has; otherwise the folder is refused. The keys and their defaults are those of transformers 4.57. What is claimed
here is proven at the end of each import by `forward_check`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner.formats.files import read_json
from superpod.planner.formats.hf_config import ContradictionError, decoder_keys, missing_key, parse_config
from superpod.planner.formats.hf_families import Config
from superpod.weights.families.families import FAMILIES, Family, known_keys
from superpod.weights.families.nemo_fields import RefusedError


@dataclass(frozen=True)
class NemoClass:
    """NeMo's class for a configuration."""

    model: str
    """Class of `nemo.collections.llm`."""
    config: str
    """Its configuration class, of the same package or of the model's module."""
    fields: dict[str, Any]
    """Fields of the configuration; `activation_func` by its name in `ACTIVATIONS`."""
    unknown: tuple[str, ...] = ()
    """Keys of config.json that neither transformers' class nor this file knows."""
    doubts: tuple[str, ...] = field(default=())
    """Where transformers itself is known to compute something else than the model's authors."""


def find_nemo_class(config: Mapping[str, Any], where: str = "config.json") -> NemoClass:
    """The NeMo class that computes what this configuration says.

    Args:
        config: the object in a config.json.
        where: names the file in messages.

    Raises:
        UserError: no class of NeMo 2.7.3 computes this function; the message names the key.
    """
    keys = decoder_keys(config, where)
    kind = str(config.get("model_type") or "")
    if kind not in FAMILIES:
        reason = NOT_COMPUTABLE.get(kind, "NeMo 2.7.3 has no class that computes it")
        known = f"known: {', '.join(FAMILIES)}"
        raise UserError(f"{where}: model_type {kind!r} has no importer in NeMo 2.7.3: {reason}", known)
    family = FAMILIES[kind]
    try:
        _check_common(config, family)
        decoder = parse_config(keys, where, default_sizes=True)
        if not decoder.ffn:
            raise RefusedError("intermediate_size is missing")
        nemo = family.convert(decoder)
    except ContradictionError as contradiction:
        raise UserError(f"{where}: {contradiction}", "keep the one that the model was trained with") from None
    except RefusedError as refused:
        raise UserError(f"{where}: {refused}", WAY_OUT) from None
    except KeyError as missing:
        raise missing_key(missing, kind, where) from None
    known = known_keys(kind)
    unknown = tuple(sorted(key for key, value in config.items() if key not in known and value is not None))
    return NemoClass(family.model, nemo.config or family.config, nemo.fields, unknown, tuple(nemo.doubts))


def read_nemo_class(folder: Path) -> NemoClass:
    """`find_nemo_class` of a folder's config.json.

    Raises:
        UserError: as `find_nemo_class`, or the file cannot be read.
    """
    return find_nemo_class(read_config(folder), str(folder / "config.json"))


def read_config(folder: Path) -> Config:
    """The object in a folder's config.json.

    Raises:
        UserError: no such file, or it holds something else.
    """
    file = folder / "config.json"
    if not os.path.lexists(file):
        adapter = (folder / "adapter_config.json").is_file()
        what = "it is an adapter of PEFT without its base model" if adapter else "it has no config.json"
        hint = "merge it first: `merge_and_unload` of peft, then save_pretrained" if adapter else FETCH
        raise UserError(f"{folder} is not a Hugging Face folder: {what}", hint)
    return read_json(file, f"a Hugging Face folder; {FETCH}")


def _check_common(c: Mapping[str, Any], family: Family) -> None:
    """Refuse what no family allows: other heads, quantized weights, encoders."""
    stated = c.get("architectures") or [family.architecture]
    if not isinstance(stated, list) or family.architecture not in stated:
        heads = ", ".join(map(str, stated)) if isinstance(stated, list) else repr(stated)
        raise RefusedError(
            f"architectures is {heads}; NeMo's importer reads {family.architecture} (a next-token model)"
        )
    quantized = c.get("quantization_config")
    method = quantized.get("quant_method", "quantized") if isinstance(quantized, dict) else quantized
    if quantized and method not in family.quantizations:
        raise RefusedError(
            f"quantization_config: the weights are in {method}, and NeMo imports bf16, fp16 and fp32; dequantize them "
            "with transformers (`model.dequantize()`, then save_pretrained), or take the original weights"
        )
    for key, only in WITHOUT_CAUSAL_MODEL.items():
        if key in c and c[key] not in (None, only):
            raise RefusedError(f"{key} is {c[key]!r}; NeMo's {family.model} has {only!r}")


WITHOUT_CAUSAL_MODEL: Config = {
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
"""Keys of every configuration with the one value that a plain next-token model has."""

NOT_COMPUTABLE = {
    "olmo": "it clips queries and has norms without weights",
    "olmo2": "its norms stand after attention and MLP, and q and k are normalised over all heads at once",
    "olmo3": "its norms stand after attention and MLP, and q and k are normalised over all heads at once",
    "cohere": "attention and MLP stand in parallel, and logits are scaled",
    "cohere2": "attention and MLP stand in parallel, and logits are scaled",
    "gemma3": "it has an image encoder; save its language model alone as Gemma3ForCausalLM (gemma3_text)",
    "llama4": "it has an image encoder",
    "llama4_text": "its chunked attention is not that of NeMo's class",
    "qwen2_vl": "it has an image encoder",
    "qwen2_5_vl": "it has an image encoder",
    "mistral3": "it has an image encoder",
    "mllama": "it has an image encoder",
    "internlm3": "transformers 4.57 has no class of it to hold the import against; convert it to Llama's names first",
    "phimoe": "its router samples by sparse mixing",
    "qwen3_next": "NeMo 2.7.3 has no gated delta net",
    "nemotron_h": "NeMo reads its hybrid from another format",
    "gpt_neox": "attention and MLP stand in parallel",
    "falcon": "attention and MLP stand in parallel",
}
"""Why a well-known architecture has no class."""

WAY_OUT = "NeMo would compute another model; take another model, or train its shape from scratch (docs/extending.md)"
FETCH = "fetch it first: hf download ORG/NAME --local-dir DIR, then name DIR"
