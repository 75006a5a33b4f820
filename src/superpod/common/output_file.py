"""Output files specified by the user: checked before the work starts, then written atomically."""

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
"""Number of bytes at the start and the end of a file to identify the program that wrote it."""

IsOurs = Callable[[bytes, bytes], bool]
"""Returns, based on the first and last bytes of a file, whether the command has written it and may replace it."""


def check(path: Path, option: str, is_ours: IsOurs, *, by: str = "recipes", to_devices: bool = False) -> None:
    """Check that the file of an option can be written, and that it replaces only a file written by the same command.

    Symbolic links are refused, because a user may expect either the link or its target to be replaced. An empty file,
    such as one created by mktemp, may be replaced.

    Args:
        path: the file to write.
        option: the option, for messages.
        is_ours: function that recognizes files that may be replaced.
        by: the command, for messages.
        to_devices: permit a pipe or a device, such as /dev/stdout.

    Raises:
        UserError: the path is a folder, a link, or a file of another program, or its folder is not writable.
    """
    with _as_user_error(path, option):
        if to_devices and _is_device(path):
            return
        if path.is_symlink():
            raise UserError(
                f"{option} {path} is a link to {path.readlink()}", "specify its target, or a different file"
            )
        if path.exists() and not path.is_dir() and not (path.is_file() and _is_replaceable(path, is_ours)):
            raise UserError(
                f"{option} {path} exists and was not written by `{by}`", "choose another name, or remove the file"
            )
    _check_folder(path, option)


def check_new(path: Path, option: str, *, force: bool) -> None:
    """Check that the file of an option can be written and, without `force`, that it does not exist yet.

    Raises:
        UserError: the path is a folder, exists (without `force`), or its folder is not writable.
    """
    _check_folder(path, option)
    if os.path.lexists(path) and not force:
        raise UserError(f"{option} {path} already exists", "add --force to overwrite it")


def write(path: Path, content: str | bytes, option: str, permissions: int | None = None) -> None:
    """Write `content` to the file of an option, atomically unless it is a device.

    Raises:
        UserError: writing failed, for example because the disk is full.
    """
    data = content.encode() if isinstance(content, str) else content
    with _as_user_error(path, option), open_atomically(path, permissions=permissions) as stream:
        stream.write(data)


@contextlib.contextmanager
def open_atomically(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """Open a file as `atomic_file.open_atomically` does; open a pipe or a device, such as /dev/stdout, directly.

    Raises:
        OSError: writing failed.
    """
    if _is_device(path):
        options.pop("permissions", None)
        with path.open(mode, **options) as stream:
            yield stream
        return
    with atomic_file.open_atomically(path, mode, **options) as stream:
        yield stream


def _check_folder(path: Path, option: str) -> None:
    with _as_user_error(path, option):
        if path.is_dir():
            raise UserError(f"{option} {path} is a folder", "specify a file in it")
        if not path.parent.is_dir():
            raise UserError(
                f"{option} {path}: folder {path.parent} does not exist", "create it, or choose another folder"
            )
        with tempfile.TemporaryFile(dir=path.parent):  # os.access does not detect read-only mounts in containers
            pass


@contextlib.contextmanager
def _as_user_error(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}", "choose another folder") from error


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _is_replaceable(path: Path, is_ours: IsOurs) -> bool:
    with path.open("rb") as file:
        start = file.read(ENDS)
        file.seek(max(0, path.stat().st_size - ENDS))
        return not start or is_ours(start, file.read(ENDS))
