"""Checks the output files of pages and traces before planning, and writes them atomically."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from superpod.common import output_file
from superpod.errors import UserError
from superpod.pages import GENERATOR

PAGE, TRACE = (".html", ".htm"), (".json", ".json.gz")
"""Permitted file name extensions."""


def check(path: Path, option: str, endings: tuple[str, ...]) -> None:
    """Check that the file of an option can be written; an existing file is replaced only if this package wrote it.

    Args:
        path: the file.
        option: name of the option, for messages.
        endings: permitted file name extensions.

    Raises:
        UserError: the extension is wrong, the file is from a different program, or its folder is not writable.
    """
    if not path.name.endswith(endings):
        name = path.with_suffix(endings[0]) if path.name else f"plan{endings[0]}"
        raise UserError(
            f"{option} must be a file name ending with {' or '.join(endings)}, not {str(path)!r}",
            f"use {option} {name}",
        )
    output_file.check(path, option, _is_generated)


def _is_generated(start: bytes, _: bytes) -> bool:
    """Return whether the start of a file, which may be compressed, names this package as its generator."""
    if start.startswith(b"\x1f\x8b"):
        try:
            start = zlib.decompressobj(wbits=31).decompress(start, output_file.ENDS)
        except zlib.error:
            return False
    return GENERATOR.encode() in start


def write(path: Path, text: str, option: str) -> None:
    """Write the file of an option atomically; compress it if its name ends with .gz.

    Raises:
        UserError: the file cannot be written.
    """
    content = text.encode()
    if path.name.endswith(".gz"):
        content = gzip.compress(content, 6, mtime=0)
    output_file.write(path, content, option)
