"""The file that a user names for an output: one that we wrote is replaced, any other is refused before the work."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from superpod.errors import UserError

ENDS = 4096
"""Bytes at the start and at the end of a file by which its maker is known."""

IsOurs = Callable[[bytes, bytes], bool]
"""Whether a file with such a start and such an end was written by the verb that is to write it again."""


def check(path: Path, option: str, is_ours: IsOurs, *, by: str = "recipes", to_devices: bool = False) -> None:
    """Check that `path`, which `option` names, can be written and that nothing of anybody else's is lost.

    A link is refused: to write to it would either change the file that it names or put another in its own place. An
    empty file, as mktemp makes them, may be replaced.

    Args:
        path: the file to write.
        option: the option that names it.
        is_ours: knows the files that may be replaced.
        by: the command that writes it.
        to_devices: whether it may be a pipe or a device, such as /dev/stdout.

    Raises:
        UserError: it is a folder, a link, or a file that is not ours; or its folder takes no files.
    """
    try:
        if to_devices and path.exists() and not path.is_file() and not path.is_dir():
            return
        if path.is_symlink():
            raise UserError(f"{option} {path} is a link to {path.readlink()}", "name the file itself, or another")
        if path.is_dir():
            raise UserError(f"{option} {path} is a folder", "name a file in it")
        if not path.parent.is_dir():
            raise UserError(f"{option} {path}: there is no folder {path.parent}", "make it, or choose another place")
        if path.exists() and not (path.is_file() and _may_go(path, is_ours)):
            raise UserError(f"{option} {path} exists, and `{by}` did not write it", "choose another name, or remove it")
        with tempfile.TemporaryFile(dir=path.parent):  # os.access knows no read-only mounts of containers
            pass
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}", "choose another place") from error


def _may_go(path: Path, is_ours: IsOurs) -> bool:
    with path.open("rb") as file:
        start = file.read(ENDS)
        file.seek(max(0, path.stat().st_size - ENDS))
        return not start or is_ours(start, file.read(ENDS))
