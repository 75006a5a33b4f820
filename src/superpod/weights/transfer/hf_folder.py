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
from superpod.weights.families.nemo_class import FAMILIES, FETCH, MERGE_ADAPTER, NemoClass, read_config, read_nemo_class

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files from which a tokenizer can be read; a folder must contain one of them."""
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""Unsharded weights; sharded weights have an index with the same name and `.index.json`."""
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Data types of safetensors that can be imported."""
ALWAYS_FP32 = "e_score_correction_bias"
"""Tensor of DeepSeek-V3's router that stays in fp32 in a bf16 model."""
DERIVED = re.compile(r".*(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|masked_bias|attn\.bias)")
"""Tensors of older folders that are computed from the configuration."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file, without its data."""

    format: str
    shape: tuple[int, ...]


def check(folder: Path) -> NemoClass:
    """Check that a folder is complete, and return NeMo's class for it; imports nothing.

    Raises:
        UserError: config.json, weights or tokenizer are missing, truncated or unknown, or NeMo does not compute the
            same function.
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
        raise UserError(f"{folder} contains no tokenizer: none of {', '.join(TOKENIZER_FILES)}", FETCH)
    return nemo_class


def find_weights(folder: Path) -> list[Path]:
    """Return the files from which transformers reads the weights: safetensors, or else PyTorch's files.

    Raises:
        UserError: there are none, a shard of the index is missing, or a file is truncated.
    """
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
                raise UserError(f"{index} contains {file.name}, which does not exist", FETCH)
            if file.suffix == ".safetensors" and _read_header(file) is None:
                raise UserError(f"{file} is truncated, or not a safetensors file", FETCH)
        return files
    if (folder / "adapter_model.safetensors").is_file() or (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} contains only a PEFT adapter without the weights of the model", MERGE_ADAPTER)
    raise UserError(f"{folder} contains no weights: no *.safetensors or *.bin with transformers' names", FETCH)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of safetensors files by name; empty for PyTorch's files, which have no header.

    Raises:
        UserError: as in `find_weights`, or the index contains a tensor that is in no shard.
    """
    files = [file for file in find_weights(folder) if file.suffix == ".safetensors"]
    listed: dict[str, Tensor] = {}
    for file in files:
        for name, entry in (_read_header(file) or {}).items():
            if name in listed:
                raise UserError(f"{folder} contains {name} twice, the second time in {file.name}", FETCH)
            if name != "__metadata__":
                listed[name] = Tensor(str(entry.get("dtype")), tuple(entry.get("shape", ())))
    index = folder / f"{SINGLE_FILES[0]}.index.json"
    if files and files[0].name != SINGLE_FILES[0]:
        absent_name = next((name for name in _read_index(index) if name not in listed), None)
        if absent_name:
            raise UserError(f"{index} contains the tensor {absent_name}, which is in no shard", FETCH)
    return listed


def find_dtype(folder: Path, stated_dtype: str) -> str:
    """Return the data type of the stored weights, fp32 if it is mixed; for .bin files, return `stated_dtype`."""
    formats = {tensor.format for name, tensor in read_tensors(folder).items() if ALWAYS_FP32 not in name}
    formats &= FLOATS.keys()
    if not formats:
        return stated_dtype if stated_dtype in FLOATS.values() else "float32"
    return FLOATS[formats.pop()] if len(formats) == 1 else "float32"


def read_dtype(config: dict[str, Any]) -> str:
    """Return the data type that a config.json specifies, or ""."""
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def size(folder: Path) -> int:
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
    raise UserError(f"{index} is not an index of shards", FETCH)


def _read_header(file: Path) -> dict[str, Any] | None:
    """Read the header of a safetensors file (8 bytes length, JSON, data); None if the file is truncated or invalid."""
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
