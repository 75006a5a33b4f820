"""The Hugging Face folder that a fine-tuning exports at its end; its run is not done before. Standard library only."""

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
EXPORTING = "exporting.json"
"""In the run folder while an export is running: `{"folder": absolute path}`."""


def folder_of(run: Path) -> str | None:
    """The folder that a run must still export once it is trained; None if it has none to export, or has exported it."""
    target = (read_json(run / "run.json") or {}).get(EXPORTS_TO)
    return str(target) if target and not (run / EXPORTED).is_file() else None


def set_folder(run: Path, target: str) -> None:
    """Set the folder that the run exports. Raises OSError."""
    write_json(run / "run.json", {**(read_json(run / "run.json") or {}), EXPORTS_TO: target})


def is_unrecorded(run: Path, folder: Path) -> bool:
    """Whether an export of this run wrote that folder and was killed before it could record it."""
    begun = read_json(run / EXPORTING) or {}
    if begun.get("folder") != os.path.abspath(folder):
        return False
    try:
        return folder.is_dir() and not folder.is_symlink() and _changed(folder) >= _changed(run / EXPORTING)
    except OSError:
        return False


def _changed(path: Path) -> int:
    """Nanoseconds, of the clock of the file system: nodes have others."""
    return path.stat().st_mtime_ns


@contextlib.contextmanager
def exporting(run: Path, folder: Path) -> Iterator[None]:
    """Record that an export is running, after removing the folder that a killed one has written.

    Any other folder of that name stays, and the export refuses it. The caller holds the run's lock. Raises OSError.
    """
    if is_unrecorded(run, folder):
        shutil.rmtree(folder)
    if not folder.exists():
        write_json(run / EXPORTING, {"folder": os.path.abspath(folder)})
    try:
        yield
    except BaseException:
        if not folder.exists():  # a folder that comes there later is not of this export
            (run / EXPORTING).unlink(missing_ok=True)
        raise


def record(run: Path, facts: JsonObject) -> None:
    """Record that the folder is written. Raises OSError."""
    write_json(run / EXPORTED, {"t": time.time(), **facts})
    (run / EXPORTING).unlink(missing_ok=True)


def discard_record(run: Path) -> None:
    """Before more training: an exported folder is of fewer steps. Raises OSError."""
    (run / EXPORTED).unlink(missing_ok=True)
