"""Writes a file completely or not at all. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Write `content` to a temporary file and rename that to `path`: a reader sees the old file or the new one.

    A device such as /dev/stdout is written to directly. `mode` are the new file's permissions.

    Raises:
        OSError: no space, no permission; the old file is unchanged, and no temporary one is left.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        if mode is not None:
            temporary.chmod(mode)
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise
