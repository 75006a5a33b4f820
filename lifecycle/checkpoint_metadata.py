"""What a Megatron checkpoint says of itself, read without torch: tensors, files, and whether the files hold them.

`weights/.metadata` is a pickle of torch's classes. Here every class in it becomes an empty one of our own, so that
nothing of torch is needed and nothing of the file is executed.
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
from typing import Any

from superpod.node.checkpoints import MARK
from superpod.node.files import read_json
from superpod.planner.layout import PARALLEL_SIZES

WEIGHTS = "weights"


class _Blank:
    """Stands for any object of a pickle: keeps what it was made with and given."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _blank(module, name)


@lru_cache(maxsize=256)
def _blank(module: str, name: str) -> type:
    return type(name, (_Blank,), {"__module__": module})


@dataclass(frozen=True)
class Tensor:
    """A tensor of the whole model: its shape, its type ("bfloat16"), and how many of its numbers are stored."""

    shape: tuple[int, ...]
    dtype: str
    stored: int

    @property
    def numbers(self) -> int:
        """How many it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointMetadata:
    """`tensors` are by name, optimizer states among them; `places` are (file, offset, bytes) of what is stored."""

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
        return {name: each for name, each in self.tensors.items() if not name.startswith("optimizer")}

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
            found: Any = _Reader(stream).load()
        tensors = {name: _tensor(each) for name, each in found.state_dict_metadata.items() if hasattr(each, "chunks")}
        places = [(each.relative_path, each.offset, each.length) for each in found.storage_data.values()]
    except FileNotFoundError:
        raise ValueError("weights/.metadata is missing") from None
    except Exception as broken:  # a damaged pickle fails in any way there is
        raise ValueError(f"weights/.metadata is damaged: {type(broken).__name__}") from None
    return CheckpointMetadata(tensors, places)


def _tensor(found: Any) -> Tensor:
    dtype = found.properties.state[0] if hasattr(found.properties, "state") else found.properties.dtype
    shape, stored = _size(found.size), sum(math.prod(_size(chunk.sizes)) for chunk in found.chunks)
    return Tensor(shape, getattr(dtype, "__name__", str(dtype)), stored)


def _size(found: Any) -> tuple[int, ...]:
    return tuple(found.given[0])


def problems(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint, as far as sizes and names tell (see `damages`). Empty: whole."""
    found = []
    if checkpoint.with_name(f"{checkpoint.name}{MARK}").exists():
        found.append("marked as unfinished")
    if read_json(checkpoint / WEIGHTS / "metadata.json") is None:
        found.append("weights/metadata.json, which is written last, is missing or damaged")
    if not _intact(checkpoint / WEIGHTS / "common.pt"):
        found.append("weights/common.pt is missing or damaged")
    if "objects" not in (read_json(checkpoint / "context" / "io.json") or {}):
        found.append("context/io.json is missing or damaged")
    try:
        stored = read(checkpoint)
    except ValueError as error:
        return [*found, str(error)]
    for name, least in sorted(stored.needed.items()):
        have = size(checkpoint / WEIGHTS / name)
        if have is None:
            found.append(f"weights/{name} is missing")
        elif have < least:
            found.append(f"weights/{name} has {have} bytes, {least - have} too few")
    lacking = [name for name, each in stored.tensors.items() if each.stored < each.numbers]
    if lacking:
        found.append(f"{len(lacking)} tensors are stored in part, {lacking[0]} first")
    return found


def damages(checkpoint: Path) -> list[str]:
    """What is not as it was written, of a checkpoint without `problems`; reads all of it.

    Each tensor is stored as torch saves one: a zip archive, with a CRC-32 of what it holds.
    """
    found = []
    for name, offset, length in sorted(read(checkpoint).places):
        if not _intact(_Part(checkpoint / WEIGHTS / name, offset, length)):
            found.append(f"weights/{name} is damaged between bytes {offset} and {offset + length}")
    return found


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

    def readinto(self, buffer: Any) -> int:
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
            return archive.testzip() is None
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        return False
    finally:
        if isinstance(file, _Part):
            file.close()


def size(file: Path) -> int | None:
    """Bytes of a file; None: it is not there, or no longer."""
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None


def layout(checkpoint: Path) -> dict[str, int]:
    """The degrees it was saved under (tp, pp, ..., ranks), as `context/io.json` has them; empty where it has none."""
    try:
        objects = json.loads((checkpoint / "context" / "io.json").read_bytes())["objects"]
        strategy = _attributes(objects, "strategy")
        trainer = _attributes(objects, "trainer")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    found = {mine: strategy[theirs] for mine, theirs in PARALLEL_SIZES.items() if isinstance(strategy.get(theirs), int)}
    ranks = [count for name in ("devices", "num_nodes") if isinstance(count := trainer.get(name), int)]
    return found | ({"ranks": math.prod(ranks)} if len(ranks) == 2 else {})


def _attributes(objects: dict[str, Any], kind: str) -> dict[str, Any]:
    """The plain attributes of the one object that is the trainer, or its strategy, in fiddle's JSON."""
    whose = "<root>.trainer.strategy" if kind == "strategy" else "<root>.trainer"
    for each in objects.values():
        items = [(name, item) for name, item in each.get("items", []) if str(name).startswith("Attr(")]
        plain = {name[len("Attr(name='") : -2]: item for name, item in items if isinstance(item, dict)}
        if any(f"{whose}.{name}" in (item.get("paths") or []) for name, item in plain.items()):
            return {name: item.get("value") for name, item in plain.items()}
    return {}
