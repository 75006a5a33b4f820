"""The manifest of a checkpoint: name, size and CRC-32 of every file, written by the nodes once the save is complete.

`CHECKPOINT/manifest/{part}.json`, a part a node, so that no node reads what another has written. CRC-32 finds every
single flipped bit and every burst of up to 32; zlib makes 4 GiB/s on one core of this project's machine (measured,
Python 3.11) and lets go of Python's lock meanwhile. A part carries a checksum of itself: one that is damaged counts as
not there, and its files are then judged by what torch wrote. Standard library only.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .files import read_json, write_json

FOLDER = "manifest"
CHUNK = 8 << 20
"""Bytes that are read at once."""


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    size: int
    """bytes"""
    crc: int
    """CRC-32 of its content"""


def checksum(file: Path) -> FileRecord:
    """Size and CRC-32 of a file as it is now. Raises OSError."""
    buffer, crc, size = bytearray(CHUNK), 0, 0
    view = memoryview(buffer)
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            crc, size = zlib.crc32(view[:count], crc), size + count
    return FileRecord(size, crc)


def write_part(checkpoint: Path, part: str, files: Iterable[Path]) -> None:
    """Read `files` of the checkpoint and write their part of its manifest. Raises OSError."""
    records = {file.relative_to(checkpoint).as_posix(): checksum(file) for file in files}
    content = {name: [record.size, record.crc] for name, record in sorted(records.items())}
    (checkpoint / FOLDER).mkdir(exist_ok=True)
    write_json(checkpoint / FOLDER / f"{part}.json", {"files": content, "crc": _crc_of(content)})


def read(checkpoint: Path) -> dict[str, FileRecord]:
    """The files by name, as all undamaged parts have them; empty for a checkpoint without a manifest."""
    records: dict[str, FileRecord] = {}
    try:
        parts = sorted((checkpoint / FOLDER).glob("*.json"))
    except OSError:
        return {}
    for part in parts:
        data = read_json(part) or {}
        content = data.get("files")
        if isinstance(content, dict) and data.get("crc") == _crc_of(content):
            records |= {name: FileRecord(size, crc) for name, (size, crc) in content.items()}
    return records


def _crc_of(content: object) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
