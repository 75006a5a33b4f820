"""Small files that survive kills and full disks: a line is complete or absent, a document is new or old."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeGuard  # typing has it from Python 3.10 on

JsonObject = dict[str, Any]
"""An object of a JSON file. Others may have edited the file: check a value's type before you use it."""

TAIL_BYTES = 64 * 1024
"""Of the end of a file that are read, unless more is asked for."""
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def is_number(value: object) -> TypeGuard[float]:
    """True for an int or a float that a float can hold; false for a bool, NaN and infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def is_full(error: OSError) -> bool:
    """True when the disk or the quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_json(path: Path, data: object, *, even_in_place: bool = False) -> None:
    """Write `data` beside `path`, then rename it over `path`: a reader sees the old document or the new one.

    Raises OSError (no space, no permission); the old document then still stands and no temporary file is left. With
    `even_in_place`, a full disk leads to writing over the old document, where the new one fits into its blocks.
    """
    text = json.dumps(data, indent=2, sort_keys=True, default=str).encode() + b"\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        full = isinstance(error, OSError) and is_full(error)
        if not (even_in_place and full and path.is_file()):
            raise
        _overwrite(path, text)


def _overwrite(path: Path, text: bytes) -> None:
    """Write `text` over the document in `path` within the blocks that it has, padded with spaces to its length.

    Raises OSError, and the old document still stands, where `path` has too few blocks: nobody could read one that is
    written in part.
    """
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        facts = os.fstat(handle)
        text = text.rstrip(b"\n").ljust(facts.st_size - 1) + b"\n"
        if len(text) > facts.st_blocks * 512:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        before = os.pread(handle, len(text), 0)
        try:
            if os.pwrite(handle, text, 0) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            os.pwrite(handle, before, 0)
            os.ftruncate(handle, facts.st_size)
            raise
    finally:
        os.close(handle)


def refuse_special(path: Path) -> None:
    """Before a file of another user is opened: a pipe in its place would wait for a writer for ever.

    Raises OSError for all that is no file, and when it is missing.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise IsADirectoryError(errno.EISDIR, "not a regular file", str(path))


def read_bytes(path: Path) -> bytes:
    """What a file holds. Raises OSError, as `refuse_special` does too."""
    refuse_special(path)
    return path.read_bytes()


def read_json(path: Path) -> JsonObject | None:
    """The object in `path`; None when the file is missing, torn, or holds no object."""
    try:
        data = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append `record` as one JSON line in one write; a torn line that a killed writer left is closed off first.

    Raises OSError when the line does not fit on the disk; what was written of it is then taken back. Expects one
    writer per file. Raises ValueError for NaN and infinity, which JSON does not have.
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
    """Every whole JSON object of a lines file, in order, torn ones left out; none in a missing file or a folder."""
    try:
        return parse_lines(read_bytes(path))
    except _NO_FILE:
        return []


def tail_lines(path: Path) -> list[JsonObject]:
    """The objects in the last 64 KiB of a lines file, in order: enough for "what was last", at any length."""
    try:
        data, is_cut = _tail(path, TAIL_BYTES)
    except _NO_FILE:
        return []
    return parse_lines(data.partition(b"\n")[2] if is_cut else data)  # the first line may be


def tail_text(path: Path, most: int = TAIL_BYTES) -> str:
    """The text of a file's last `most` bytes. Raises OSError, as `refuse_special` does too."""
    return _tail(path, most)[0].decode(errors="replace")


def _tail(path: Path, most: int) -> tuple[bytes, bool]:
    """The last `most` bytes of a file, and whether there are others before them. Raises OSError."""
    refuse_special(path)
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - most)
        file.seek(start)
        return file.read(most), start > 0


def parse_lines(data: bytes) -> list[JsonObject]:
    """The JSON objects among the lines of `data`, torn ones left out."""
    objects = []
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            objects.append(record)
    return objects
