"""The work folder of an unfinished build: its lock, its manifest, and the publication of its files."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from superpod.common import atomic_file, json_files, locks
from superpod.data.folder import FILE
from superpod.errors import UserError

_MANIFEST, _LOCK = "build.json", "lock"


class UnfinishedBuild:
    """The work folder `DIR/.partial` of a build, with its shards, manifest and lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / ".partial"

    def check_owner(self) -> None:
        """Raise UserError if the folder contains files, but neither a data folder nor an unfinished build."""
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file, not a folder", "choose another --out")
        names = sorted(os.listdir(self.folder)) if self.folder.exists() else []
        if names and FILE not in names and not self._is_build():
            listed_names = ", ".join(map(repr, names[:3]))
            if len(names) > 3:
                listed_names += f" and {len(names) - 3} more"
            message = f"{self.folder} contains other files: {listed_names}"
            raise UserError(message, "choose another --out, or an empty folder")

    def _is_build(self) -> bool:
        """Return whether the work folder belongs to a build, even if it has no manifest yet."""
        if not self.work.is_dir():
            return False
        names = set(os.listdir(self.work))
        return _MANIFEST in names or all(name == _LOCK or _MANIFEST in name for name in names)

    @contextmanager
    def lock(self, identity: str, note: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock of the folder during the block, and remove the work folder if the block succeeds.

        Args:
            identity: digest of text and options; the shards of a build with another identity are removed.
            note: called with messages for the user.

        Raises:
            UserError: another process is building in this folder.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        with open(self.work / _LOCK, "w") as lock:
            _acquire_lock(lock.fileno(), self.folder)
            self._remove_other_build(identity, note)
            yield
        self.remove_work_folder()

    def _remove_other_build(self, identity: str, note: Callable[[str], None]) -> None:
        manifest = self.work / _MANIFEST
        old_identity = (json_files.read_json(manifest) or {}).get("identity")
        if old_identity == identity:
            return
        if old_identity:
            note("the unfinished build in this folder used different text or options; starting over")
        for path in self.work.iterdir():
            if path.name not in (_LOCK, _MANIFEST):  # the manifest identifies the folder until it is replaced
                self.remove(path)
        atomic_file.write(manifest, json.dumps({"identity": identity}))

    def publish(self, paths: Iterable[Path]) -> None:
        """Move finished files and folders from the work folder to the data folder."""
        for path in paths:
            target = self.folder / path.name
            self.remove(target)
            path.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file or a folder, if it exists."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def remove_work_folder(self) -> None:
        """Remove the work folder, if it exists."""
        self.remove(self.work)


def _acquire_lock(handle: int, folder: Path) -> None:
    try:
        is_locked = locks.lock(handle)
    except OSError:
        return  # a file system without locks cannot prevent two simultaneous builds
    if not is_locked:
        raise UserError(f"another build is writing to {folder}", "wait for it, or choose another --out")
