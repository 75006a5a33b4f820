"""File locks that the kernel drops when the holder dies: `RUN/.lock` for the launcher, `RUN/.ranks` for its ranks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from superpod.common.files import refuse_special

LAUNCHER = ".lock"
RANKS = ".ranks"


def take(path: Path) -> int | None:
    """Lock `path` for this process alone; returns the open handle, whose close unlocks, or None if another holds it.

    Tries for half a second, since `is_held` looks by locking for an instant. The file then says who holds it.
    Raises OSError where the file cannot be opened or the file system knows no locks.
    """
    handle = _opened(path, shared=False)
    if handle is None:
        return None
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    return handle


def share(path: Path) -> int | None:
    """Lock `path` together with others until this process ends; None where the file system knows no locks.

    Tries for half a second, as `take` does: somebody's look must not cost a rank its lock.
    """
    with contextlib.suppress(OSError):
        return _opened(path, shared=True)
    return None


def lock(handle: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed or this process ends; False when another process has locked it.

    Raises OSError where the file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _opened(path: Path, *, shared: bool) -> int | None:
    """A handle that has locked `path`; None where others hold it for longer than a look takes. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # CLOEXEC: children must not keep the lock
    try:
        for pause_s in (*[0.05] * 10, 0.0):
            if lock(handle, shared=shared):
                return handle
            time.sleep(pause_s)
    except OSError:
        os.close(handle)
        raise
    os.close(handle)
    return None


def is_held(path: Path) -> bool:
    """True while any process, this one included, holds `path`; false where the file system knows no locks."""
    try:
        refuse_special(path)
        handle = os.open(path, (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | os.O_CLOEXEC)  # NFS: RDWR
    except OSError:
        return False
    try:
        return _is_blocked(handle)
    finally:
        os.close(handle)


def _is_blocked(handle: int, *, shared: bool = False) -> bool:
    try:
        return not lock(handle, shared=shared)
    except OSError as error:
        if error.errno == errno.EBADF and not shared:
            return _is_blocked(handle, shared=True)  # another user's run on NFS: an exclusive lock needs write access
        return False  # no locks on this file system


def holder(path: Path) -> str:
    """'pid 12 on host a', from what the holder wrote."""
    try:
        who = json.loads(path.read_text())
        return f"pid {who['pid']} on host {who['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
