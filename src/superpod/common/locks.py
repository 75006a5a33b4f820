"""File locks, which the kernel releases when their holder dies: `RUN/.lock` of the launcher, `RUN/.ranks` of ranks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from superpod.common.json_files import refuse_special

LAUNCHER = ".lock"
RANKS = ".ranks"


def acquire(path: Path) -> int | None:
    """Acquire an exclusive lock on `path`, and write the process id and host of the holder into it.

    Retries for half a second, because `is_held` acquires the lock briefly.

    Returns:
        The open file descriptor, which releases the lock when it is closed; None if another process holds the lock.

    Raises:
        OSError: the file cannot be opened, or the file system does not support locks.
    """
    handle = _open_locked(path, shared=False)
    if handle is None:
        return None
    with contextlib.suppress(OSError):  # the lock is valid even if the disk is full
        # Truncate only now, with the lock: the file may contain the name of another holder.
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    return handle


def acquire_shared(path: Path) -> int | None:
    """Acquire a shared lock on `path` until this process ends; None if the file system does not support locks.

    Retries for half a second, as `acquire` does, so that a concurrent `is_held` does not prevent it.
    """
    with contextlib.suppress(OSError):
        return _open_locked(path, shared=True)
    return None


def lock(handle: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed or this process ends; return False if another process has locked it.

    Raises OSError if the file system does not support locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_locked(path: Path, *, shared: bool) -> int | None:
    """Open and lock `path`; return None if another process holds the lock for more than half a second."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # CLOEXEC: children must not hold the lock
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
    """Return whether any process, including this one, holds a lock on `path`; False if locks are not supported."""
    try:
        refuse_special(path)
        access = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY  # exclusive locks on NFS need write access
        handle = os.open(path, access | os.O_CLOEXEC)
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
            return _is_blocked(handle, shared=True)  # another user's run on NFS, opened without write access
        return False  # the file system does not support locks


def holder(path: Path) -> str:
    """Return 'pid 12 on host a' from a lock file, or 'another process'."""
    try:
        owner = json.loads(path.read_text())
        return f"pid {owner['pid']} on host {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
