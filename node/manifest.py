"""The manifest of a checkpoint: size, time, checksums of every file, written by the nodes once the save is complete.

`CHECKPOINT/manifest/{part}.json`, a part a node, so that no node reads what another has written. It is written twice:
at once with a checksum of a sample of each file (milliseconds), and again with the CRC-32 of all its bytes, computed
in the background of the training. CRC-32 finds every single flipped bit and every burst of up to 32; zlib makes 4 GiB/s
on one core of this project's machine (measured, Python 3.11) and lets go of Python's lock meanwhile. A part carries a
checksum of itself: one that is damaged counts as not there. Standard library only.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .files import JsonObject, read_json, write_json

FOLDER = "manifest"
CHUNK = 8 << 20
"""Bytes that are read at once."""

SAMPLE = 32 << 10
"""Bytes of each of the two blocks of a file that are its sample."""

READERS = 64
"""Threads that read small pieces at once: they wait for the file system, and hardly compute."""


class FileRecord(NamedTuple):
    """A file as it was written."""

    size: int
    """bytes"""
    crc: int | None
    """CRC-32 of its content; None = only its sample is known yet"""
    sample: int | None = None
    """CRC-32 of its sample; None = an earlier version has written the manifest"""
    mtime_ns: int | None = None


@dataclass(frozen=True)
class Manifest:
    """What all undamaged parts of a manifest hold."""

    records: dict[str, FileRecord]
    """by name within the checkpoint; empty for a checkpoint without a manifest"""
    is_complete: bool = False
    """every node that saved has written its part, as the first node's part says; False where that does not say"""


def sample_of(handle: int, size: int) -> int:
    """CRC-32 of a quarter of the way into a file and three quarters, or of all of a small one. Raises OSError."""
    if size <= 2 * SAMPLE:
        return zlib.crc32(os.pread(handle, size, 0))
    crc = 0
    for at in (size // 4, 3 * size // 4):
        crc = zlib.crc32(os.pread(handle, SAMPLE, at), crc)
    return crc


def crc_of(handle: int) -> int:
    """CRC-32 of all bytes of a file. Raises OSError."""
    crc, at, buffer = 0, 0, bytearray(CHUNK)
    view = memoryview(buffer)
    while count := os.preadv(handle, [buffer], at):
        crc, at = zlib.crc32(view[:count], crc), at + count
    return crc


def record(file: Path, *, fully: bool = True) -> FileRecord:
    """A file as it is now; its CRC only where it is to be read `fully`. Raises OSError."""
    handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        facts = os.fstat(handle)
        crc = crc_of(handle) if fully else None
        return FileRecord(facts.st_size, crc, sample_of(handle, facts.st_size), facts.st_mtime_ns)
    finally:
        os.close(handle)


def write_part(checkpoint: Path, part: str, files: Iterable[Path], *, fully: bool = True, parts: int = 0) -> None:
    """Read `files` of the checkpoint, or their samples alone, and write their part of its manifest.

    `parts` is how many there will be, which the first node's part says. Raises OSError.
    """
    records = {file.relative_to(checkpoint).as_posix(): record(file, fully=fully) for file in files}
    content = {name: list(records[name]) for name in sorted(records)}
    data: JsonObject = {"files": content, "crc": _checksum(content)} | ({"parts": parts} if parts else {})
    (checkpoint / FOLDER).mkdir(exist_ok=True)
    write_json(checkpoint / FOLDER / f"{part}.json", data)


def read(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint, its parts read in threads."""
    try:
        names = sorted(name for name in os.listdir(checkpoint / FOLDER) if name.endswith(".json"))
    except OSError:
        return Manifest({})
    records: dict[str, FileRecord] = {}
    intact, expected = 0, None
    with ThreadPoolExecutor(max(1, min(READERS, len(names)))) as readers:
        for data in readers.map(read_json, (checkpoint / FOLDER / name for name in names)):
            content = (data or {}).get("files")
            if data and isinstance(content, dict) and data.get("crc") == _checksum(content):
                records |= {name: FileRecord(*fields) for name, fields in content.items()}
                intact += 1
                expected = data.get("parts", expected)
    return Manifest(records, expected is not None and intact == expected)


def _checksum(content: object) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
