"""The Hugging Face folder that a fine-tuning writes at its end: a run without it is not done. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from superpod.common.files import JsonObject, read_json, write_json

EXPORTS_TO = "exports_to"
"""Key of run.json: the folder to write, absolute or below the run folder."""
EXPORTED = "exported.json"
"""In the run folder, once that folder is written: what it holds."""
BEGUN = "exporting.json"
"""In the run folder, from the begin of an export to its end: `{"folder": absolute path}`."""


def left(run: Path) -> str:
    """The folder that a run must still write once it is trained; '' where it has, or need not."""
    target = (read_json(run / "run.json") or {}).get(EXPORTS_TO)
    return str(target) if target and not (run / EXPORTED).is_file() else ""


def write_to(run: Path, target: str) -> None:
    """Let the run write its folder there. Raises OSError."""
    write_json(run / "run.json", {**(read_json(run / "run.json") or {}), EXPORTS_TO: target})


def is_left_behind(run: Path, folder: Path) -> bool:
    """Whether an export of this run, which was ended before it could record it, has put that folder in place."""
    begun = read_json(run / BEGUN) or {}
    if begun.get("folder") != os.path.abspath(folder):
        return False
    try:
        return folder.is_dir() and not folder.is_symlink() and _changed(folder) >= _changed(run / BEGUN)
    except OSError:
        return False


def _changed(path: Path) -> int:
    """Nanoseconds, of the clock of the file system: nodes have others."""
    return path.stat().st_mtime_ns


@contextlib.contextmanager
def begun(run: Path, folder: Path) -> Iterator[None]:
    """Record that an export begins, and remove what an earlier one that was ended has put in its place.

    Another folder of that name stays as it is, for the export to refuse. Whoever calls holds the run's lock.
    Raises OSError.
    """
    if is_left_behind(run, folder):
        shutil.rmtree(folder)
    if not folder.exists():
        write_json(run / BEGUN, {"folder": os.path.abspath(folder)})
    try:
        yield
    except BaseException:
        if not folder.exists():  # a folder that comes there later is not of this export
            (run / BEGUN).unlink(missing_ok=True)
        raise


def note(run: Path, facts: JsonObject) -> None:
    """Record that the folder is written. Raises OSError."""
    write_json(run / EXPORTED, {"t": time.time(), **facts})
    (run / BEGUN).unlink(missing_ok=True)


def forget(run: Path) -> None:
    """Before more training: a folder that is there is of fewer steps. Raises OSError."""
    (run / EXPORTED).unlink(missing_ok=True)
