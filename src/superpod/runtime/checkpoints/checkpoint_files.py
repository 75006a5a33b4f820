"""Check that a checkpoint is complete and unchanged since it was written. Standard library only.

The files are compared with the manifest (`manifest.py`), if there is one, and with what torch writes: the offsets and
lengths in `.metadata`, and a zip archive with a CRC-32 for every tensor. Torch ignores these CRCs when it loads (its
reader is built with MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS), and would train with a flipped bit.

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
"""Problems with files in this folder do not prevent resuming: only export and conversion read the context."""

MAX_PARTS, MAX_METADATA_BYTES = 256, 16 << 20
"""Maximum numbers of manifest parts (one per node) and bytes of `.metadata` for which `check_sizes` takes under 1 s."""

READ_BYTES = 64 << 30
"""Maximum bytes that `check_samples` reads from files without a valid checksum; for the rest it checks the size."""


class Problem(NamedTuple):
    """A problem with a checkpoint. All fields are JSON values."""

    text: str
    file: str | None = None
    """the file's name within the checkpoint, if the problem is about one file"""
    is_unreadable: bool = False
    """whether the file system or this node has a problem, so the content is unknown"""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of_file(cls, name: str, what: str) -> Problem:
        """Create a problem with a file; its text is `NAME WHAT`."""
        return cls(f"{name} {what}", name)

    @classmethod
    def unreadable(cls, error: Exception, name: str | None = None) -> Problem:
        """Create a problem with a file or a checkpoint that exists but cannot be read."""
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return cls(f"{name or 'it'} cannot be read: {reason}", name, is_unreadable=True)


@dataclass(frozen=True)
class Findings:
    """The result of checking a checkpoint."""

    problems: list[Problem]
    is_verified: bool
    """whether the manifest has the checksum of every file, and no problem was found"""


def size_problems(checkpoint: Path, *, marked: bool = True) -> list[Problem]:
    """Return the problems that `check_sizes` finds; [] = none."""
    return check_sizes(checkpoint, marked=marked).problems


def check_sizes(checkpoint: Path, *, marked: bool = True) -> Findings:
    """Check names and sizes with one stat per file; weights are not read.

    If `marked` is False, NeMo's mark of an unfinished save is ignored, since all files may exist anyway.
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
    """Return the problems with a checkpoint's folders and its few metadata files."""
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
    """Return whether a quick check finds no problem. `recipes status` calls it every few seconds. Raises OSError.

    Checks names and sizes. For a large checkpoint (MAX_PARTS, MAX_METADATA_BYTES), a stat of every file would burden
    the file system, and only the files that are written first and last are checked.
    """
    if is_incomplete(checkpoint):
        return False
    folder = checkpoint / manifest.FOLDER
    parts = len(os.listdir(folder)) if folder.is_dir() else 0
    if parts > MAX_PARTS or (size(weights_of(checkpoint) / ".metadata") or 0) > MAX_METADATA_BYTES:
        return True
    blockers = resume_blockers(size_problems(checkpoint))
    return not blockers or is_unreadable(blockers)


