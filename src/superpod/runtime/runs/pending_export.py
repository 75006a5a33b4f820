"""Record the export of a fine-tuned model, without which its run is not done. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from superpod.common.json_files import JsonObject, read_json, write_json

EXPORTS_TO = "exports_to"
"""Key of run.json: the folder to export to, absolute or relative to the run folder."""
EXPORTED = "exported.json"
"""File in the run folder that describes the exported model, written after the export."""
EXPORTING = "exporting.json"
"""File in the run folder during an export: `{"folder": absolute path}`."""


def folder_of(run: Path) -> str | None:
    """Return the folder to which a run must still export; None if it exports nothing or has exported."""
    target = (read_json(run / "run.json") or {}).get(EXPORTS_TO)
    if not target or (run / EXPORTED).is_file():
        return None
    return str(target)


def set_folder(run: Path, target: str) -> None:
    """Set the folder to which a run exports in its run.json. Raises OSError."""
    write_json(run / "run.json", {**(read_json(run / "run.json") or {}), EXPORTS_TO: target})


def is_unrecorded(run: Path, folder: Path) -> bool:
    """Return whether an export of this run wrote `folder` but was killed before it recorded its end."""
    begun_export = read_json(run / EXPORTING) or {}
    if begun_export.get("folder") != os.path.abspath(folder):
        return False
    try:
        return folder.is_dir() and not folder.is_symlink() and _mtime_ns(folder) >= _mtime_ns(run / EXPORTING)
    except OSError:
        return False


def _mtime_ns(path: Path) -> int:
    """Return the modification time in ns, which is from the clock of the file system: those of nodes differ."""
    return path.stat().st_mtime_ns


@contextlib.contextmanager
def record_running_export(run: Path, folder: Path) -> Iterator[None]:
    """Record that an export to `folder` is running within the block. Removes the folder of a killed export first.

    A folder from elsewhere is kept, so that the export rejects it. The caller holds the run's lock. Raises OSError.
    """
    if is_unrecorded(run, folder):
        shutil.rmtree(folder)
    if not folder.exists():
        write_json(run / EXPORTING, {"folder": os.path.abspath(folder)})
    try:
        yield
    except BaseException:
        if not folder.exists():  # a folder that is created later does not belong to this export
            (run / EXPORTING).unlink(missing_ok=True)
        raise


def record(run: Path, facts: JsonObject) -> None:
    """Record the end of the export with `facts` about the exported model. Raises OSError."""
    write_json(run / EXPORTED, {"t": time.time(), **facts})
    (run / EXPORTING).unlink(missing_ok=True)


def discard_record(run: Path) -> None:
    """Remove the record of an export before further training, which makes the export outdated. Raises OSError."""
    (run / EXPORTED).unlink(missing_ok=True)
