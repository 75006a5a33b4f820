"""The file that a user names for an output: checked before the work starts, then written in one step."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from superpod.common import atomic_file
from superpod.errors import UserError

ENDS = 4096
"""Bytes at the start and at the end of a file by which its maker is known."""

IsOurs = Callable[[bytes, bytes], bool]
"""Whether a file with such a start and such an end was written by the verb that is to write it again."""


def check(path: Path, option: str, is_ours: IsOurs, *, by: str = "recipes", to_devices: bool = False) -> None:
    """Check that `path`, which `option` names, can be written and replaces only a file of ours.

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
    with _as_user_error(path, option):
        if to_devices and _is_device(path):
            return
        if path.is_symlink():
            raise UserError(f"{option} {path} is a link to {path.readlink()}", "name the file itself, or another")
        if path.exists() and not path.is_dir() and not (path.is_file() and _is_replaceable(path, is_ours)):
            raise UserError(f"{option} {path} exists, and `{by}` did not write it", "choose another name, or remove it")
    _check_folder(path, option)


def check_new(path: Path, option: str, *, force: bool) -> None:
    """Check that `path`, which `option` names, can be written and does not exist yet; --force allows that it does.

    Raises:
        UserError: it is a folder, it exists (without `force`), or its folder takes no files.
    """
    _check_folder(path, option)
    if os.path.lexists(path) and not force:
        raise UserError(f"{option} {path} exists already", "--force overwrites it")


def write(path: Path, content: str | bytes, option: str, permissions: int | None = None) -> None:
    """Write all of `content` to the file that `option` names, or nothing; a device is written to directly.

    Raises:
        UserError: no space, no permission.
    """
    data = content.encode() if isinstance(content, str) else content
    with _as_user_error(path, option), opened(path, permissions=permissions) as stream:
        stream.write(data)


@contextlib.contextmanager
def opened(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """`atomic_file.opened`, but a pipe or a device, such as /dev/stdout, is written to and not replaced.

    Raises:
        OSError: no space, no permission.
    """
    if _is_device(path):
        options.pop("permissions", None)
        with path.open(mode, **options) as stream:
            yield stream
        return
    with atomic_file.opened(path, mode, **options) as stream:
        yield stream


def _check_folder(path: Path, option: str) -> None:
    with _as_user_error(path, option):
        if path.is_dir():
            raise UserError(f"{option} {path} is a folder", "name a file in it")
        if not path.parent.is_dir():
            raise UserError(f"{option} {path}: there is no folder {path.parent}", "make it, or choose another place")
        with tempfile.TemporaryFile(dir=path.parent):  # os.access knows no read-only mounts of containers
            pass


@contextlib.contextmanager
def _as_user_error(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}", "choose another place") from error


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _is_replaceable(path: Path, is_ours: IsOurs) -> bool:
    with path.open("rb") as file:
        start = file.read(ENDS)
        file.seek(max(0, path.stat().st_size - ENDS))
        return not start or is_ours(start, file.read(ENDS))
