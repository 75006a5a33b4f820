"""Iterate over the files in a folder of logs, with a limit on their number."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from superpod.errors import UserError

MAX_VISITED = 200_000
"""Maximum number of files and folders to visit, which takes seconds. No run has as many."""


def iterate_files(folder: Path, skipped_names: Collection[str] = ()) -> Iterator[Path]:
    """Yield the files in `folder` and its subfolders in alphabetical order.

    Symbolic links to folders are not followed, because they may form cycles. Folders that disappear or cannot be read
    are skipped.

    Args:
        folder: the folder to search.
        skipped_names: names of folders to skip.

    Raises:
        UserError: the folder contains more than MAX_VISITED files and folders.
        OSError: `folder` itself cannot be read.
    """
    visited_count = 0
    pending_entries = [_sort_reversed(os.scandir(folder))]
    while pending_entries:
        if not pending_entries[-1]:
            pending_entries.pop()
            continue
        entry = pending_entries[-1].pop()
        visited_count += 1
        if visited_count > MAX_VISITED:
            raise UserError(
                f"{folder} contains more than {MAX_VISITED:,} files and folders",
                "specify the folder with the logs of one run",
            )
        if entry.is_dir(follow_symlinks=False):
            pending_entries.append([] if entry.name in skipped_names else _list_entries(entry))
        elif _is_file(entry):
            yield Path(entry.path)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a symbolic link to itself
        return False


def _list_entries(entry: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    try:
        return _sort_reversed(os.scandir(entry.path))
    except OSError:
        return []


def _sort_reversed(entries: Iterable[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    """Sort entries by descending name, so that `pop` returns them in alphabetical order."""
    return sorted(entries, key=lambda entry: entry.name, reverse=True)
