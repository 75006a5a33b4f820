"""Locks of a run, with concurrent calls of `is_held`."""

import errno
import fcntl
import os
import threading
import time

from superpod.common import locks


def test_is_held_does_not_prevent_a_shared_lock(tmp_path):
    path = tmp_path / ".ranks"
    look = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(look, fcntl.LOCK_EX)  # as `is_held` does, for an instant
    threading.Timer(0.2, lambda: os.close(look)).start()
    held = locks.acquire_shared(path)
    assert held is not None
    assert locks.is_held(path)
    os.close(held)
    assert not locks.is_held(path)


def test_an_exclusive_lock_is_not_shared(tmp_path):
    held, began = locks.acquire(tmp_path / "lock"), time.monotonic()
    assert held is not None
    assert locks.acquire_shared(tmp_path / "lock") is None
    assert 0.4 < time.monotonic() - began < 5
    os.close(held)


def test_is_held_works_without_write_access(tmp_path, monkeypatch):
    """On NFS, exclusive locks need write access (flock(2))."""
    path, flock = tmp_path / "lock", fcntl.flock
    held = locks.acquire(path)
    assert held is not None

    def as_on_nfs(handle, kind):
        if kind & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, kind)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    assert locks.is_held(path)
    os.close(held)
    assert not locks.is_held(path)
