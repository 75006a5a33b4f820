"""Metadata of a Megatron checkpoint, read without torch: its tensors, its files, and whether the files are whole.

`weights/.metadata` is a pickle of torch's classes. Every class in it is replaced by an empty one of our own, so that
torch is not needed and the file cannot execute code.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.node.checkpoints import MARK
from superpod.node.files import JsonObject, read_json
from superpod.planner.layout import PARALLEL_SIZES

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

WEIGHTS = "weights"


class _Blank:
    """Stands for any object of a pickle: keeps its arguments and its state."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        return _blank(module, name)


@lru_cache(maxsize=256)
def _blank(module: str, name: str) -> type:
    return type(name, (_Blank,), {"__module__": module})


@dataclass(frozen=True)
class Tensor:
    """A tensor of the whole model: its shape, its type ("bfloat16"), and how many of its numbers are saved."""

    shape: tuple[int, ...]
    dtype: str
    saved_numbers: int

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointMetadata:
    """`tensors` are by name, optimizer states among them; `places` are (file, offset, bytes) of what is saved."""

    tensors: dict[str, Tensor]
    places: list[tuple[str, int, int]]

    @property
    def needed(self) -> dict[str, int]:
        """Bytes that each file must have at least."""
        least: dict[str, int] = {}
        for name, offset, length in self.places:
            least[name] = max(least.get(name, 0), offset + length)
        return least

    @property
    def model(self) -> dict[str, Tensor]:
        """The tensors that are weights."""
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith("optimizer")}

    @property
    def optimizer(self) -> bool:
        """Whether a training can go on with its optimizer."""
        return len(self.model) < len(self.tensors)


def read(checkpoint: Path) -> CheckpointMetadata:
    """What `weights/.metadata` says.

    Raises:
        ValueError: it is not there, or not a pickle of what Megatron writes.
    """
    try:
        with (checkpoint / WEIGHTS / ".metadata").open("rb") as stream:
            metadata: Any = _Reader(stream).load()  # torch.distributed.checkpoint.metadata.Metadata
        entries = metadata.state_dict_metadata.items()
        tensors = {name: _tensor(entry) for name, entry in entries if hasattr(entry, "chunks")}
        places = [(part.relative_path, part.offset, part.length) for part in metadata.storage_data.values()]
    except FileNotFoundError:
        raise ValueError("weights/.metadata is missing") from None
    except Exception as broken:  # a damaged pickle fails in any way there is
        raise ValueError(f"weights/.metadata is damaged: {type(broken).__name__}") from None
    return CheckpointMetadata(tensors, places)


def _tensor(entry: Any) -> Tensor:
    """From a `TensorStorageMetadata`, whose properties are a tuple or have fields, by the version of torch."""
    properties = entry.properties
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    saved_numbers = sum(math.prod(_size(chunk.sizes)) for chunk in entry.chunks)
    return Tensor(_size(entry.size), getattr(dtype, "__name__", str(dtype)), saved_numbers)


def _size(size: Any) -> tuple[int, ...]:
    """From a `torch.Size`, made with a tuple."""
    return tuple(size.arguments[0])


def problems(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint, as far as sizes and names tell (see `damages`); empty when it is whole."""
    problems = []
    if checkpoint.with_name(f"{checkpoint.name}{MARK}").exists():
        problems.append("marked as unfinished")
    if read_json(checkpoint / WEIGHTS / "metadata.json") is None:
        problems.append("weights/metadata.json, which is written last, is missing or damaged")
    if not _intact(checkpoint / WEIGHTS / "common.pt"):
        problems.append("weights/common.pt is missing or damaged")
    if "objects" not in (read_json(checkpoint / "context" / "io.json") or {}):
        problems.append("context/io.json is missing or damaged")
    try:
        metadata = read(checkpoint)
    except ValueError as error:
        return [*problems, str(error)]
    # A full disk or a killed save leaves short files.
    for name, least in sorted(metadata.needed.items()):
        have = size(checkpoint / WEIGHTS / name)
        if have is None:
            problems.append(f"weights/{name} is missing")
        elif have < least:
            problems.append(f"weights/{name} has {have} bytes, {least - have} too few")
    incomplete = [name for name, tensor in metadata.tensors.items() if tensor.saved_numbers < tensor.numbers]
    if incomplete:
        problems.append(f"{len(incomplete)} tensors are stored in part, {incomplete[0]} first")
    return problems


def damages(checkpoint: Path) -> list[str]:
    """Parts of a checkpoint without `problems` that are not as they were written; reads all of it.

    Each tensor is saved as torch saves one: a zip archive, with a CRC-32 of its content.
    """
    return [
        f"weights/{name} is damaged between bytes {offset} and {offset + length}"
        for name, offset, length in sorted(read(checkpoint).places)
        if not _intact(_Part(checkpoint / WEIGHTS / name, offset, length))
    ]


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: Path, offset: int, length: int) -> None:
        self.stream, self.offset, self.length, self.at = file.open("rb"), offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        self.at = max(0, to + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence])
        return self.at

    def readinto(self, buffer: WriteableBuffer) -> int:
        self.stream.seek(self.offset + self.at)
        read = self.stream.readinto(memoryview(buffer)[: max(0, self.length - self.at)])
        self.at += read
        return read

    def close(self) -> None:
        self.stream.close()
        super().close()


def _intact(file: Path | _Part) -> bool:
    """Whether a zip archive holds what its checksums say."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None  # the first file with a wrong CRC
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        return False
    finally:
        if isinstance(file, _Part):
            file.close()


def size(file: Path) -> int | None:
    """Bytes of a file; None when it does not exist, or no longer."""
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None


def layout(checkpoint: Path) -> dict[str, int]:
    """The layout it was saved under (tp, pp, ..., ranks) according to `context/io.json`; empty when that has none."""
    try:
        objects = json.loads((checkpoint / "context" / "io.json").read_bytes())["objects"]
        strategy = _attributes(objects, "strategy")
        trainer = _attributes(objects, "trainer")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    sizes = {ours: strategy[nemos] for ours, nemos in PARALLEL_SIZES.items() if isinstance(strategy.get(nemos), int)}
    ranks = [count for name in ("devices", "num_nodes") if isinstance(count := trainer.get(name), int)]
    return sizes | ({"ranks": math.prod(ranks)} if len(ranks) == 2 else {})


def _attributes(objects: JsonObject, kind: str) -> JsonObject:
    """The plain attributes of the one object that is the trainer, or its strategy, in fiddle's JSON."""
    # fiddle writes the path of every value: the trainer is the object whose attributes lie under <root>.trainer.
    whose = "<root>.trainer.strategy" if kind == "strategy" else "<root>.trainer"
    for node in objects.values():
        items = [(name, item) for name, item in node.get("items", []) if str(name).startswith("Attr(")]
        plain = {name[len("Attr(name='") : -2]: item for name, item in items if isinstance(item, dict)}
        if any(f"{whose}.{name}" in (item.get("paths") or []) for name, item in plain.items()):
            return {name: item.get("value") for name, item in plain.items()}
    return {}
