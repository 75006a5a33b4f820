"""The file that a page or a trace is written to: judged before anything is computed, written in one step."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from superpod.common import output_file
from superpod.errors import UserError
from superpod.pages import GENERATOR

PAGE, TRACE = (".html", ".htm"), (".json", ".json.gz")
"""How the names end."""


def check(path: Path, option: str, endings: tuple[str, ...]) -> None:
    """Check that `path`, which `option` names, can be written; one of our own files is replaced.

    Raises:
        UserError: the name has another ending, the file is somebody else's, or its folder takes no files.
    """
    if not path.name.endswith(endings):
        name = path.with_suffix(endings[0]) if path.name else f"plan{endings[0]}"
        raise UserError(
            f"{option} is {str(path)!r}; its name ends with {' or '.join(endings)}", f"write {option} {name}"
        )
    output_file.check(path, option, _is_ours)


def _is_ours(start: bytes, _: bytes) -> bool:
    """Whether a file says at its start that we wrote it."""
    if start.startswith(b"\x1f\x8b"):
        try:
            start = zlib.decompressobj(wbits=31).decompress(start, output_file.ENDS)
        except zlib.error:
            return False
    return GENERATOR.encode() in start


def write(path: Path, text: str, option: str) -> None:
    """Write the file that `option` names, completely or not at all; compressed if the name ends with .gz.

    Raises:
        UserError: the folder cannot be written.
    """
    content = text.encode()
    content = gzip.compress(content, 6, mtime=0) if path.name.endswith(".gz") else content
    output_file.write(path, content, option)
