"""Check that a checkpoint is complete and unchanged since it was written. Standard library only.

The files are compared with the manifest (`manifest.py`), if there is one, and with the metadata that torch writes: the
offsets and lengths in `.metadata`, and a zip archive with a CRC-32 for every tensor. Torch ignores these CRCs when it
loads a checkpoint (its reader is built with MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS), and would load a flipped bit.

A checkpoint is *verified* if its manifest is complete and has the CRC-32 of every file. When a run starts,
`check_samples` opens each file and compares its size and a sample of its bytes. Files that have no CRC-32 in the
manifest or have changed since are read completely, up to READ_BYTES in total. `check_all_bytes` reads every byte.
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

from superpod.common.json_files import JsonObject, read_json
from superpod.runtime.checkpoints import manifest
from superpod.runtime.checkpoints.checkpoint_folder import MARK, is_incomplete
from superpod.runtime.checkpoints.checkpoint_metadata import is_intact, is_part_intact, read, weights_of

CONTEXT = "context/"
"""Folder of a checkpoint whose problems do not prevent resuming, since only export and conversion read it."""

MAX_PARTS, MAX_METADATA_BYTES = 256, 16 << 20
"""Maximum numbers of manifest parts (one per node) and bytes of `.metadata` for which `check_sizes` takes under 1 s."""

READ_BYTES = 64 << 30
"""Maximum bytes that `check_samples` reads from files without a valid checksum; of other files, it checks the size."""


class Problem(NamedTuple):
    """A problem with a checkpoint. All fields are JSON values."""

    text: str
    file: str | None = None
    """path of the file relative to the checkpoint; None if the problem concerns several files"""
    is_unreadable: bool = False
    """whether reading failed, so that the content is unknown: a problem of the file system or of this node"""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of_file(cls, name: str, defect: str) -> Problem:
        """Create a problem with the file `name`; its text is `NAME DEFECT`, such as `common.pt is missing`."""
        return cls(f"{name} {defect}", name)

    @classmethod
    def unreadable(cls, error: Exception, name: str | None = None) -> Problem:
        """Create a problem with the file `name`, or a checkpoint if it is None, that exists but cannot be read."""
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return cls(f"{name or 'it'} cannot be read: {reason}", name, is_unreadable=True)


@dataclass(frozen=True)
class Findings:
    """The result of checking a checkpoint."""

    problems: list[Problem]
    is_verified: bool
    """whether the manifest has the checksum of every file, and no problem was found"""


def check_sizes(checkpoint: Path, *, marked: bool = True) -> Findings:
    """Check the names and sizes of a checkpoint's files with one stat per file, without reading the weights.

    With `marked`, NeMo's mark of an unfinished save counts as a problem.
    """
    problems: list[Problem] = []
    if marked and checkpoint.with_name(f"{checkpoint.name}{MARK}").exists():
        problems.append(Problem("marked as unfinished"))
    problems += structure_problems(checkpoint)
    is_verified = False
    with contextlib.suppress(OSError, ValueError):  # reported by `structure_problems`
        listed_contents = contents_of(checkpoint)
        is_verified = listed_contents.is_verified
        problems += check_in_threads(lambda content: _check_size(checkpoint, content), listed_contents.contents)
    problems = list(dict.fromkeys(problems))
    return Findings(problems, is_verified and not problems)


def structure_problems(checkpoint: Path) -> list[Problem]:
    """Return the problems with the folders and metadata files of a checkpoint."""
    try:
        os.listdir(checkpoint)
        problems = _weights_problems(checkpoint)
    except OSError as error:
        if _is_gone(error):
            target = f": it links to {os.readlink(checkpoint)}" if checkpoint.is_symlink() else ""
            return [Problem(f"it does not exist{target}")]
        return [Problem.unreadable(error)]
    if "objects" not in (read_json(checkpoint / "context" / "io.json") or {}):
        problems.append(Problem.of_file("context/io.json", "is missing or corrupt"))
    return problems


def seems_intact(checkpoint: Path) -> bool:
    """Return whether the names and sizes of a checkpoint's files are correct. Raises OSError.

    `recipes status` calls this every few seconds. Of a large checkpoint (MAX_PARTS, MAX_METADATA_BYTES), only the files
    that are written first and last are checked, since a stat of every file would burden the file system.
    """
    if is_incomplete(checkpoint):
        return False
    folder = checkpoint / manifest.FOLDER
    parts = len(os.listdir(folder)) if folder.is_dir() else 0
    if parts > MAX_PARTS or (size(weights_of(checkpoint) / ".metadata") or 0) > MAX_METADATA_BYTES:
        return True
    blockers = resume_blockers(check_sizes(checkpoint).problems)
    return not blockers or is_unreadable(blockers)


def resume_blockers(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems that prevent resuming from a checkpoint."""
    return [problem for problem in problems if not (problem.file or "").startswith(CONTEXT)]


