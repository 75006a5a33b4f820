"""Check paths given by users, so that bad ones are reported before a system call fails."""

import errno
import os
import tempfile
from pathlib import Path

from superpod.errors import UserError

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_NAME = ".partial/.tokenizer-12345678/tokenizer/special_tokens_map.json"
"""The longest path of a file created inside a data folder, to check the system's limit."""
OTHER_OUT = "choose another --out"


def shorten(text: object) -> str:
    """Format a path or value for a message: on one line, and shortened in the middle if it is very long."""
    line = str(text)
    line = line if len(line) <= 300 else f"{line[:100]}...{line[-60:]} ({len(line)} characters)"
    return line if line.isprintable() else repr(line)


def check(path: str | Path, where: str = "", hint: str = "choose another path") -> None:
    """Reject a path that cannot be accessed (too long, NUL, no permission); it need not exist. Raises UserError.

    `where` begins the message, and is the option, or the file and key that contain the path.
    """
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise UserError(f"{where}{shorten(path)}: {error.strerror}", hint) from None
    except ValueError as error:  # NUL, or an unpaired surrogate
        raise UserError(f"{where}{shorten(path)} is not a path: {error}", hint) from None


def check_folder(path: Path, where: str = "", hint: str = OTHER_OUT) -> Path:
    """Return the nearest existing folder among `path` and its parents; raise UserError if `path` cannot be a folder."""
    check(path, where, hint)
    # lexists, because a dangling link also prevents the creation of a folder.
    nearest_parent = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not nearest_parent.is_dir():
        raise UserError(f"{where}{shorten(nearest_parent)} is a file, not a folder", hint)
    return nearest_parent


def check_out(folder: Path, finished_file: str) -> None:
    """Reject a data folder that cannot be created or written, without changing anything. Raises UserError.

    A folder that contains the file `finished_file` may be read-only, because nothing is written to it.
    """
    nearest_parent = check_folder(folder)
    check(folder / _LONGEST_NAME, hint=OTHER_OUT)
    if (folder / finished_file).is_file():
        return
    if nearest_parent == folder:
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise UserError(
                f"{shorten(folder)} cannot be written: no permission, or a read-only file system", OTHER_OUT
            )
        return
    try:  # os.access is not reliable for root, for example in /proc
        os.rmdir(tempfile.mkdtemp(prefix=".recipes-", dir=nearest_parent))
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise UserError(f"{shorten(folder)} cannot be written: {error.strerror}", OTHER_OUT) from None
