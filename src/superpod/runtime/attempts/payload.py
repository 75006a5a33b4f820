"""Pack the code that a job executes on its nodes into a reproducible archive."""

from __future__ import annotations

import gzip
import io
import tarfile
from functools import cache
from pathlib import Path

from superpod.common import package_files

PACKAGE = Path(__file__).absolute().parents[2]

COMMON = ("atomic_file", "json_files", "locks", "parent_death", "redaction", "units")
FILES = (
    "errors.py",
    *(f"common/{name}.py" for name in COMMON),
    "diagnosis/**/*.py",
    "runtime/**/*.py",
)
"""The packed files. They use the standard library only, except callbacks (lightning) and measurements (torch)."""

EXCLUDED_FILES = ("payload.py", "local_ranks.py")
"""Files that are not packed, since they are needed only on the machine that submits or launches attempts."""


@cache
def pack_runtime(more: tuple[tuple[str, Path], ...] = ()) -> bytes:
    """Return a tar.gz of the package `superpod` with the files in FILES, without modification times and owners.

    `more` lists additional files as (path in the archive, file).
    """
    files = {}
    for pattern in FILES:
        for path in sorted(PACKAGE.glob(pattern)):
            if path.name not in EXCLUDED_FILES:
                files[f"superpod/{path.relative_to(PACKAGE).as_posix()}"] = path
    files["superpod/slurm/checks/node.sh"] = package_files.included_folder("slurm") / "checks" / "node.sh"
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, path in {**files, **dict(more)}.items():
            data = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), mtime=0)
