"""The file that a page or a trace is written to: judged before anything is computed, written in one step."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from pathlib import Path

from superpod import whole_file
from superpod.errors import UserError
from superpod.pages import GENERATOR

PAGE, TRACE = (".html", ".htm"), (".json", ".json.gz")
"""How the names end."""
HEAD = 4096
"""Bytes at the start of a file of ours, in which it says so."""


def check(path: Path, option: str, endings: tuple[str, ...]) -> None:
    """Check that `path`, which `option` names, can be written; one of our own files is replaced.

    Raises:
        UserError: the name has another ending, the file is somebody else's, or its folder takes no files.
    """
    if not path.name.endswith(endings):
        raise UserError(f"{option} is {str(path)!r}; its name ends with {' or '.join(endings)}", f"plan{endings[0]}")
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder", f"a file in it: {option} {path / ('plan' + endings[0])}")
        if not path.parent.is_dir():
            raise UserError(f"there is no folder {path.parent}", f"make it, or choose another place for {option}")
        if path.exists() and not _is_ours(path):
            raise UserError(f"{path} exists, and `recipes` did not write it", "choose another name, or remove it")
        with tempfile.TemporaryFile(dir=path.parent):  # os.access knows no read-only mounts of containers
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "choose another place") from error


def _is_ours(path: Path) -> bool:
    """Whether the file says at its start that we wrote it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, HEAD)
        except zlib.error:
            return False
    return GENERATOR.encode() in head


def write(path: Path, text: str) -> None:
    """Write the file, whole or not at all; compressed if the name ends with .gz.

    Raises:
        UserError: the folder cannot be written.
    """
    content = text.encode()
    content = gzip.compress(content, 6, mtime=0) if path.name.endswith(".gz") else content
    try:
        whole_file.write(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "make room, or choose another place") from error
