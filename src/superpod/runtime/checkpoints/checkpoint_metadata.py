"""Metadata of a Megatron checkpoint, read without torch: its tensors, and which bytes of which files hold them.

`weights/.metadata` is a pickle of torch's classes. Every class in it is replaced by an empty one of our own, so that
torch is not needed and the file cannot execute code. Standard library only.
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


def weights_of(checkpoint: Path) -> Path:
    """The folder that holds a checkpoint's weights: `weights`; with NeMo's `fsdp_dtensor`, the checkpoint itself."""
    weights = checkpoint / WEIGHTS
    return checkpoint if not weights.is_dir() and (checkpoint / ".metadata").is_file() else weights


def read(checkpoint: Path) -> CheckpointMetadata:
    """What `weights/.metadata` says.

    Raises:
        ValueError: it is not there, or not a pickle of what Megatron writes.
    """
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
    """From a `torch.Size`, made with a tuple, or from the tuple that Megatron-FSDP writes in its place."""
    return size if isinstance(size, tuple) else tuple(size.arguments[0])


class _Part(io.RawIOBase):
    """Some bytes of an open file, as a file."""

    def __init__(self, handle: int, offset: int, length: int) -> None:
        self.handle, self.offset, self.length, self.at = handle, offset, length, 0
        self.error: OSError | None = None
        """why it could not be read, which zipfile may report as a damaged archive"""

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
        try:
            view = memoryview(buffer)[: max(0, self.length - self.at)]
            read = os.preadv(self.handle, [view], self.offset + self.at)
        except OSError as error:
            self.error = error
            raise
        self.at += read
        return read


def intact(file: Path) -> bool:
    """Whether a zip archive holds what its checksums say. Raises OSError when the file cannot be read."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return intact_part(handle, 0, os.fstat(handle).st_size)
    finally:
        os.close(handle)


def intact_part(handle: int, offset: int, length: int) -> bool:
    """Whether an archive within an open file holds what its checksums say. Raises OSError when it cannot be read."""
    with _Part(handle, offset, length) as source:
        try:
            with zipfile.ZipFile(source) as archive:
                return archive.testzip() is None  # the first file with a wrong CRC
        except Exception:  # a damaged archive fails in any way there is
            if source.error:
                raise source.error from None
            return False


def saved_step(checkpoint: Path) -> int | None:
    """Steps done at a checkpoint by `common.pt`, where Lightning's trainer has left them; None = it does not say.

    Every class in it is replaced, as in `.metadata`.
    """
    try:
        with zipfile.ZipFile(weights_of(checkpoint) / "common.pt") as archive:
            name = next(name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl")
            reader = _Reader(io.BytesIO(archive.read(name)))
            reader.persistent_load = lambda _: None  # tensors
            step = reader.load()["global_step"]
    except Exception:  # as fails any file that is none, or another's
        return None
    return step if type(step) is int else None
