"""Refuse, before a run starts, what would end it later."""

from __future__ import annotations

import shutil
from pathlib import Path

from superpod.errors import UserError

LOGS_BYTES = 16 * 2**20
"""What a run writes beside its checkpoints, roughly."""


def disk(folder: Path, checkpoint_bytes: int) -> None:
    """Refuse a run whose folder has no room for two checkpoints: the newest complete one, and the next in the making.

    Raises:
        UserError: with what is needed and what is free.
    """
    need = 2 * checkpoint_bytes + LOGS_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"two checkpoints of {checkpoint_bytes / 2**20:,.0f} MiB and logs need {need / 2**20:,.0f} MiB, and "
            f"{free / 2**20:,.0f} MiB are free under {folder}",
            "make room there, or name another folder with --runs",
        )


def writable(runs: Path) -> None:
    """Refuse a folder for runs that cannot be written.

    Raises:
        UserError: with what the system says.
    """
    import tempfile

    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs):
            pass
    except OSError as error:
        raise UserError(f"cannot write {runs}: {error.strerror}", "name another folder with --runs") from None
