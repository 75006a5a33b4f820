"""Writes a file completely or not at all: to a temporary file next to it, which then takes its name.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def write(path: Path, content: str | bytes, permissions: int | None = None) -> None:
    """Write `content`: a reader sees the old file or the new one.

    Raises:
        OSError: no space, no permission; the old file is unchanged, and no temporary one is left.
    """
    data = content.encode() if isinstance(content, str) else content
    with opened(path, permissions=permissions) as stream:
        stream.write(data)


@contextlib.contextmanager
def opened(path: Path, mode: str = "wb", *, permissions: int | None = None, **options: Any) -> Iterator[IO[Any]]:
    """A stream whose content replaces `path` at the end of the block; an exception in the block leaves `path` as it is.

    A link in the place of `path` is replaced; the file that it names does not change.

    Args:
        path: the file to write.
        mode: as of `open`.
        permissions: of the new file; default: as of every new file.
        options: encoding, errors and newline, as of `open`.

    Raises:
        OSError: as `write`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, mode, **options) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # otherwise a crash could leave the new name without content
        if permissions is not None:
            temporary.chmod(permissions)
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise
