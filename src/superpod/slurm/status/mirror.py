"""A copy of the small files of runs behind SSH, for as long as a command lasts, so that readers need no connection."""

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
"""What is copied of a folder of runs, while they go on: files grow while tar reads them, and vanish before it does.

tar ends with 1 where a file changed meanwhile, with 2 without `--ignore-failed-read` where one was gone (tar(1));
readers leave torn lines and records out.
"""


@dataclass(frozen=True)
class Mirror:
    """The copy, the folder that it is of, and who owns each run there."""

    path: Path
    remote: str
    users: dict[Path, str] = field(default_factory=dict)

    def remote_path(self, run: Path) -> str:
        """Where a run of the copy lies on the cluster."""
        return f"{self.remote}/{run.relative_to(self.path)}"

    def there(self, run: Path, text: str) -> str:
        """Words about a run, with its path on the cluster where they name that of the copy, which is soon gone."""
        text = text.replace(shlex.quote(str(run)), shlex.quote(self.remote_path(run)))
        return text.replace(str(self.path), self.remote)


def fetch(connection: Connection, folder: str) -> Mirror:
    """A copy of what `recipes status` reads of the runs in `folder`: no weights, no logs.

    It is new at each call: a done or stop marker that was removed there must not stay here.
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
