"""Reads the headers of a Hugging Face folder: its tensors, their data types, and whether it is complete.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.weights.families.nemo_class import (
    DOWNLOAD,
    FAMILIES,
    MERGE_ADAPTER,
    NemoClass,
    read_config,
    read_nemo_class,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Tokenizer files; a folder must contain one of them."""
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""Files of unsharded weights. The index of sharded weights adds `.index.json` to these names."""
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Data types of safetensors that can be imported -> torch dtype."""
ALWAYS_FP32 = "e_score_correction_bias"
"""Tensor of DeepSeek-V3's router that stays in FP32 in a BF16 model."""
DERIVED = re.compile(r".*(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|masked_bias|attn\.bias)")
"""Tensors in older folders that transformers computes from the configuration."""


@dataclass(frozen=True)
class Tensor:
    """Data type and shape of a tensor in a safetensors file."""

    format: str
    shape: tuple[int, ...]


def check_complete(folder: Path) -> NemoClass:
    """Check that a Hugging Face folder is complete, and return NeMo's class for it. Imports neither torch nor NeMo.

    Raises:
        UserError: config.json, weights or tokenizer are missing, truncated or unsupported, or no class of NeMo
            computes the same function.
    """
    if str(read_config(folder).get("model_type")) in FAMILIES:
        find_weights(folder)  # before the keys, because a folder without weights is usually the wrong folder
    nemo_class = read_nemo_class(folder)
    if (folder / "adapter_config.json").is_file():  # transformers would load the base that it names, not these weights
        raise UserError(
            f"{folder} contains both the weights of a model and adapter_config.json of PEFT",
            "remove adapter_config.json to import the weights, or merge the adapter with `merge_and_unload`",
        )
    tensors = read_tensors(folder)
    quantized = next((name for name, tensor in tensors.items() if tensor.format not in FLOATS), None)
    if quantized and not read_config(folder).get("quantization_config"):
        raise UserError(
            f"{folder}: {quantized} is stored as {tensors[quantized].format}, "
            f"but NeMo imports only {', '.join(FLOATS)}",
            "use the original weights, or dequantize them with transformers",
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{folder} contains no tokenizer: none of {', '.join(TOKENIZER_FILES)}", DOWNLOAD)
    return nemo_class


def find_weights(folder: Path) -> list[Path]:
    """Return the weight files that transformers reads. Raises UserError if a file is missing or truncated."""
    for single in SINGLE_FILES:
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            files = [folder / single]
        elif index.is_file():
            files = [folder / name for name in sorted(set(_read_index(index).values()))]
        else:
            continue
        for file in files:
            if not file.is_file():
                raise UserError(f"{index} contains {file.name}, which does not exist", DOWNLOAD)
            if file.suffix == ".safetensors" and _read_header(file) is None:
                raise UserError(f"{file} is truncated, or not a safetensors file", DOWNLOAD)
        return files
    if (folder / "adapter_model.safetensors").is_file() or (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} contains only a PEFT adapter without the weights of the model", MERGE_ADAPTER)
    raise UserError(f"{folder} contains no weights: no *.safetensors or *.bin with transformers' names", DOWNLOAD)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return data type and shape of the tensors in safetensors files by name; {} for .bin files, which have no header.

    Raises:
        UserError: see `find_weights`; or a tensor of the index is in no shard, or in two.
    """
    files = [file for file in find_weights(folder) if file.suffix == ".safetensors"]
    listed: dict[str, Tensor] = {}
    for file in files:
        for name, entry in (_read_header(file) or {}).items():
            if name in listed:
                raise UserError(f"{folder} contains {name} twice, the second time in {file.name}", DOWNLOAD)
            if name != "__metadata__":
                listed[name] = Tensor(str(entry.get("dtype")), tuple(entry.get("shape", ())))
    index = folder / f"{SINGLE_FILES[0]}.index.json"
    if files and files[0].name != SINGLE_FILES[0]:
        absent_name = next((name for name in _read_index(index) if name not in listed), None)
        if absent_name:
            raise UserError(f"{index} contains the tensor {absent_name}, which is in no shard", DOWNLOAD)
    return listed


def find_dtype(folder: Path, stated_dtype: str) -> str:
    """Return the data type of the weights: float32 if it is mixed; `stated_dtype`, if valid, for .bin files."""
    formats = {tensor.format for name, tensor in read_tensors(folder).items() if ALWAYS_FP32 not in name}
    formats &= FLOATS.keys()
    if not formats:
        return stated_dtype if stated_dtype in FLOATS.values() else "float32"
    return FLOATS[formats.pop()] if len(formats) == 1 else "float32"


def read_dtype(config: dict[str, Any]) -> str:
    """Return the data type that a config.json specifies, such as "bfloat16"; "" if there is none."""
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def count_weight_bytes(folder: Path) -> int:
    """Return the size of the weights in bytes."""
    return sum(file.stat().st_size for file in find_weights(folder))


def _read_index(index: Path) -> dict[str, str]:
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        if isinstance(names, dict) and all(
            isinstance(name, str) and Path(name).name == name for name in names.values()
        ):
            return names
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{index} is not an index of shards", DOWNLOAD)


def _read_header(file: Path) -> dict[str, Any] | None:
    """Return the header of a safetensors file (8 bytes length, JSON, data), or None if the file is truncated."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length >= file.stat().st_size:
                return None
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return header if file.stat().st_size >= 8 + length + max(ends, default=0) else None
    except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError):
        return None