def is_unreadable(problems: Sequence[Problem]) -> bool:
    """Return whether there are problems, and all are failures to read, so that the checkpoint's content is unknown."""
    return bool(problems) and all(problem.is_unreadable for problem in problems)


class Content(NamedTuple):
    """The expected content of a file, from the manifest or from `.metadata`. All fields are JSON values."""

    name: str
    """path relative to the checkpoint"""
    size: int
    """bytes, from the manifest; without a manifest, the end of the last tensor in `.metadata`"""
    crc: int | None = None
    sample: int | None = None
    mtime_ns: int | None = None
    """this and the two above are from the manifest; None = unknown"""
    parts: Sequence[tuple[int, int]] = ()
    """(offset, length) of its tensors, if the CRC is unknown"""


class Budget:
    """The number of bytes that several threads may read in total; thread-safe."""

    def __init__(self, max_bytes: float) -> None:
        self._left, self._lock = max_bytes, threading.Lock()

    def take(self, read_bytes: int) -> bool:
        """Subtract `read_bytes` if as many are left; return whether they were."""
        with self._lock:
            if read_bytes > self._left:
                return False
            self._left -= read_bytes
            return True


def check_samples(checkpoint: Path, *, files: Container[str | None] | None = None) -> Findings:
    """Check sizes and samples of `files` (None = all), and read those without a valid checksum, up to READ_BYTES.

    Raises:
        OSError: the checkpoint cannot be read.
        ValueError: .metadata is corrupt.
    """
    listed_contents = contents_of(checkpoint)
    contents = [content for content in listed_contents.contents if files is None or content.name in files]
    content_problems = check_contents(checkpoint, contents, Budget(READ_BYTES))
    return Findings(content_problems, listed_contents.is_verified and not content_problems)


def check_all_bytes(checkpoint: Path) -> list[Problem]:
    """Read every byte of a checkpoint and return the problems of its files.

    Raises OSError, and ValueError if .metadata is corrupt.
    """
    return check_contents(checkpoint, contents_of(checkpoint).contents)


def check_contents(checkpoint: Path, contents: Sequence[Content], budget: Budget | None = None) -> list[Problem]:
    """Check files like `check_samples`, reading at most the bytes in `budget`; if it is None, read every byte."""
    return check_in_threads(lambda content: _check_file(checkpoint, content, budget), contents)


def check_in_threads(check: Callable[[Content], Problem | None], contents: Sequence[Content]) -> list[Problem]:
    """Call `check` for each file in threads, which mostly wait for the file system; return the problems."""
    count = max(1, min(manifest.READERS, len(contents)))
    found: list[Problem | None] = [None] * len(contents)

    def check_share(share: int) -> None:  # one task per thread, since there may be tens of thousands of files
        for number in range(share, len(contents), count):
            found[number] = check(contents[number])

    with ThreadPoolExecutor(count) as readers:
        list(readers.map(check_share, range(count)))
    return [problem for problem in found if problem]


def size(file: Path) -> int | None:
    """Return the size of a file in bytes; None if it does not exist or is not a regular file."""
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None


def total_bytes(folder: Path) -> int:
    """Return the total bytes of the files in a folder, ignoring files that a running job removes meanwhile."""
    files = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    return sum(size(file) or 0 for file in files)


