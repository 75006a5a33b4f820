"""A folder is written beside its place and renamed there whole; what a killed writer has left of one is removed.

A writer holds a lock on a file of its unfinished folder, which the system takes from it when it ends, however it ends.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from superpod.errors import UserError

LOCK = "writer"
"""File in an unfinished folder: the machine of its writer, which holds a lock on it."""


def beside(out: Path) -> Path:
    """A path like that of the unfinished folder of `out`."""
    return out.with_name(f".{out.name}-12345678")


@contextmanager
def complete_or_absent(out: Path) -> Iterator[Path]:
    """A path beside `out`, renamed to `out` on success and removed on failure.

    Raises:
        UserError: another process has made `out` meanwhile.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch, _locked(Path(scratch) / LOCK):
        temporary = Path(scratch) / out.name
        yield temporary
        try:
            os.rename(temporary, out)
        except OSError as error:  # another conversion was faster
            raise UserError(f"{out} cannot be put in place: {error.strerror}", "name another folder") from None


def remove_dead(out: Path) -> list[Path]:
    """Remove the unfinished folders of `out` whose writers have ended: this user's, on this machine; returns them."""
    try:
        halves = sorted(out.parent.glob(f".{glob.escape(out.name)}-????????"))
    except OSError:
        return []
    return [half for half in halves if _is_dead(half) and _removed(half)]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock on `file`, which gets its name once it is locked; without locks on this disk there is no file."""
    unlocked = file.with_suffix(".new")
    with unlocked.open("w") as stream:
        stream.write(socket.gethostname())
        stream.flush()
        try:
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(file)
        except OSError:
            unlocked.unlink(missing_ok=True)
        yield


def _is_dead(half: Path) -> bool:
    try:
        if half.is_symlink() or half.stat().st_uid != os.geteuid():
            return False
        with (half / LOCK).open() as stream:
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return stream.read() == socket.gethostname()
    except (OSError, ValueError):  # it is held, or no lock of ours
        return False


def _removed(half: Path) -> bool:
    with suppress(OSError):
        shutil.rmtree(half)
        return True
    return False
