"""Write folders atomically: to a temporary folder in the same parent, which is then renamed.

The writer holds a lock on a file in the temporary folder. The kernel releases the lock when the process ends, even if
it is killed, so that the abandoned temporary folder can be recognized and removed.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from superpod.common import locks
from superpod.errors import UserError

LOCK = "writer"
"""Name of the lock file in a temporary folder; it contains the host name of the writer."""


def temporary_path(out: Path) -> Path:
    """Return a path like that of a temporary folder for `out`, for example to check its length."""
    return out.with_name(f".{out.name}-12345678")


@contextmanager
def create_atomically(out: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `out` at the end of the block, or removed if the block raises.

    Raises:
        UserError: another process has created `out` during the block.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch,
        _hold_lock(Path(scratch) / LOCK),
    ):
        temporary = Path(scratch) / out.name
        yield temporary
        try:
            os.rename(temporary, out)
        except OSError as error:  # another process was faster
            raise UserError(f"{out} cannot be created: {error.strerror}", "choose another folder") from None


def remove_abandoned(out: Path) -> list[Path]:
    """Remove temporary folders of `out` from killed processes of this user on this host; return the paths removed."""
    try:
        folders = sorted(out.parent.glob(f".{glob.escape(out.name)}-????????"))
    except OSError:
        return []
    return [folder for folder in folders if _is_abandoned(folder) and _remove(folder)]


@contextmanager
def _hold_lock(file: Path) -> Iterator[None]:
    """Create a locked `file`, and hold the lock; without support for locks, the file is not created."""
    unlocked = file.with_suffix(".new")
    with unlocked.open("w") as stream:
        stream.write(socket.gethostname())
        stream.flush()
        try:
            locks.lock(stream.fileno())
            unlocked.rename(file)
        except OSError:
            unlocked.unlink(missing_ok=True)
        yield


def _is_abandoned(folder: Path) -> bool:
    """Return whether a temporary folder belongs to a process of this user and host that has ended."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return False
        with (folder / LOCK).open() as stream:
            return locks.lock(stream.fileno()) and stream.read() == socket.gethostname()
    except (OSError, ValueError):  # not a lock file of this module
        return False


def _remove(folder: Path) -> bool:
    """Remove a folder; return whether it succeeded."""
    with suppress(OSError):
        shutil.rmtree(folder)
        return True
    return False
