"""Read the metadata of a Megatron checkpoint without torch: its tensors and their positions in the files.

`weights/.metadata` is a pickle of torch classes. Every class in it is replaced by an empty one, so torch is not needed
and the file cannot execute code. Standard library only.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

WEIGHTS = "weights"


class _Placeholder:
    """Stands for any object in a pickle, and stores its constructor arguments and its state."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        return _placeholder_class(module, name)


@lru_cache(maxsize=256)
def _placeholder_class(module: str, name: str) -> type:
    return type(name, (_Placeholder,), {"__module__": module})


@dataclass(frozen=True)
class Tensor:
    """A tensor of the unsharded model; `dtype` is for example "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str
    saved_elements: int
    """number of elements in all saved shards"""

    @property
    def elements(self) -> int:
        """The number of elements according to the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointMetadata:
    """The tensors of a checkpoint and the positions of their shards."""

    tensors: dict[str, Tensor]
    """by name, including optimizer states"""
    places: list[tuple[str, int, int]]
    """(file, offset, bytes) of each saved shard"""

    @property
    def model(self) -> dict[str, Tensor]:
        """The weights, without optimizer states."""
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith("optimizer")}

    @property
    def optimizer(self) -> bool:
        """Whether the checkpoint contains optimizer states."""
        return len(self.model) < len(self.tensors)


def weights_of(checkpoint: Path) -> Path:
    """Return the folder with the weights of a checkpoint: `weights`, or the checkpoint itself for `fsdp_dtensor`."""
    weights = checkpoint / WEIGHTS
    if not weights.is_dir() and (checkpoint / ".metadata").is_file():
        return checkpoint
    return weights


def read(checkpoint: Path) -> CheckpointMetadata:
    """Read `weights/.metadata` of a checkpoint. Raises ValueError if it is missing, unreadable or corrupt."""
    try:
        with (weights_of(checkpoint) / ".metadata").open("rb") as stream:
            metadata: Any = _Reader(stream).load()  # torch.distributed.checkpoint.metadata.Metadata
        entries = metadata.state_dict_metadata.items()
        tensors = {name: _tensor(entry) for name, entry in entries if hasattr(entry, "chunks")}
        places = [(part.relative_path, part.offset, part.length) for part in metadata.storage_data.values()]
    except FileNotFoundError:
        raise ValueError("weights/.metadata is missing") from None
    except OSError as error:
        raise ValueError(f"weights/.metadata cannot be read: {error.strerror}") from None
    except Exception as broken:  # a corrupt pickle may raise any exception
        raise ValueError(f"weights/.metadata is corrupt: {type(broken).__name__}") from None
    return CheckpointMetadata(tensors, places)


def _tensor(entry: Any) -> Tensor:
    """Convert a `TensorStorageMetadata`, whose properties are a tuple or an object, depending on the torch version."""
    properties = entry.properties
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    saved_elements = sum(math.prod(_size(chunk.sizes)) for chunk in entry.chunks)
    return Tensor(_size(entry.size), getattr(dtype, "__name__", str(dtype)), saved_elements)


def _size(size: Any) -> tuple[int, ...]:
    """Convert a `torch.Size`, or the tuple that Megatron-FSDP writes instead."""
    if isinstance(size, tuple):
        return size
    return tuple(size.arguments[0])


class _Part(io.RawIOBase):
    """A file object for the range of `length` bytes at `offset` of an open file."""

    def __init__(self, handle: int, offset: int, length: int) -> None:
        self.handle, self.offset, self.length, self.at = handle, offset, length, 0
        self.error: OSError | None = None
        """the error of a failed read, which zipfile may report as a corrupt archive"""

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence])
        return self.at

    def readinto(self, buffer: WriteableBuffer) -> int:
        try:
            view = memoryview(buffer)[: max(0, self.length - self.at)]
            bytes_read = os.preadv(self.handle, [view], self.offset + self.at)
        except OSError as error:
            self.error = error
            raise
        self.at += bytes_read
        return bytes_read


def is_intact(file: Path) -> bool:
    """Return whether the content of the zip archive `file` matches its CRCs. Raises OSError if it cannot be read."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return is_part_intact(handle, 0, os.fstat(handle).st_size)
    finally:
        os.close(handle)


def is_part_intact(handle: int, offset: int, length: int) -> bool:
    """Return whether the zip archive at `offset` of an open file matches its CRCs. Raises OSError if a read fails."""
    with _Part(handle, offset, length) as source:
        try:
            with zipfile.ZipFile(source) as archive:
                return archive.testzip() is None  # the first file with a wrong CRC
        except Exception:  # a corrupt archive may raise any exception
            if source.error:
                raise source.error from None
            return False


def saved_step(checkpoint: Path) -> int | None:
    """Return the global step that Lightning's trainer has saved in `common.pt`; None if unknown. Executes no code."""
    try:
        with zipfile.ZipFile(weights_of(checkpoint) / "common.pt") as archive:
            name = next(name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl")
            reader = _Reader(io.BytesIO(archive.read(name)))
            reader.persistent_load = lambda _: None  # tensors
            step = reader.load()["global_step"]
    except Exception:  # any other file may raise any exception
        return None
    return step if type(step) is int else None
