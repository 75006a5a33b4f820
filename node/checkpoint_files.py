"""Whether a checkpoint is complete and as it was written. Standard library only.

Two records tell: the manifest (`node/manifest.py`), where there is one, and what torch itself writes, a table of
places and a zip archive with a CRC-32 for every tensor. Torch does not look at these when it loads (its reader is built
with MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS), so a flipped bit would be trained on.

A checkpoint whose complete manifest has the CRC-32 of every file is *verified*. A start looks at it (`look`): one open,
one fstat and a sample of the bytes of each file. What the manifest does not vouch for, and files that were changed
since, it reads entirely, up to READ_BYTES. `damages` reads every byte.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from superpod.node import manifest
from superpod.node.checkpoint_metadata import intact, intact_part, read, weights_of
from superpod.node.checkpoints import MARK, is_incomplete
from superpod.node.files import JsonObject, read_json

CONTEXT = "context/"
"""Problems that begin so do not keep a training from going on: only export and conversion read the context."""

UNREADABLE = " cannot be read: "
"""Problems that hold these words tell of the file system, or of this node, and not of what was written."""

MOST_PARTS, MOST_METADATA = 256, 16 << 20
"""Up to so many parts of a manifest, one a node, and bytes of torch's table of places, a look takes under a second."""

READ_BYTES = 64 << 30
"""Bytes of files without a checksum, or changed since, that a look reads; beyond that it checks their sizes."""


@dataclass(frozen=True)
class Findings:
    """What a look at a checkpoint has found."""

    problems: list[str]
    is_verified: bool
    """the manifest vouches for every byte of it, and the look has found nothing else"""


def problems(checkpoint: Path, *, marked: bool = True) -> list[str]:
    """What is wrong with a checkpoint, as far as names and sizes tell (see `damages`); empty when nothing is.

    Without `marked`, NeMo's mark of an unfinished save does not count: its files may be complete all the same.
    """
    return survey(checkpoint, marked=marked).problems


def survey(checkpoint: Path, *, marked: bool = True) -> Findings:
    """The same, and whether its manifest vouches for every byte. One stat of each file, and none is read."""
    wrong = ["marked as unfinished"] if marked and checkpoint.with_name(f"{checkpoint.name}{MARK}").exists() else []
    wrong += structure_problems(checkpoint)
    is_verified = False
    with contextlib.suppress(OSError, ValueError):  # which `structure_problems` has named
        listed = contents_of(checkpoint)
        is_verified = listed.is_verified
        wrong += in_threads(lambda content: _wrong_size(checkpoint, content), listed.contents)
    wrong = list(dict.fromkeys(wrong))
    return Findings(wrong, is_verified and not wrong)