def resume_blockers(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems that prevent resuming from a checkpoint."""
    return [problem for problem in problems if not (problem.file or "").startswith(CONTEXT)]


def is_unreadable(problems: Sequence[Problem]) -> bool:
    """Return whether all problems are file system problems, so the content of the checkpoint is unknown."""
    return bool(problems) and all(problem.is_unreadable for problem in problems)


class Content(NamedTuple):
    """The expected content of a file, from the manifest or else from torch. All fields are JSON values."""

    name: str
    """relative to the checkpoint"""
    size: int
    """bytes, from the manifest; without a manifest, the end of the last tensor in `.metadata`"""
    crc: int | None = None
    sample: int | None = None
    mtime_ns: int | None = None
    """this and the two above are from the manifest; None = unknown"""
    parts: Sequence[tuple[int, int]] = ()
    """(offset, length) of its tensors, if the CRC is unknown"""


class Budget:
    """The number of bytes that several threads may still read in total."""

    def __init__(self, bytes_: float) -> None:
        self._left, self._lock = bytes_, threading.Lock()

    def take(self, bytes_: int) -> bool:
        """Subtract `bytes_` if the budget is sufficient; return whether it was."""
        with self._lock:
            if bytes_ > self._left:
                return False
            self._left -= bytes_
            return True


def check_samples(checkpoint: Path, *, files: Container[str | None] | None = None) -> Findings:
    """Check sizes and samples of all files, and read the files without a valid checksum, up to READ_BYTES.

    Args:
        checkpoint: the checkpoint.
        files: the names of the files to check; None = all.

    Raises:
        OSError: the checkpoint cannot be read.
        ValueError: .metadata is corrupt.
    """
    listed_contents = contents_of(checkpoint)
    contents = [content for content in listed_contents.contents if files is None or content.name in files]
    content_problems = check_contents(checkpoint, contents, Budget(READ_BYTES))
    return Findings(content_problems, listed_contents.is_verified and not content_problems)


def check_all_bytes(checkpoint: Path) -> list[Problem]:
    """Read every byte of a checkpoint, and return how its files differ from what was written.

    Raises OSError, and ValueError if .metadata is corrupt.
    """
    return check_contents(checkpoint, contents_of(checkpoint).contents)


def check_contents(checkpoint: Path, contents: Sequence[Content], budget: Budget | None = None) -> list[Problem]:
    """Check files as `check_samples` does, within a budget of bytes; without a budget, read every byte."""
    return check_in_threads(lambda content: _check_file(checkpoint, content, budget), contents)


def check_in_threads(check: Callable[[Content], Problem | None], contents: Sequence[Content]) -> list[Problem]:
    """Check files in threads, which mostly wait for the file system; return the problems."""
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
    """Return the total size of a folder in bytes, ignoring files that a running job removes in the meantime."""
    files = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    return sum(size(file) or 0 for file in files)


def saved_layout(checkpoint: Path) -> dict[str, int]:
    """Return the layout that context/io.json records (`tensor_model_parallel_size`, ..., `ranks`); {} = unknown."""
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
    """Select the attributes that are integers."""
    return {name: value for name, value in attributes.items() if type(value) is int}


def _attributes(objects: JsonObject, kind: str) -> JsonObject:
    """Return the plain attributes of the trainer or of its strategy from Fiddle's JSON."""
    # Fiddle writes the path of every value: the attributes of the trainer have paths below <root>.trainer.
    prefix = "<root>.trainer.strategy" if kind == "strategy" else "<root>.trainer"
    for node in objects.values():
        items = [(name, item) for name, item in node.get("items", []) if str(name).startswith("Attr(")]
        attributes = {name[len("Attr(name='") : -2]: item for name, item in items if isinstance(item, dict)}
        if any(f"{prefix}.{name}" in (item.get("paths") or []) for name, item in attributes.items()):
            return {name: item.get("value") for name, item in attributes.items()}
    return {}


def _check_size(checkpoint: Path, content: Content) -> Problem | None:
    """Check the size of a file with one stat."""
    try:
        return _size_problem(content, os.stat(checkpoint / content.name))
    except OSError as error:
        return _access_problem(checkpoint, content.name, error)


def _size_problem(content: Content, facts: os.stat_result) -> Problem | None:
    """Compare the type and size of a file with its expected content."""
    if not stat.S_ISREG(facts.st_mode):
        return Problem.of_file(content.name, "is not a regular file")
    excess_bytes = facts.st_size - content.size
    is_exact = content.crc is not None or content.sample is not None  # .metadata only has the end of the last tensor
    if excess_bytes < 0 or (excess_bytes > 0 and is_exact):
        too_text = "too many" if excess_bytes > 0 else "too few"
        return Problem.of_file(content.name, f"has {facts.st_size} bytes, {abs(excess_bytes)} {too_text}")
    return None


def _access_problem(checkpoint: Path, name: str, error: OSError) -> Problem:
    if not _is_gone(error):
        return Problem.unreadable(error, name)
    return Problem.of_file(name, "is not a regular file" if os.path.lexists(checkpoint / name) else "is missing")


def _is_gone(error: OSError) -> bool:
    """Return whether the error means that the file or folder does not exist; other errors may be temporary."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def _read_object(file: Path) -> JsonObject | None:
    """Read the JSON object in a file; None if it is missing or corrupt. Raises OSError if it cannot be read."""
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
    """Return the problems with the metadata that Megatron and torch write for the weights. Raises OSError."""
    weights = weights_of(checkpoint)
    prefix = "weights/" if weights != checkpoint else ""
    facts = _read_object(weights / "metadata.json")
    wrong: list[Problem] = []
    if facts is None and prefix:  # fsdp_dtensor does not have this file
        name = "weights/metadata.json"
        wrong.append(Problem(f"{name}, which is written last, is missing or corrupt", name))
    by_torch = (facts or {}).get("sharded_backend", "torch_dist") == "torch_dist" or (weights / ".metadata").exists()
    common = weights / "common.pt"
    if not (_is_intact(common) if by_torch else common.is_file()):
        wrong.append(Problem.of_file(f"{prefix}common.pt", "is missing or corrupt"))
    if not by_torch:
        return wrong
    try:
        metadata = read(checkpoint)
    except ValueError as error:
        return [*wrong, Problem(str(error))]
    incomplete_tensors = [name for name, tensor in metadata.tensors.items() if tensor.saved_numbers < tensor.numbers]
    if incomplete_tensors and prefix:  # not tested with the uneven shards of fsdp_dtensor
        wrong.append(Problem(f"{len(incomplete_tensors)} tensors are incomplete, such as {incomplete_tensors[0]}"))
    return wrong


@dataclass(frozen=True)
class FileList:
    """The files of a checkpoint that can be checked."""

    contents: list[Content]
    is_verified: bool
    """whether the manifest is complete and has the CRC-32 of every file"""


def contents_of(checkpoint: Path) -> FileList:
    """List the files of a checkpoint from the manifest, and also from `.metadata` if the manifest is incomplete.

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
    # Manifests of earlier versions do not contain the number of parts; .metadata lists all weight files.
    is_complete = listed.is_complete or (bool(places) and places.keys() <= records.keys())
    return FileList(contents, is_summed and is_complete)


def _check_file(checkpoint: Path, content: Content, budget: Budget | None) -> Problem | None:
    """Compare a file with its expected content; without a budget, every byte is read."""
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
    """Compare all bytes of a file with its checksum; without a manifest, check the CRC of each tensor."""
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
