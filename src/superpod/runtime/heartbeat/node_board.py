"""Share the newest records of a node's ranks in a small file in shared memory.

It is accessed with pread and pwrite instead of mmap, so that a full /dev/shm causes an error and not a SIGBUS. Every
rank holds a shared lock on the file while it runs, which distinguishes files in use from files of killed ranks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
import tempfile
from collections.abc import Container
from pathlib import Path

from superpod.common import locks
from superpod.runtime.heartbeat import heartbeat_pages as pages
from superpod.runtime.heartbeat.heartbeat_pages import HEADER_BYTES, PAGE, RECORD_BYTES, RankLocation

PREFIX = "superpod-heartbeat"
_DUE = struct.Struct("<d")


def shared_memory_folders() -> list[Path]:
    """Return the folders in which the file may be, in order of preference."""
    return [Path("/dev/shm"), Path(tempfile.gettempdir())]


class NodeBoard:
    """The records of a node's ranks, and the Unix time at which the next write to the shared file system is due.

    If the file in shared memory cannot be created, the board stays empty, and each rank writes its own record.

    `folder` is the attempt's `heartbeat` folder, `place` the location of this rank.
    """

    def __init__(self, folder: Path, place: RankLocation) -> None:
        self._place = place
        self._bytes = place.pages * PAGE
        self._last = RankLocation(local_rank=place.local_size - 1, local_size=place.local_size).record_at
        self._due = 0.0  # used if there is no file
        key = hashlib.sha256(f"{Path(folder).absolute()}|{place.node}".encode()).hexdigest()[:16]
        self._handle, self.path = -1, Path()
        for where in shared_memory_folders():
            with contextlib.suppress(OSError):
                if place.local_rank == 0:
                    remove_stale_files(where)
                self.path = where / f"{PREFIX}-{os.getuid()}-{key}"
                self._handle = _open_locked(self.path, self._bytes)
                break

    @property
    def due(self) -> float:
        """Unix time at which the next write is due; 0 before the first write."""
        with contextlib.suppress(OSError, struct.error):
            if self._handle >= 0:
                return float(_DUE.unpack(os.pread(self._handle, 8, 0))[0])
        return self._due

    def set_due(self, at: float) -> None:
        """Set the Unix time at which the next write is due."""
        self._due = at
        with contextlib.suppress(OSError):
            if self._handle >= 0:
                os.pwrite(self._handle, _DUE.pack(at), 0)

    def put(self, record: bytes) -> None:
        """Store the encoded record of this rank."""
        with contextlib.suppress(OSError):
            if self._handle >= 0:
                os.pwrite(self._handle, record, self._place.record_at)

    def compose(self, head: bytes, own: bytes) -> list[tuple[bytes, int]]:
        """Return the blocks to write to `heartbeat/nodes` as (data, offset); one block if all ranks stored a record.

        `head` is the encoded header, `own` this rank's record. A rank that stored none (it has a different or a full
        /dev/shm) may write its record itself, so the blocks exclude it.
        """
        place, data = self._place, self._read() or bytes(self._bytes)
        parts: list[tuple[bytes, int]] = []
        for at in range(0, self._bytes, PAGE):
            parts.append((head, at))
            for slot in range(at + HEADER_BYTES, at + PAGE, RECORD_BYTES):
                record = own if slot == place.record_at else data[slot : slot + RECORD_BYTES]
                if any(record) or slot > self._last:
                    parts.append((record, slot))
        return [(part, place.at + at) for part, at in _join_adjacent(parts)]

    def all_ranks_in(self, phases: Container[str]) -> bool:
        """Return whether all ranks of the node are in one of `phases`; True if the file cannot be read."""
        data = self._read()
        if data is None:
            return True
        size = self._place.local_size
        offsets = (RankLocation(local_rank=rank, local_size=size).record_at for rank in range(size))
        return all(pages.phase_of(data[at : at + RECORD_BYTES]) in phases for at in offsets)

    def remove(self) -> None:
        """Remove the file. Ranks that have it open can still use it."""
        with contextlib.suppress(OSError):
            if self._handle >= 0:
                self.path.unlink()

    def _read(self) -> bytes | None:
        if self._handle < 0:
            return None
        with contextlib.suppress(OSError):
            data = os.pread(self._handle, self._bytes, 0)
            return data if len(data) == self._bytes else None
        return None


def _join_adjacent(parts: list[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """Join adjacent (data, offset) parts, which must be sorted by offset."""
    joined: list[tuple[bytearray, int]] = []
    for part, at in parts:
        if joined and joined[-1][1] + len(joined[-1][0]) == at:
            joined[-1][0].extend(part)
        else:
            joined.append((bytearray(part), at))
    return [(bytes(part), at) for part, at in joined]


def _open_locked(path: Path, size: int) -> int:
    """Open or create a file of `size` bytes with a shared lock, which the kernel releases when this process exits.

    Raises OSError if there is no space, the folder does not exist, or the file belongs to another user.
    """
    while True:
        # /dev/shm is shared by all users: do not follow a link that another user may have placed there.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(handle).st_uid != os.geteuid():  # in /dev/shm, any user could have created it
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
            os.posix_fallocate(handle, 0, size)
            locks.lock(handle, shared=True, wait=True)
            if os.fstat(handle).st_nlink:  # not yet removed by `remove_stale_files`
                return handle
        except OSError:
            os.close(handle)
            raise
        os.close(handle)


def remove_stale_files(where: Path) -> None:
    """Remove the files of killed ranks of this user in the folder `where`: no process holds a lock on them."""
    for path in where.glob(f"{PREFIX}-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if locks.lock(handle):
                    path.unlink()
            finally:
                os.close(handle)
