"""Whether a checkpoint is whole: by names and sizes, and by reading every byte. Standard library only.

Two records tell: the manifest (`node/manifest.py`), where there is one, and what torch itself writes, a table of
places and a zip archive with a CRC-32 for every tensor. Torch does not look at these when it loads (its reader is built
with MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS), so a flipped bit would be trained on.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from superpod.node import manifest
from superpod.node.checkpoint_metadata import intact, read, weights_of
from superpod.node.checkpoints import MARK, is_half
from superpod.node.files import JsonObject, read_json

CONTEXT = "context/"
"""Problems that begin so do not keep a training from going on: only export and conversion read the context."""

UNREADABLE = " cannot be read: "
"""Problems that hold these words tell of the file system, or of this node, and not of what was written."""

MOST_PARTS, MOST_METADATA = 256, 16 << 20
"""Up to so many parts of a manifest, one a node, and bytes of torch's table of places, a look takes under a second."""

READERS = 16
"""Threads that read at once; one reader does not fill a parallel file system."""


def problems(checkpoint: Path, *, marked: bool = True) -> list[str]:
    """What is wrong with a checkpoint, as far as names and sizes tell (see `damages`); empty when nothing is.

    Without `marked`, NeMo's mark of an unfinished save does not count: its files may be complete all the same.
    """
    wrong = ["marked as unfinished"] if marked and checkpoint.with_name(f"{checkpoint.name}{MARK}").exists() else []
    try:
        os.listdir(checkpoint)
        wrong += _wrong_sizes(checkpoint)
        wrong += [problem for problem in _wrong_weights(checkpoint) if problem not in wrong]
    except OSError as error:
        if _is_gone(error):
            where = f" at {os.readlink(checkpoint)}, where it links to" if checkpoint.is_symlink() else ""
            return [*wrong, f"it is not there{where}"]
        return [*wrong, unreadable("it", error)]
    if "objects" not in (read_json(checkpoint / "context" / "io.json") or {}):
        wrong.append("context/io.json is missing or damaged")
    return wrong


def seems_whole(checkpoint: Path) -> bool:
    """Whether a look, such as `recipes status` takes all the time, finds nothing wrong that was written.

    By names and sizes; by the names that are written first and last where the checkpoint is so large (MOST_PARTS,
    MOST_METADATA) that looking at every file of it would burden its file system. Raises OSError.
    """
    if is_half(checkpoint):
        return False
    folder = checkpoint / manifest.FOLDER
    parts = len(os.listdir(folder)) if folder.is_dir() else 0
    if parts > MOST_PARTS or (size(weights_of(checkpoint) / ".metadata") or 0) > MOST_METADATA:
        return True
    wrong = keeps_from_resuming(problems(checkpoint))
    return not wrong or is_unreadable(wrong)


def keeps_from_resuming(wrong: list[str]) -> list[str]:
    """Those of a checkpoint's problems that keep a training from going on from it."""
    return [problem for problem in wrong if not problem.startswith(CONTEXT)]


def is_unreadable(wrong: list[str]) -> bool:
    """Whether problems say no more than that something cannot be read: then nobody knows what was written."""
    return bool(wrong) and all(UNREADABLE in problem for problem in wrong)


def unreadable(name: str, error: OSError) -> str:
    """The problem of a file that is there and cannot be read."""
    return f"{name}{UNREADABLE}{error.strerror or type(error).__name__}"


class Content(NamedTuple):
    """What a file of a checkpoint must hold: by the manifest, or else by what torch wrote. It is JSON as it stands."""

    name: str
    """within the checkpoint"""
    record: tuple[int, int] | None
    """size and CRC-32 of the manifest; None = it has none"""
    parts: Sequence[tuple[int, int]] = ()
    """without a record: where tensors lie in it, as (offset, length)"""


def damages(checkpoint: Path, *, named_in: Sequence[str] | None = None) -> list[str]:
    """Files of a checkpoint without `problems` that are not as they were written; reads all of it, in threads.

    With `named_in`, only the files that these problems name. Raises OSError and ValueError when it cannot even tell
    which files there are.
    """
    contents = contents_of(checkpoint)
    if named_in is not None:
        contents = [content for content in contents if any(words.startswith(f"{content.name} ") for words in named_in)]
    return damages_in(checkpoint, contents)


def damages_in(checkpoint: Path, contents: Sequence[Content]) -> list[str]:
    """Those of the files that are not as they were written; opens nothing else."""
    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers:
        return [problem for problem in readers.map(lambda content: _damage(checkpoint, content), contents) if problem]


def size(file: Path) -> int | None:
    """Bytes of a file; None when it does not exist, or no longer, or is none."""
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None


def bytes_of(folder: Path) -> int:
    """Size of all files of a checkpoint; a run that goes on may remove some meanwhile."""
    files = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    return sum(size(file) or 0 for file in files)


