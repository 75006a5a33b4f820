"""Check output files of the user before the work starts, and write them atomically at its end."""

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
"""Number of bytes at the start and at the end of a file that identify the program that wrote it."""

IsOurs = Callable[[bytes, bytes], bool]
"""Returns, for the first and last bytes of a file, whether the command wrote the file and may replace it."""


def check(path: Path, option: str, is_ours: IsOurs, *, by: str = "recipes", to_devices: bool = False) -> None:
    """Check that an option's output file can be written, and replaces nothing but an output of the same command.

    Symbolic links are refused, because a user may expect either the link or its target to be replaced. An empty file,
    such as one created by mktemp, may be replaced.

    Args:
        path: the file to write.
        option: name of the option, for messages.
        is_ours: function that recognizes outputs of the command.
        by: the command, for messages.
        to_devices: whether a pipe or a device, such as /dev/stdout, is allowed.

    Raises:
        UserError: the path is a folder, a link, or another program's file, or its folder is not writable.
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
    """Check that an option's output file can be written and, unless `force` is set, does not exist yet.

    Raises:
        UserError: the path is a folder, exists (without `force`), or its folder is not writable.
    """
    _check_folder(path, option)
    if os.path.lexists(path) and not force:
        raise UserError(f"{option} {path} already exists", "add --force to overwrite it")


def write(path: Path, content: str | bytes, option: str, permissions: int | None = None) -> None:
    """Write `content` to an option's output file, atomically unless it is a device.

    Raises:
        UserError: writing failed, for example because the disk is full.
    """
    data = content.encode() if isinstance(content, str) else content
    with _as_user_error(path, option), open_atomically(path, permissions=permissions) as stream:
        stream.write(data)


@contextlib.contextmanager
def open_atomically(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """Yield a stream like `atomic_file.open_atomically`; a pipe or device, such as /dev/stdout, is opened directly.

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
    """Raise UserError if `path` is a folder, or its folder does not exist or is not writable."""
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
    """Convert OSErrors of the block to UserErrors about the output file."""
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
