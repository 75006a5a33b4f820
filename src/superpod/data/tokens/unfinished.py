"""The work folder of a build that is not finished: who may write it, what it was made from, how it becomes final."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from superpod.common import atomic_file, locks
from superpod.data.folder import FILE
from superpod.errors import UserError

_MANIFEST, _LOCK = "build.json", "lock"


class UnfinishedBuild:
    """`DIR/.partial`: the shards of an unfinished build, its manifest and its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / ".partial"

    def check_owner(self) -> None:
        """UserError unless the folder is absent, empty, a data folder, or an unfinished build of ours."""
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file, not a folder", "choose another --out")
        names = sorted(os.listdir(self.folder)) if self.folder.exists() else []
        if names and FILE not in names and not self._ours():
            named = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise UserError(f"{self.folder} holds something else: {named}", "choose another --out, or an empty folder")

    def _ours(self) -> bool:
        # A build that ended before it wrote its manifest leaves no more than the lock and a temporary file.
        inside = set(os.listdir(self.work)) if self.work.is_dir() else {"not ours"}
        return _MANIFEST in inside or all(name == _LOCK or _MANIFEST in name for name in inside)

    @contextmanager
    def claimed(self, identity: str, note: Callable[[str], None]) -> Iterator[None]:
        """Hold the folder's lock while building. Shards of another `identity` are removed; success removes the folder.

        Raises:
            UserError: another process is building here.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        with open(self.work / _LOCK, "w") as lock:
            _lock(lock.fileno(), self.folder)
            self._match(identity, note)
            yield
        self.discard()

    def _match(self, identity: str, note: Callable[[str], None]) -> None:
        manifest = self.work / _MANIFEST
        try:
            before = json.loads(manifest.read_bytes()).get("identity")
        except (OSError, ValueError):
            before = None
        if before == identity:
            return
        if before:
            note("the unfinished build here is of other text or options: starting over")
        for path in self.work.iterdir():
            if path.name not in (_LOCK, _MANIFEST):  # the manifest marks the folder as ours until it is replaced
                self.drop(path)
        atomic_file.write(manifest, json.dumps({"identity": identity}))

    def publish(self, paths: Iterable[Path]) -> None:
        """Move finished files and folders from the work folder to their final names."""
        for path in paths:
            target = self.folder / path.name
            self.drop(target)
            path.rename(target)

    def drop(self, path: Path) -> None:
        """Remove a file or a folder, if it exists."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the work folder, if it exists."""
        self.drop(self.work)


def _lock(handle: int, folder: Path) -> None:
    try:
        is_locked = locks.lock(handle)
    except OSError:
        return  # a file system without locks: the user must then avoid two builds at once
    if not is_locked:
        raise UserError(f"another build is writing {folder}", "wait for it, or choose another --out")