def saved_layout(checkpoint: Path) -> dict[str, int]:
    """Return the layout of a checkpoint from context/io.json: NeMo's `*_parallel_size` and `ranks`; {} if unknown."""
    try:
        objects = json.loads((checkpoint / "context" / "io.json").read_bytes())["objects"]
        strategy = _attributes(objects, "strategy")
        trainer = _attributes(objects, "trainer")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    sizes = {name: size for name, size in _counts(strategy).items() if name.endswith("_parallel_size")}
    ranks = [count for name, count in _counts(trainer).items() if name in ("devices", "num_nodes")]
    if len(ranks) == 2:
        sizes["ranks"] = math.prod(ranks)
    return sizes


def _counts(attributes: JsonObject) -> dict[str, int]:
    """Return the attributes that are integers."""
    return {name: value for name, value in attributes.items() if type(value) is int}


def _attributes(objects: JsonObject, kind: str) -> JsonObject:
    """Return the attributes of the trainer, or of its strategy, from the `objects` of Fiddle's JSON.

    `kind` is "trainer" or "strategy".
    """
    # Fiddle writes the path of every value: the attributes of the trainer have paths below <root>.trainer.
    prefix = "<root>.trainer.strategy" if kind == "strategy" else "<root>.trainer"
    for node in objects.values():
        items = [(name, item) for name, item in node.get("items", []) if str(name).startswith("Attr(")]
        attributes = {name[len("Attr(name='") : -2]: item for name, item in items if isinstance(item, dict)}
        if any(f"{prefix}.{name}" in (item.get("paths") or []) for name, item in attributes.items()):
            return {name: item.get("value") for name, item in attributes.items()}
    return {}


def _check_size(checkpoint: Path, content: Content) -> Problem | None:
    """Return the problem with the size of a file, from one stat; None if it is correct."""
    try:
        return _size_problem(content, os.stat(checkpoint / content.name))
    except OSError as error:
        return _access_problem(checkpoint, content.name, error)


def _size_problem(content: Content, facts: os.stat_result) -> Problem | None:
    """Return the problem with the type or size of a file, from its stat result; None if both are correct."""
    if not stat.S_ISREG(facts.st_mode):
        return Problem.of_file(content.name, "is not a regular file")
    excess_bytes = facts.st_size - content.size
    is_exact = content.crc is not None or content.sample is not None  # .metadata only has the end of the last tensor
    if excess_bytes < 0 or (excess_bytes > 0 and is_exact):
        deviation = "too many" if excess_bytes > 0 else "too few"
        return Problem.of_file(content.name, f"has {facts.st_size} bytes, {abs(excess_bytes)} {deviation}")
    return None


def _access_problem(checkpoint: Path, name: str, error: OSError) -> Problem:
    if not _is_gone(error):
        return Problem.unreadable(error, name)
    return Problem.of_file(name, "is not a regular file" if os.path.lexists(checkpoint / name) else "is missing")