def saved_under(checkpoint: Path) -> dict[str, int]:
    """Sizes under Megatron's own names (`tensor_model_parallel_size`, ...) that it was saved with, and `ranks`.

    From `context/io.json`; empty when that has none.
    """
    try:
        objects = json.loads((checkpoint / "context" / "io.json").read_bytes())["objects"]
        strategy = _attributes(objects, "strategy")
        trainer = _attributes(objects, "trainer")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    sizes = {name: size for name, size in _counts(strategy).items() if name.endswith("_parallel_size")}
    ranks = [count for name, count in _counts(trainer).items() if name in ("devices", "num_nodes")]
    return sizes | ({"ranks": math.prod(ranks)} if len(ranks) == 2 else {})


def _counts(attributes: JsonObject) -> dict[str, int]:
    """The attributes that are whole numbers."""
    return {name: value for name, value in attributes.items() if type(value) is int}


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


def _wrong_sizes(checkpoint: Path) -> list[str]:
    """Files of the manifest that are gone or have another size."""
    records = manifest.read(checkpoint)
    return [words for name in records if (words := _misfit(checkpoint, name, records[name].size, exactly=True))]


def _misfit(checkpoint: Path, name: str, bytes_: int, *, exactly: bool) -> str:
    """What is wrong with the size of a file that must have so many bytes, or so many at least; '' = nothing."""
    try:
        facts = os.stat(checkpoint / name)
    except OSError as error:
        if not _is_gone(error):
            return unreadable(name, error)
        return f"{name} is missing" if not os.path.lexists(checkpoint / name) else f"{name} is no readable file"
    if not stat.S_ISREG(facts.st_mode):
        return f"{name} is no readable file"
    have = facts.st_size
    if have < bytes_:
        return f"{name} has {have} bytes, {bytes_ - have} too few"
    return f"{name} has {have} bytes, {have - bytes_} too many" if exactly and have > bytes_ else ""


def _is_gone(error: OSError) -> bool:
    """Whether an error is about what the folders hold; others come and go with the file system."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def _object_in(file: Path) -> JsonObject | None:
    """The object in a file, which has one when it is as it was written. Raises OSError when it cannot be read."""
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    except OSError as error:
        if not _is_gone(error):
            raise
        return None
    return data if isinstance(data, dict) else None


def _intact(file: Path) -> bool:
    """Whether an archive is there and intact. Raises OSError when it cannot be read."""
    try:
        return intact(file)
    except OSError as error:
        if not _is_gone(error):
            raise
        return False


def _wrong_weights(checkpoint: Path) -> list[str]:
    """What is wrong with the weights by what Megatron and torch write themselves. Raises OSError."""
    weights = weights_of(checkpoint)
    where = "weights/" if weights != checkpoint else ""
    facts = _object_in(weights / "metadata.json")
    wrong = []
    if facts is None and where:  # fsdp_dtensor has none
        wrong.append("weights/metadata.json, which is written last, is missing or damaged")
    by_torch = (facts or {}).get("sharded_backend", "torch_dist") == "torch_dist" or (weights / ".metadata").exists()
    if not (_intact(weights / "common.pt") if by_torch else (weights / "common.pt").is_file()):
        wrong.append(f"{where}common.pt is missing or damaged")
    if not by_torch:
        return wrong
    try:
        metadata = read(checkpoint)
    except ValueError as error:
        return [*wrong, str(error)]
    # A full disk or a killed save leaves short files.
    sizes = ((f"{where}{name}", least) for name, least in sorted(metadata.needed.items()))
    wrong += [words for name, least in sizes if (words := _misfit(checkpoint, name, least, exactly=False))]
    incomplete = [name for name, tensor in metadata.tensors.items() if tensor.saved_numbers < tensor.numbers]
    if incomplete and where:  # of fsdp_dtensor's uneven shards nobody here has seen one
        wrong.append(f"{len(incomplete)} tensors are stored in part, {incomplete[0]} first")
    return wrong


def contents_of(checkpoint: Path) -> list[Content]:
    """The files that can be checked. Opens the parts of the manifest, as many as nodes have written it, and .metadata.

    Raises OSError and ValueError.
    """
    records, weights = manifest.read(checkpoint), weights_of(checkpoint)
    contents = [Content(name, (record.size, record.crc)) for name, record in sorted(records.items())]
    places: dict[str, list[tuple[int, int]]] = {}
    if (weights / ".metadata").exists():
        for file, offset, length in sorted(read(checkpoint).places):
            places.setdefault((weights / file).relative_to(checkpoint).as_posix(), []).append((offset, length))
    return contents + [Content(name, None, parts) for name, parts in places.items() if name not in records]


def _damage(checkpoint: Path, content: Content) -> str:
    """How a file differs from what was written, the first of its tensors where torch alone tells; '' = not at all."""
    name = content.name
    try:
        if content.record:
            same = manifest.checksum(checkpoint / name) == manifest.FileRecord(*content.record)
            return "" if same else f"{name} is not as it was written: its checksum differs"
        broken = ((at, length) for at, length in content.parts if not intact(checkpoint / name, (at, length)))
        return next((f"{name} is damaged between bytes {at} and {at + length}" for at, length in broken), "")
    except OSError as error:
        return unreadable(name, error)