def structure_problems(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint by its folders and its few files of metadata; looks at no other file."""
    try:
        os.listdir(checkpoint)
        wrong = _wrong_weights(checkpoint)
    except OSError as error:
        if _is_gone(error):
            where = f" at {os.readlink(checkpoint)}, where it links to" if checkpoint.is_symlink() else ""
            return [f"it is not there{where}"]
        return [unreadable("it", error)]
    if "objects" not in (read_json(checkpoint / "context" / "io.json") or {}):
        wrong.append("context/io.json is missing or damaged")
    return wrong


def seems_intact(checkpoint: Path) -> bool:
    """Whether a look, such as `recipes status` takes all the time, finds nothing wrong that was written.

    By names and sizes; by the names that are written first and last where the checkpoint is so large (MOST_PARTS,
    MOST_METADATA) that looking at every file of it would burden its file system. Raises OSError.
    """
    if is_incomplete(checkpoint):
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
    size: int
    """bytes by the manifest; without one, as many as torch's table places in it"""
    crc: int | None = None
    sample: int | None = None
    mtime_ns: int | None = None
    """as in the manifest; None = it does not say"""
    parts: Sequence[tuple[int, int]] = ()
    """without a CRC: where tensors lie in it, as (offset, length)"""


class Budget:
    """Bytes that may still be read, for threads that share them."""

    def __init__(self, bytes_: float) -> None:
        self._left, self._lock = bytes_, threading.Lock()

    def take(self, bytes_: int) -> bool:
        """Whether so many may be read."""
        with self._lock:
            if bytes_ > self._left:
                return False
            self._left -= bytes_
            return True


def look(checkpoint: Path, *, named_in: Sequence[str] | None = None) -> Findings:
    """Check sizes and samples of all files, and read those that the manifest does not vouch for (READ_BYTES).

    With `named_in`, only the files that these problems name. Raises OSError and ValueError when it cannot even tell
    which files there are.
    """
    listed = contents_of(checkpoint)
    contents = [content for content in listed.contents if named_in is None or _is_named(content, named_in)]
    found = look_at(checkpoint, contents, Budget(READ_BYTES))
    return Findings(found, listed.is_verified and not found)


def look_at(checkpoint: Path, contents: Sequence[Content], budget: Budget) -> list[str]:
    """Those of the files that are not as they were written, as far as a look tells; opens nothing else."""
    return in_threads(lambda content: _damage(checkpoint, content, budget), contents)


def damages(checkpoint: Path, *, named_in: Sequence[str] | None = None) -> list[str]:
    """Files of a checkpoint without `problems` that are not as they were written; reads all of it, in threads.

    With `named_in`, only the files that these problems name. Raises OSError and ValueError when it cannot even tell
    which files there are.
    """
    contents = contents_of(checkpoint).contents
    return damages_in(checkpoint, [c for c in contents if named_in is None or _is_named(c, named_in)])


def damages_in(checkpoint: Path, contents: Sequence[Content]) -> list[str]:
    """Those of the files that are not as they were written, every byte read; opens nothing else."""
    return in_threads(lambda content: _damage(checkpoint, content, None), contents)


def in_threads(check: Callable[[Content], str], contents: Sequence[Content]) -> list[str]:
    """What a check says of each file, where it says something. Threads, for most of the time passes in waiting."""
    count = max(1, min(manifest.READERS, len(contents)))
    found = [""] * len(contents)

    def check_share(share: int) -> None:  # not a task per file: there may be tens of thousands
        for number in range(share, len(contents), count):
            found[number] = check(contents[number])

    with ThreadPoolExecutor(count) as readers:
        list(readers.map(check_share, range(count)))
    return [problem for problem in found if problem]


def _is_named(content: Content, problems: Sequence[str]) -> bool:
    return any(words.startswith(f"{content.name} ") for words in problems)


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


def _wrong_size(checkpoint: Path, content: Content) -> str:
    """What is wrong with the size of a file, by one stat; '' = nothing."""
    try:
        return _misfit(content, os.stat(checkpoint / content.name))
    except OSError as error:
        return _not_there(checkpoint, content.name, error)


def _misfit(content: Content, facts: os.stat_result) -> str:
    """What is wrong with the size of a file; '' = nothing."""
    if not stat.S_ISREG(facts.st_mode):
        return f"{content.name} is no readable file"
    more = facts.st_size - content.size
    is_exact = content.crc is not None or content.sample is not None  # torch's table says where the last tensor ends
    if more < 0 or (more > 0 and is_exact):
        return f"{content.name} has {facts.st_size} bytes, {abs(more)} too {'many' if more > 0 else 'few'}"
    return ""


def _not_there(checkpoint: Path, name: str, error: OSError) -> str:
    if not _is_gone(error):
        return unreadable(name, error)
    return f"{name} is no readable file" if os.path.lexists(checkpoint / name) else f"{name} is missing"


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
    incomplete = [name for name, tensor in metadata.tensors.items() if tensor.saved_numbers < tensor.numbers]
    if incomplete and where:  # of fsdp_dtensor's uneven shards nobody here has seen one
        wrong.append(f"{len(incomplete)} tensors are stored in part, {incomplete[0]} first")
    return wrong


@dataclass(frozen=True)
class Listed:
    """The files of a checkpoint that can be checked."""

    contents: list[Content]
    is_verified: bool
    """the manifest is complete and has the CRC-32 of every file"""


def contents_of(checkpoint: Path) -> Listed:
    """The files of a checkpoint. Opens the parts of the manifest; and .metadata, where these do not name every file.

    Raises OSError and ValueError.
    """
    listed, weights = manifest.read(checkpoint), weights_of(checkpoint)
    records = listed.records
    is_summed = bool(records) and all(record.crc is not None for record in records.values())
    places: dict[str, list[tuple[int, int]]] = {}
    if not (listed.is_complete and is_summed) and (weights / ".metadata").exists():
        for file, offset, length in sorted(read(checkpoint).places):
            places.setdefault((weights / file).relative_to(checkpoint).as_posix(), []).append((offset, length))
    contents = [
        Content(name, *record, parts=() if record.crc is not None else places.get(name, ()))
        for name, record in sorted(records.items())
    ]
    for name, parts in places.items():
        if name not in records:
            contents.append(Content(name, max(offset + length for offset, length in parts), parts=parts))
    # The manifest of an earlier version does not say how many parts it has; torch's table names all files of weights.
    is_complete = listed.is_complete or (bool(places) and places.keys() <= records.keys())
    return Listed(contents, is_summed and is_complete)


def _damage(checkpoint: Path, content: Content, budget: Budget | None) -> str:
    """How a file differs from what was written; '' = not at all, as far as was read. Without a budget, all is."""
    name = content.name
    try:
        # A pipe in place of the file would wait for a writer.
        handle = os.open(f"{checkpoint}/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return _not_there(checkpoint, name, error)
    try:
        facts = os.fstat(handle)
        if wrong := _misfit(content, facts):
            return wrong
        is_trusted = content.crc is not None and content.mtime_ns == facts.st_mtime_ns
        if budget is None or (not is_trusted and budget.take(content.size)):
            return _damage_in_bytes(handle, content)
        if content.sample is not None and manifest.sample_of(handle, content.size) != content.sample:
            return f"{name} is not as it was written: a sample of its bytes differs"
    except OSError as error:
        return unreadable(name, error)
    finally:
        os.close(handle)
    return ""


def _damage_in_bytes(handle: int, content: Content) -> str:
    """How the bytes of a file differ from what was written, the first of its tensors where torch alone tells."""
    if content.crc is not None:
        same = manifest.crc_of(handle) == content.crc
        return "" if same else f"{content.name} is not as it was written: its checksum differs"
    if content.sample is not None and manifest.sample_of(handle, content.size) != content.sample:
        return f"{content.name} is not as it was written: a sample of its bytes differs"
    broken = ((at, length) for at, length in content.parts if not intact_part(handle, at, length))
    return next((f"{content.name} is damaged between bytes {at} and {at + length}" for at, length in broken), "")
