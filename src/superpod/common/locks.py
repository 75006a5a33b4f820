"""Lock files with flock. The kernel releases a lock when its holder ends, even if it is killed."""

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
"""Lock file in a run folder that the launcher holds."""
RANKS = ".ranks"
"""Lock file in a run folder that ranks share."""


def acquire(path: Path) -> int | None:
    """Acquire an exclusive lock on the file `path`, and write the pid and host of this process into it.

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
    """Acquire a shared lock on the file `path` until this process ends; return the open file descriptor.

    Retries like `acquire`. Returns None if another process holds an exclusive lock, or locks are not supported.
    """
    with contextlib.suppress(OSError):
        return _open_locked(path, shared=True)
    return None


def lock(handle: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed or this process ends; return whether it succeeded.

    Args:
        handle: the file descriptor.
        shared: acquire a shared lock instead of an exclusive one.
        wait: wait until other processes release their locks, instead of returning False.

    Raises:
        OSError: the file system does not support locks.
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
    """Return whether any process, including this one, holds a lock on the file `path`.

    Returns False if the file is missing, or the file system does not support locks.
    """
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
    """Return whether another file descriptor's lock prevents locking `handle`; otherwise, lock it."""
    try:
        return not lock(handle, shared=shared)
    except OSError as error:
        if error.errno == errno.EBADF and not shared:
            return _is_blocked(handle, shared=True)  # another user's run on NFS, opened without write access
        return False  # the file system does not support locks


def holder(path: Path) -> str:
    """Return the holder that a lock file names, such as 'pid 12 on host a', or 'another process' if it names none."""
    try:
        owner = json.loads(path.read_text())
        return f"pid {owner['pid']} on host {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
