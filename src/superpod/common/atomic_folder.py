"""Writes a folder completely or not at all: to a temporary folder next to it, which is then renamed.

The writer holds a lock on a file in the temporary folder, which the kernel releases when the process ends, however it
ends. That is how the temporary folder of a killed process is recognized and removed.
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
"""File in a temporary folder: the host of its writer, which holds a lock on it."""


def temporary_path(out: Path) -> Path:
    """A path like that of the temporary folder of `out`."""
    return out.with_name(f".{out.name}-12345678")


@contextmanager
def complete_or_absent(out: Path) -> Iterator[Path]:
    """A path next to `out`, renamed to `out` on success and removed on failure.

    Raises:
        UserError: another process has created `out` meanwhile.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch, _locked(Path(scratch) / LOCK):
        temporary = Path(scratch) / out.name
        yield temporary
        try:
            os.rename(temporary, out)
        except OSError as error:  # another process was faster
            raise UserError(f"{out} cannot be put in place: {error.strerror}", "name another folder") from None


def remove_dead(out: Path) -> list[Path]:
    """Remove the temporary folders of `out` whose writers have ended: this user's, on this host; returns them."""
    try:
        folders = sorted(out.parent.glob(f".{glob.escape(out.name)}-????????"))
    except OSError:
        return []
    return [folder for folder in folders if _is_dead(folder) and _removed(folder)]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock on `file`, which gets its name once it is locked; without locks on this disk there is no file."""
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


def _is_dead(folder: Path) -> bool:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return False
        with (folder / LOCK).open() as stream:
            return locks.lock(stream.fileno()) and stream.read() == socket.gethostname()
    except (OSError, ValueError):  # not a lock of ours
        return False


def _removed(folder: Path) -> bool:
    with suppress(OSError):
        shutil.rmtree(folder)
        return True
    return False
