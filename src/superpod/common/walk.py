"""The files below a folder that a user named as one run's: no more than a run can have, and no folder twice."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from superpod.errors import UserError

MOST_LOOKED_AT = 200_000
"""Files and folders that are looked at, some seconds' worth: a folder with more is no run's."""


def below(folder: Path, skipped: Collection[str] = ()) -> Iterator[Path]:
    """The files below `folder`, in the order of their names, without the folders that `skipped` names.

    Links to folders are not followed: they may lead in circles. What vanishes meanwhile, or may not be read, is left
    out.

    Raises:
        UserError: there is more below it than a run has.
        OSError: `folder` itself cannot be read.
    """
    looked_at = 0
    waiting = [sorted(os.scandir(folder), key=_name, reverse=True)]
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        entry = waiting[-1].pop()
        looked_at += 1
        if looked_at > MOST_LOOKED_AT:
            raise UserError(
                f"{folder} holds more than {MOST_LOOKED_AT:,} files and folders", "name the folder of one run's logs"
            )
        if entry.is_dir(follow_symlinks=False):
            waiting.append([] if entry.name in skipped else _inside(entry))
        elif _is_file(entry):
            yield Path(entry.path)


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False


def _inside(entry: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    try:
        return sorted(os.scandir(entry.path), key=_name, reverse=True)
    except OSError:
        return []
