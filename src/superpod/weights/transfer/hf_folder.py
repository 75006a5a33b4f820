"""What lies in a Hugging Face folder, read from headers alone: is it whole, which tensors, in which number format.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.weights.families.nemo_class import FAMILIES, FETCH, NemoClass, read_config, read_nemo_class

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files that a tokenizer is read from; a folder must have one of them."""
SINGLE = ("model.safetensors", "pytorch_model.bin")
"""Whole weights in one file; sharded ones have an index of the same name and `.index.json`."""
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Number formats of safetensors that a model is imported in."""
ALWAYS_FP32 = "e_score_correction_bias"
"""DeepSeek-V3's router keeps these numbers in fp32 in a bf16 model."""
DERIVED = re.compile(r".*(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|masked_bias|attn\.bias)")
"""Tensors of older folders that are computed from the configuration."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file, without its data."""

    format: str
    shape: tuple[int, ...]


def check(folder: Path) -> NemoClass:
    """NeMo's class for a folder that is whole; imports nothing.

    Raises:
        UserError: config.json, weights or tokenizer are missing, cut off or unknown, or NeMo computes something else.
    """
    if str(read_config(folder).get("model_type")) in FAMILIES:
        weights(folder)  # before the keys: a folder without weights is most often the wrong folder
    nemo_class = read_nemo_class(folder)
    if (folder / "adapter_config.json").is_file():  # transformers would load the base that it names, not these weights
        raise UserError(
            f"{folder} holds the weights of a whole model and adapter_config.json of PEFT",
            "move adapter_config.json away where the weights are meant; or merge the adapter with `merge_and_unload`",
        )
    listed = tensors(folder)
    quantized = next((name for name, tensor in listed.items() if tensor.format not in FLOATS), None)
    packed = bool(read_config(folder).get("quantization_config"))
    if quantized and not packed:
        raise UserError(
            f"{folder}: {quantized} is stored as {listed[quantized].format}, and NeMo imports {', '.join(FLOATS)}",
            "take the original weights, or dequantize them with transformers",
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}", FETCH)
    return nemo_class


def weights(folder: Path) -> list[Path]:
    """The files that transformers reads the weights from: safetensors, or PyTorch's where there are none.

    Raises:
        UserError: there are none, a shard of an index is missing, or a file is cut off.
    """
    for single in SINGLE:
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            files = [folder / single]
        elif index.is_file():
            files = [folder / name for name in sorted(set(_index(index).values()))]
        else:
            continue
        for file in files:
            if not file.is_file():
                raise UserError(f"{index} names {file.name}, which is not there", FETCH)
            if file.suffix == ".safetensors" and _header(file) is None:
                raise UserError(f"{file} is cut off, or not a safetensors file", FETCH)
        return files
    adapter = (folder / "adapter_model.safetensors").is_file() or (folder / "adapter_config.json").is_file()
    if adapter:
        hint = "merge it first: `merge_and_unload` of peft, then save_pretrained"
        raise UserError(f"{folder} holds an adapter of PEFT, and no weights of a whole model", hint)
    raise UserError(f"{folder} holds no weights: no *.safetensors, no *.bin as transformers names them", FETCH)


def tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of safetensors files by name; empty for PyTorch's files, which have no header to read.

    Raises:
        UserError: as `weights`, or the index names a tensor that its shard does not hold.
    """
    files = [file for file in weights(folder) if file.suffix == ".safetensors"]
    listed: dict[str, Tensor] = {}
    for file in files:
        for name, entry in (_header(file) or {}).items():
            if name in listed:
                raise UserError(f"{folder} holds {name} twice, the second time in {file.name}", FETCH)
            if name != "__metadata__":
                listed[name] = Tensor(str(entry.get("dtype")), tuple(entry.get("shape", ())))
    index = folder / f"{SINGLE[0]}.index.json"
    if files and files[0].name != SINGLE[0]:
        absent = next((name for name in _index(index) if name not in listed), None)
        if absent:
            raise UserError(f"{index} names the tensor {absent}, which no shard holds", FETCH)
    return listed


def number_format(folder: Path, stated: str) -> str:
    """The format of the stored weights, fp32 where they are mixed; `stated`: config.json's, for PyTorch's files."""
    formats = {tensor.format for name, tensor in tensors(folder).items() if ALWAYS_FP32 not in name}
    formats &= FLOATS.keys()
    if not formats:
        return stated if stated in FLOATS.values() else "float32"
    return FLOATS[formats.pop()] if len(formats) == 1 else "float32"


def stated_format(config: dict[str, Any]) -> str:
    """The number format that a config.json states, "" without one."""
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def size(folder: Path) -> int:
    """Bytes of the weights."""
    return sum(file.stat().st_size for file in weights(folder))


def _index(index: Path) -> dict[str, str]:
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        if isinstance(names, dict) and all(
            isinstance(name, str) and Path(name).name == name for name in names.values()
        ):
            return names
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{index} is no index of shards", FETCH)


def _header(file: Path) -> dict[str, Any] | None:
    """The header of a safetensors file: 8 bytes of its length, JSON, then the data; None if any of it is missing."""
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
