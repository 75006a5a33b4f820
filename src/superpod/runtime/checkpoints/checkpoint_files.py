"""Checks that a checkpoint is complete and unchanged since it was written. Standard library only.

There are two references: the manifest (`manifest.py`), if there is one, and what torch itself writes: the table of
places in `.metadata`, and a zip archive with a CRC-32 for every tensor. Torch does not check these when it loads (its
reader is built with MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS): it would train on a flipped bit.

A checkpoint whose complete manifest has the CRC-32 of every file is *verified*. When a run starts, `check_samples`
opens each file, compares its size and a sample of its bytes, and reads entirely (up to READ_BYTES in total) the files
without a CRC-32 in the manifest and those changed since. `check_all_bytes` reads every byte.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import threading
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from superpod.common.files import JsonObject, read_json
from superpod.runtime.checkpoints import manifest
from superpod.runtime.checkpoints.checkpoint_metadata import intact, intact_part, read, weights_of
from superpod.runtime.checkpoints.checkpoints import MARK, is_incomplete

CONTEXT = "context/"
"""Problems of files below this do not prevent resuming: only export and conversion read the context."""

MOST_PARTS, MOST_METADATA = 256, 16 << 20
"""Parts of a manifest (one per node) and bytes of `.metadata` up to which `check_sizes` takes less than a second."""

READ_BYTES = 64 << 30
"""Most bytes that `check_samples` reads of files without a valid checksum; of further files it checks the size."""


class Problem(NamedTuple):
    """Something wrong with a checkpoint; plain values, which JSON can hold."""

    text: str
    file: str | None = None
    """the file's name within the checkpoint, if it concerns one"""
    is_unreadable: bool = False
    """whether it is a problem of the file system or this node, not of the checkpoint"""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of_file(cls, name: str, what: str) -> Problem:
        """`NAME WHAT`."""
        return cls(f"{name} {what}", name)

    @classmethod
    def unreadable(cls, error: Exception, name: str | None = None) -> Problem:
        """Of a file, or of the checkpoint, that exists and cannot be read."""
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return cls(f"{name or 'it'} cannot be read: {reason}", name, is_unreadable=True)


@dataclass(frozen=True)
class Findings:
    """The result of a check of a checkpoint."""

    problems: list[Problem]
    is_verified: bool
    """the manifest has the checksum of every file, and no problem was found"""


def size_problems(checkpoint: Path, *, marked: bool = True) -> list[Problem]:
    """What is wrong with a checkpoint by names and sizes (`check_all_bytes` reads the bytes); [] = nothing.

    Without `marked`, NeMo's mark of an unfinished save is ignored: all files may be there nevertheless.
    """
    return check_sizes(checkpoint, marked=marked).problems


def check_sizes(checkpoint: Path, *, marked: bool = True) -> Findings:
    """As `problems`, and whether the checkpoint is verified; one stat per file, and no file of weights is read."""
    wrong: list[Problem] = []
    if marked and checkpoint.with_name(f"{checkpoint.name}{MARK}").exists():
        wrong.append(Problem("marked as unfinished"))
    wrong += structure_problems(checkpoint)
    is_verified = False
    with contextlib.suppress(OSError, ValueError):  # `structure_problems` has reported them
        listed = contents_of(checkpoint)
        is_verified = listed.is_verified
        wrong += in_threads(lambda content: _wrong_size(checkpoint, content), listed.contents)
    wrong = list(dict.fromkeys(wrong))
    return Findings(wrong, is_verified and not wrong)


def structure_problems(checkpoint: Path) -> list[Problem]:
    """What is wrong with a checkpoint's folders and its few metadata files; checks no other file."""
    try:
        os.listdir(checkpoint)
        wrong = _wrong_weights(checkpoint)
    except OSError as error:
        if _is_gone(error):
            where = f" at {os.readlink(checkpoint)}, where it links to" if checkpoint.is_symlink() else ""
            return [Problem(f"it is not there{where}")]
        return [Problem.unreadable(error)]
    if "objects" not in (read_json(checkpoint / "context" / "io.json") or {}):
        wrong.append(Problem.of_file("context/io.json", "is missing or damaged"))
    return wrong


def seems_intact(checkpoint: Path) -> bool:
    """Whether a quick check, as `recipes status` makes one every few seconds, finds no damage. Raises OSError.

    By names and sizes; for a checkpoint so large (MOST_PARTS, MOST_METADATA) that a stat of every file would load the
    file system, only by the files that are written first and last.
    """
    if is_incomplete(checkpoint):
        return False
    folder = checkpoint / manifest.FOLDER
    parts = len(os.listdir(folder)) if folder.is_dir() else 0
    if parts > MOST_PARTS or (size(weights_of(checkpoint) / ".metadata") or 0) > MOST_METADATA:
        return True
    wrong = resume_blockers(size_problems(checkpoint))
    return not wrong or is_unreadable(wrong)


