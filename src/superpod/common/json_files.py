"""Read and write JSON and JSON lines files so that killed writers and full disks do not corrupt them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.common import atomic_file

if TYPE_CHECKING:
    from typing_extensions import TypeGuard  # in typing since Python 3.10

JsonObject = dict[str, Any]
"""An object from a JSON file. Users may have edited the file: check the type of a value before using it."""

TAIL_BYTES = 64 * 1024
"""Default number of bytes to read from the end of a file."""
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is an int or float, but not a bool, and finite as a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def number_or_none(value: object) -> float | None:
    """Return the value as a float if it is a number (see `is_number`), otherwise None."""
    return float(value) if is_number(value) else None


def is_full(error: OSError) -> bool:
    """Return whether the cause of an error is a full disk or an exhausted quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_json(path: Path, data: object, *, even_in_place: bool = False) -> None:
    """Write `data` to `path` as JSON, atomically: a reader sees either the old document or the new one.

    Args:
        path: the file to write.
        data: any value; objects that JSON does not support are written as strings.
        even_in_place: if the disk is full, overwrite the old document in place, provided the new one fits.

    Raises:
        OSError: writing failed; the old document is unchanged and the temporary file is removed.
    """
    text = json.dumps(data, indent=2, sort_keys=True, default=str).encode() + b"\n"
    try:
        atomic_file.write(path, text)
    except OSError as error:
        if not (even_in_place and is_full(error) and path.is_file()):
            raise
        _overwrite(path, text)


def _overwrite(path: Path, text: bytes) -> None:
    """Overwrite the document at `path` in place with `text`, padded with spaces to the old length.

    Raises:
        OSError: `text` does not fit into the file's allocated blocks; the old document is unchanged.
    """
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        old = os.fstat(handle)
        text = text.rstrip(b"\n").ljust(old.st_size - 1) + b"\n"
        if len(text) > old.st_blocks * 512:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        old_text = os.pread(handle, len(text), 0)
        try:
            if os.pwrite(handle, text, 0) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            os.pwrite(handle, old_text, 0)
            os.ftruncate(handle, old.st_size)
            raise
    finally:
        os.close(handle)


def refuse_special(path: Path) -> None:
    """Raise OSError if `path` is missing or not a regular file, because opening a pipe without a writer would block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise IsADirectoryError(errno.EISDIR, "not a regular file", str(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raises OSError if it cannot be read or is not a regular file."""
    refuse_special(path)
    return path.read_bytes()


def read_json(path: Path) -> JsonObject | None:
    """Return the JSON object in the file `path`; None if it is missing, unreadable, or contains anything else."""
    try:
        data = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def json_number(value: object) -> object:
    """Return None for NaN and infinity, which JSON does not support, and any other value unchanged."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append `record` to a file as a JSON line, in a single write. A file must have only one writer.

    An incomplete line of a killed writer is terminated first.

    Raises:
        OSError: the line does not fit on the disk; the file is restored to its previous size.
        ValueError: the record contains NaN or infinity, which JSON does not support.
    """
    line = json.dumps(record, allow_nan=False, default=str).encode() + b"\n"
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        try:
            if os.write(handle, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[JsonObject]:
    """Return the JSON objects in a JSON lines file, in order, without incomplete lines; [] if the file is missing.

    Raises:
        OSError: the file exists but cannot be read.
    """
    try:
        return parse_lines(read_bytes(path))
    except _NO_FILE:
        return []


def tail_lines(path: Path) -> list[JsonObject]:
    """Return the JSON objects in the last 64 KiB of a JSON lines file, in order. Otherwise like `read_lines`."""
    try:
        data, is_truncated = _tail(path, TAIL_BYTES)
    except _NO_FILE:
        return []
    if is_truncated:  # the first line may be incomplete
        data = data.partition(b"\n")[2]
    return parse_lines(data)


def tail_text(path: Path, max_bytes: int = TAIL_BYTES) -> str:
    """Return the last `max_bytes` bytes of a file as text. Raises OSError if it cannot be read or is not regular."""
    return _tail(path, max_bytes)[0].decode(errors="replace")


def _tail(path: Path, max_bytes: int) -> tuple[bytes, bool]:
    """Return the last `max_bytes` bytes of a file, and whether the file is longer. Raises OSError."""
    refuse_special(path)
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - max_bytes)
        file.seek(start)
        return file.read(max_bytes), start > 0


def parse_lines(data: bytes) -> list[JsonObject]:
    """Return the JSON objects in the lines of `data`, in order; lines that are not an object are skipped."""
    objects = []
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            objects.append(record)
    return objects
