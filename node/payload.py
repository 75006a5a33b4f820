"""What a job carries beside its recipe: a small runtime, as one archive that is the same for the same files."""

from __future__ import annotations

import gzip
import io
import tarfile
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).absolute().parents[1]  # not resolved: in a checkout src/superpod/node is a link

FILES = ("errors.py", "node/*.py", "slurm/checks/node.sh")
"""Standard library only, but for the callback, which needs lightning, and the measurements, which need torch."""

STAY = ("payload.py", "processes.py")
"""These run only where an attempt is submitted or launched; processes.py needs psutil."""


@cache
def runtime() -> bytes:
    """A tar.gz of the runtime as the package `superpod`, without times and owners."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for pattern in FILES:
            for path in sorted(path for path in PACKAGE.glob(pattern) if path.name not in STAY):
                data = path.read_bytes()
                entry = tarfile.TarInfo(f"superpod/{path.relative_to(PACKAGE).as_posix()}")
                entry.size, entry.mode = len(data), 0o644
                archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), mtime=0)
