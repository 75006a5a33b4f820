"""Copies the small files of runs from a cluster behind SSH to a temporary folder on this machine."""

from __future__ import annotations

import atexit
import io
import shlex
import shutil
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection

ARCHIVE_SCRIPT = r"""
cd "$1" 2>/dev/null || exit 0
find . \( -path '*/nemo' -o -path './.jobs' -o -path './*/*/code*' -o -path '*/checkpoints/*/manifest' \
    -o -path './*/*/damaged' \) -prune \
    -o -type f \( -path '*/heartbeat/nodes' -o \( -name '*.json' -o -name '*.jsonl' -o -name done \
    -o -name stop -o -name job.sbatch -o -name common.pt \) -size -8192k \) -readable -print0 |
    { tar -cz --ignore-failed-read --null -T -; [ $? -le 1 ]; }
"""
"""Archives the small files of all runs in a folder, which may grow or disappear in the meantime.

tar exits with 1 if a file changed while it was read and, without `--ignore-failed-read`, with 2 if one disappeared
(tar(1)). Readers skip truncated lines and records.
"""


@dataclass(frozen=True)
class Mirror:
    """A local copy of a folder for runs on a cluster behind SSH."""

    path: Path
    remote: str
    """path of the folder on the cluster"""
    users: dict[Path, str] = field(default_factory=dict)
    """owner of each run, by its path in the copy"""

    def remote_path(self, run: Path) -> str:
        """Return the path on the cluster of a run in the copy."""
        return f"{self.remote}/{run.relative_to(self.path)}"

    def with_remote_paths(self, run: Path, text: str) -> str:
        """Return a text about a run with paths in the copy replaced by paths on the cluster."""
        text = text.replace(shlex.quote(str(run)), shlex.quote(self.remote_path(run)))
        return text.replace(str(self.path), self.remote)


def fetch(connection: Connection, folder: str) -> Mirror:
    """Copy the files that `recipes status` reads for the runs in `folder`, without weights and logs.

    Each call creates a new copy, so that a done or stop marker that was removed on the cluster does not remain in it.
    """
    copy = Mirror(Path(tempfile.mkdtemp(prefix="recipes-mirror-")), folder.rstrip("/"))
    atexit.register(shutil.rmtree, copy.path, ignore_errors=True)
    packed = connection.run_bytes(["sh", "-s", "--", folder], stdin=ARCHIVE_SCRIPT.encode(), limit_s=120)
    if packed:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
            archive.extractall(copy.path, filter="data")
            files = [member for member in archive if Path(member.name).name == "run.json"]
        copy.users.update({copy.path / Path(member.name).parent: member.uname or str(member.uid) for member in files})
    return copy