def resume_blockers(wrong: Sequence[Problem]) -> list[Problem]:
    """Those of a checkpoint's problems that prevent resuming from it."""
    return [problem for problem in wrong if not (problem.file or "").startswith(CONTEXT)]


def is_unreadable(wrong: Sequence[Problem]) -> bool:
    """Whether all problems are of the file system: what the checkpoint holds is then unknown."""
    return bool(wrong) and all(problem.is_unreadable for problem in wrong)


class Content(NamedTuple):
    """What a file of a checkpoint must hold, by the manifest or else by torch; plain values, which JSON can hold."""

    name: str
    """within the checkpoint"""
    size: int
    """bytes by the manifest; without one, the end of the last tensor by `.metadata`"""
    crc: int | None = None
    sample: int | None = None
    mtime_ns: int | None = None
    """as in the manifest; None = unknown"""
    parts: Sequence[tuple[int, int]] = ()
    """without a CRC: (offset, length) of its tensors"""


class Budget:
    """The number of bytes that threads together may still read."""

    def __init__(self, bytes_: float) -> None:
        self._left, self._lock = bytes_, threading.Lock()

    def take(self, bytes_: int) -> bool:
        """Whether so many may be read; if so, they are subtracted."""
        with self._lock:
            if bytes_ > self._left:
                return False
            self._left -= bytes_
            return True


def check_samples(checkpoint: Path, *, files: Container[str | None] | None = None) -> Findings:
    """Check sizes and samples of all files, and read those without a valid checksum, up to READ_BYTES.

    With `files`, only those of these names. Raises OSError, and ValueError if .metadata is damaged.
    """
    listed = contents_of(checkpoint)
    contents = [content for content in listed.contents if files is None or content.name in files]
    found = check_contents(checkpoint, contents, Budget(READ_BYTES))
    return Findings(found, listed.is_verified and not found)


def check_all_bytes(checkpoint: Path) -> list[Problem]:
    """How the files of a checkpoint differ from what was written; reads every byte.

    Raises OSError, and ValueError if .metadata is damaged.
    """
    return check_contents(checkpoint, contents_of(checkpoint).contents)


def check_contents(checkpoint: Path, contents: Sequence[Content], budget: Budget | None = None) -> list[Problem]:
    """Check files like `check_samples`, within a budget of bytes; without a budget, read every byte."""
    return in_threads(lambda content: _damage(checkpoint, content, budget), contents)


def in_threads(check: Callable[[Content], Problem | None], contents: Sequence[Content]) -> list[Problem]:
    """The problems that `check` finds in files, in threads, which mostly wait for the file system."""
    count = max(1, min(manifest.READERS, len(contents)))
    found: list[Problem | None] = [None] * len(contents)

    def check_share(share: int) -> None:  # not a task per file: there may be tens of thousands
        for number in range(share, len(contents), count):
            found[number] = check(contents[number])

    with ThreadPoolExecutor(count) as readers:
        list(readers.map(check_share, range(count)))
    return [problem for problem in found if problem]


def size(file: Path) -> int | None:
    """Bytes of a file; None if it does not exist or is not a regular file."""
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None


def total_bytes(folder: Path) -> int:
    """Size of all files of a checkpoint; a training that is running may remove some meanwhile."""
    files = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    return sum(size(file) or 0 for file in files)


def saved_layout(checkpoint: Path) -> dict[str, int]:
    """`tensor_model_parallel_size`, ... and `ranks` of the training that saved it, by context/io.json; {} = unknown."""
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
    """The attributes that are integers."""
    return {name: value for name, value in attributes.items() if type(value) is int}


def _attributes(objects: JsonObject, kind: str) -> JsonObject:
    """The plain attributes of the trainer, or of its strategy, in fiddle's JSON."""
    # fiddle writes the path of every value: the trainer is the object whose attributes lie under <root>.trainer.
    whose = "<root>.trainer.strategy" if kind == "strategy" else "<root>.trainer"
    for node in objects.values():
        items = [(name, item) for name, item in node.get("items", []) if str(name).startswith("Attr(")]
        plain = {name[len("Attr(name='") : -2]: item for name, item in items if isinstance(item, dict)}
        if any(f"{whose}.{name}" in (item.get("paths") or []) for name, item in plain.items()):
            return {name: item.get("value") for name, item in plain.items()}
    return {}