def _is_gone(error: OSError) -> bool:
    """Return whether an error means that the file or folder does not exist. Other errors may be temporary."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def _read_object(file: Path) -> JsonObject | None:
    """Return the JSON object in a file; None if it is missing or corrupt. Raises OSError if it cannot be read."""
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    except OSError as error:
        if not _is_gone(error):
            raise
        return None
    return data if isinstance(data, dict) else None


def _is_intact(file: Path) -> bool:
    """Return whether an archive exists and is intact. Raises OSError if it cannot be read."""
    try:
        return is_intact(file)
    except OSError as error:
        if not _is_gone(error):
            raise
        return False


def _weights_problems(checkpoint: Path) -> list[Problem]:
    """Return the problems with the metadata files of the weights, which Megatron and torch write. Raises OSError."""
    weights = weights_of(checkpoint)
    prefix = "weights/" if weights != checkpoint else ""
    facts = _read_object(weights / "metadata.json")
    problems: list[Problem] = []
    if facts is None and prefix:  # fsdp_dtensor does not have this file
        name = "weights/metadata.json"
        problems.append(Problem(f"{name}, which is written last, is missing or corrupt", name))
    is_torch_dist = (facts or {}).get("sharded_backend", "torch_dist") == "torch_dist" or (
        weights / ".metadata"
    ).exists()
    common = weights / "common.pt"
    if not (_is_intact(common) if is_torch_dist else common.is_file()):
        problems.append(Problem.of_file(f"{prefix}common.pt", "is missing or corrupt"))
    if not is_torch_dist:
        return problems
    try:
        metadata = read(checkpoint)
    except ValueError as error:
        return [*problems, Problem(str(error))]
    incomplete_tensors = [name for name, tensor in metadata.tensors.items() if tensor.saved_elements < tensor.elements]
    if incomplete_tensors and prefix:  # not tested with the uneven shards of fsdp_dtensor
        problems.append(Problem(f"{len(incomplete_tensors)} tensors are incomplete, such as {incomplete_tensors[0]}"))
    return problems


@dataclass(frozen=True)
class FileList:
    """The files of a checkpoint whose content can be verified."""

    contents: list[Content]
    is_verified: bool
    """whether the manifest is complete and has the CRC-32 of every file"""


def contents_of(checkpoint: Path) -> FileList:
    """List the files of a checkpoint from the manifest, and also from `.metadata` if the manifest is incomplete.

    Raises OSError, and ValueError if .metadata is corrupt.
    """
    listed, weights = manifest.read(checkpoint), weights_of(checkpoint)
    records = listed.records
    has_checksums = bool(records) and all(record.crc is not None for record in records.values())
    places: dict[str, list[tuple[int, int]]] = {}
    if not (listed.is_complete and has_checksums) and (weights / ".metadata").exists():
        for file, offset, length in sorted(read(checkpoint).places):
            places.setdefault((weights / file).relative_to(checkpoint).as_posix(), []).append((offset, length))
    contents = [
        Content(name, *record, parts=() if record.crc is not None else places.get(name, ()))
        for name, record in sorted(records.items())
    ]
    for name, parts in places.items():
        if name not in records:
            contents.append(Content(name, max(offset + length for offset, length in parts), parts=parts))
    # Manifests of earlier versions do not contain the number of parts; .metadata lists all weight files.
    is_complete = listed.is_complete or (bool(places) and places.keys() <= records.keys())
    return FileList(contents, has_checksums and is_complete)


def _check_file(checkpoint: Path, content: Content, budget: Budget | None) -> Problem | None:
    """Return the problem with a file, None if there is none; if `budget` is None, read every byte."""
    name = content.name
    try:
        # O_NONBLOCK: if the file has been replaced by a pipe, opening it would wait for a writer.
        handle = os.open(f"{checkpoint}/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return _access_problem(checkpoint, name, error)
    try:
        facts = os.fstat(handle)
        problem = _size_problem(content, facts)
        if problem:
            return problem
        is_trusted = content.crc is not None and content.mtime_ns == facts.st_mtime_ns
        if budget is None or (not is_trusted and budget.take(content.size)):
            return _check_bytes(handle, content)
        if content.sample is not None and manifest.sample_of(handle, content.size) != content.sample:
            return Problem.of_file(name, "has changed since it was written: a sample of its bytes differs")
    except OSError as error:
        return Problem.unreadable(error, name)
    finally:
        os.close(handle)
    return None


def _check_bytes(handle: int, content: Content) -> Problem | None:
    """Return the problem with the bytes of an open file, from its checksum, or else from the CRC of each tensor."""
    if content.crc is not None:
        if manifest.crc_of(handle) == content.crc:
            return None
        return Problem.of_file(content.name, "has changed since it was written: its checksum differs")
    if content.sample is not None and manifest.sample_of(handle, content.size) != content.sample:
        return Problem.of_file(content.name, "has changed since it was written: a sample of its bytes differs")
    for at, length in content.parts:
        if not is_part_intact(handle, at, length):
            return Problem.of_file(content.name, f"is corrupt between bytes {at} and {at + length}")
    return None
