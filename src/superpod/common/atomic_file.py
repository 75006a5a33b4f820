"""Write files atomically: to a temporary file in the same folder, which is then renamed. Standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def write(path: Path, content: str | bytes, permissions: int | None = None) -> None:
    """Write `content` to `path` atomically: a reader sees either the old file or the new one.

    `permissions` are those of the new file; None = according to the umask.

    Raises:
        OSError: writing failed; the old file is unchanged and the temporary file is removed.
    """
    data = content.encode() if isinstance(content, str) else content
    with open_atomically(path, permissions=permissions) as stream:
        stream.write(data)


@contextlib.contextmanager
def open_atomically(
    path: Path, mode: str = "wb", *, permissions: int | None = None, **options: Any
) -> Iterator[IO[Any]]:
    """Yield a stream whose content replaces `path` at the end of the block, unless the block raises an exception.

    If `path` is a symbolic link, the link is replaced, not its target.

    Args:
        path: the file to write.
        mode: mode, as in `open`.
        permissions: permissions of the new file; None = according to the umask.
        options: encoding, errors and newline, as in `open`.

    Raises:
        OSError: writing failed, as in `write`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, mode, **options) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # without it, a crash could leave an empty file under the new name
        if permissions is not None:
            temporary.chmod(permissions)
        os.replace(temporary, path)
    except BaseException:  # including KeyboardInterrupt
        temporary.unlink(missing_ok=True)
        raise