def _wrong_size(checkpoint: Path, content: Content) -> Problem | None:
    """What is wrong with the size of a file, by one stat."""
    try:
        return _misfit(content, os.stat(checkpoint / content.name))
    except OSError as error:
        return _not_there(checkpoint, content.name, error)


def _misfit(content: Content, facts: os.stat_result) -> Problem | None:
    """What is wrong with the size of a file."""
    if not stat.S_ISREG(facts.st_mode):
        return Problem.of_file(content.name, "is not a regular file")
    more = facts.st_size - content.size
    is_exact = content.crc is not None or content.sample is not None  # torch's table says where the last tensor ends
    if more < 0 or (more > 0 and is_exact):
        too = "too many" if more > 0 else "too few"
        return Problem.of_file(content.name, f"has {facts.st_size} bytes, {abs(more)} {too}")
    return None


def _not_there(checkpoint: Path, name: str, error: OSError) -> Problem:
    if not _is_gone(error):
        return Problem.unreadable(error, name)
    return Problem.of_file(name, "is not a regular file" if os.path.lexists(checkpoint / name) else "is missing")


def _is_gone(error: OSError) -> bool:
    """Whether the file or folder does not exist; other errors may be temporary."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def _object_in(file: Path) -> JsonObject | None:
    """The JSON object in a file; None if it is missing or damaged. Raises OSError if it cannot be read."""
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
    """Whether an archive exists and is intact. Raises OSError if it cannot be read."""
    try:
        return intact(file)
    except OSError as error:
        if not _is_gone(error):
            raise
        return False


def _wrong_weights(checkpoint: Path) -> list[Problem]:
    """What is wrong with the weights' metadata that Megatron and torch write. Raises OSError."""
    weights = weights_of(checkpoint)
    where = "weights/" if weights != checkpoint else ""
    facts = _object_in(weights / "metadata.json")
    wrong: list[Problem] = []
    if facts is None and where:  # fsdp_dtensor has none
        name = "weights/metadata.json"
        wrong.append(Problem(f"{name}, which is written last, is missing or damaged", name))
    by_torch = (facts or {}).get("sharded_backend", "torch_dist") == "torch_dist" or (weights / ".metadata").exists()
    if not (_intact(weights / "common.pt") if by_torch else (weights / "common.pt").is_file()):
        wrong.append(Problem.of_file(f"{where}common.pt", "is missing or damaged"))
    if not by_torch:
        return wrong
    try:
        metadata = read(checkpoint)
    except ValueError as error:
        return [*wrong, Problem(str(error))]
    incomplete = [name for name, tensor in metadata.tensors.items() if tensor.saved_numbers < tensor.numbers]
    if incomplete and where:  # not tested with fsdp_dtensor's uneven shards
        wrong.append(Problem(f"{len(incomplete)} tensors are stored in part, {incomplete[0]} first"))
    return wrong


@dataclass(frozen=True)
class Listed:
    """The files of a checkpoint that can be checked."""

    contents: list[Content]
    is_verified: bool
    """the manifest is complete and has the CRC-32 of every file"""


def contents_of(checkpoint: Path) -> Listed:
    """The files of a checkpoint, from the manifest, and from `.metadata` if the manifest is incomplete.

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
    # A manifest of an earlier version does not say how many parts it has; .metadata names all files of weights.
    is_complete = listed.is_complete or (bool(places) and places.keys() <= records.keys())
    return Listed(contents, is_summed and is_complete)


def _damage(checkpoint: Path, content: Content, budget: Budget | None) -> Problem | None:
    """How a file differs from what was written; without a budget, every byte is read."""
    name = content.name
    try:
        # Opening a pipe in place of the file would otherwise wait for a writer.
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
            return Problem.of_file(name, "is not as it was written: a sample of its bytes differs")
    except OSError as error:
        return Problem.unreadable(error, name)
    finally:
        os.close(handle)
    return None


def _damage_in_bytes(handle: int, content: Content) -> Problem | None:
    """How the bytes of a file differ from what was written; without a manifest, the first damaged tensor."""
    if content.crc is not None:
        if manifest.crc_of(handle) == content.crc:
            return None
        return Problem.of_file(content.name, "is not as it was written: its checksum differs")
    if content.sample is not None and manifest.sample_of(handle, content.size) != content.sample:
        return Problem.of_file(content.name, "is not as it was written: a sample of its bytes differs")
    for at, length in content.parts:
        if not intact_part(handle, at, length):
            return Problem.of_file(content.name, f"is damaged between bytes {at} and {at + length}")
    return None
