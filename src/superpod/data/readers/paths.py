"""Check paths that a user gave, so that a bad one gets a message before a system call fails on it."""

import errno
import os
import tempfile
from pathlib import Path

from superpod.errors import UserError

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_NAME = ".partial/.tokenizer-12345678/tokenizer/special_tokens_map.json"
"""The longest name of a file made below a data folder: if this fits the system's limit, all others do."""
OTHER_OUT = "choose another --out"


def short(text: object) -> str:
    """A path or a value for a message: on one line, and cut in the middle when very long."""
    line = str(text)
    line = line if len(line) <= 300 else f"{line[:100]}...{line[-60:]} ({len(line)} characters)"
    return line if line.isprintable() else repr(line)


def check(path: str | Path, where: str = "", hint: str = "give another path") -> None:
    """UserError when the system cannot look at `path` (too long, NUL, no permission); an absent path is fine.

    `where` begins the message: the file and the key that name the path.
    """
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise UserError(f"{where}{short(path)}: {error.strerror}", hint) from None
    except ValueError as error:  # NUL, or half a surrogate pair
        raise UserError(f"{where}{short(path)} is not a path: {error}", hint) from None


def check_folder(path: Path, where: str = "", hint: str = OTHER_OUT) -> Path:
    """The nearest of `path` and its parents that exists; UserError unless a folder can stand at `path`."""
    check(path, where, hint)
    # lexists, because a dangling link is in the way too.
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        raise UserError(f"{where}{short(nearest)} is a file, not a folder", hint)
    return nearest


def check_out(folder: Path, finished: str) -> None:
    """UserError when the data folder `folder` cannot be made or written; nothing is left behind.

    A folder with the file `finished` in it needs no writing, so it may be on a read-only disk.
    """
    nearest = check_folder(folder)
    check(folder / _LONGEST_NAME, hint=OTHER_OUT)
    if (folder / finished).is_file():
        return
    if nearest == folder:
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise UserError(f"cannot write {short(folder)}: no permission, or a read-only disk", OTHER_OUT)
        return
    try:  # os.access tells root that /proc is writable; only trying shows that it is not
        os.rmdir(tempfile.mkdtemp(prefix=".recipes-", dir=nearest))
    except OSError as error:
        if error.errno not in _FULL:
            raise UserError(f"cannot write {short(folder)}: {error.strerror}", OTHER_OUT) from None
