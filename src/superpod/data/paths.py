"""Validate paths given by users before they are used."""

import errno
import os
import tempfile
from pathlib import Path

from superpod.errors import UserError

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_NAME = ".partial/.tokenizer-12345678/tokenizer/special_tokens_map.json"
"""Longest relative path of a file in a data folder, to check the file system's limit."""
CHOOSE_OTHER_OUT = "choose another --out"


def shorten(text: object) -> str:
    """Return a path or value as one line for a message; beyond 300 characters, the middle is replaced by dots."""
    line = str(text)
    line = line if len(line) <= 300 else f"{line[:100]}...{line[-60:]} ({len(line)} characters)"
    return line if line.isprintable() else repr(line)


def check(path: str | Path, where: str = "", hint: str = "choose another path") -> None:
    """Check that the system accepts a path, which does not have to exist.

    Args:
        path: path to check.
        where: beginning of the error message: the option, or the file and key, that contains the path.
        hint: next step for the user.

    Raises:
        UserError: the path is too long, contains NUL, or is below a folder without permission.
    """
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise UserError(f"{where}{shorten(path)}: {error.strerror}", hint) from None
    except ValueError as error:  # NUL, or an unpaired surrogate
        raise UserError(f"{where}{shorten(path)} is not a path: {error}", hint) from None


def check_folder(path: Path, where: str = "", hint: str = CHOOSE_OTHER_OUT) -> Path:
    """Return the nearest existing folder among `path` and its parents. Raises UserError if it is a file."""
    check(path, where, hint)
    # lexists, because a dangling link also prevents the creation of a folder.
    nearest_parent = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not nearest_parent.is_dir():
        raise UserError(f"{where}{shorten(nearest_parent)} is a file, not a folder", hint)
    return nearest_parent


def check_output_folder(folder: Path, finished_file: str) -> None:
    """Check that a data folder can be created or written, without creating it.

    A complete data folder, which contains the file `finished_file`, may be read-only.

    Raises:
        UserError: the folder cannot be written, or its path is invalid.
    """
    nearest_parent = check_folder(folder)
    check(folder / _LONGEST_NAME, hint=CHOOSE_OTHER_OUT)
    if (folder / finished_file).is_file():
        return
    if nearest_parent == folder:
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise UserError(
                f"{shorten(folder)} cannot be written: no permission, or a read-only file system", CHOOSE_OTHER_OUT
            )
        return
    try:  # os.access is not reliable for root, for example in /proc
        os.rmdir(tempfile.mkdtemp(prefix=".recipes-", dir=nearest_parent))
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise UserError(f"{shorten(folder)} cannot be written: {error.strerror}", CHOOSE_OTHER_OUT) from None
