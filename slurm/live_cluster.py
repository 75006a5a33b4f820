"""The facts of a live cluster: partitions, accounts, GPUs, folders. One shell collects them all."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.slurm.connection import Connection
    from superpod.slurm.profiles import Cluster

# Each answer follows \036 (record separator), its name and \037 (unit separator).
ASK = r"""
say() { printf '\036%s\037' "$1"; shift; "$@" 2>/dev/null; }
say partitions scontrol show partition -o
say nodes scontrol show node -o
say associations sacctmgr -nP show assoc user="$(id -un)" format=account,partition,qos
say config scontrol show config
say mpi sh -c 'srun --mpi=list 2>&1'
say srun sh -c 'srun --help | grep -c -- --container-image'
say python sh -c '"$0" -c "import sys; print(sys.version_info[0] * 100 + sys.version_info[1])"' "$1"
shift
say ranks_python sh -c '{ test -z "$0" || command -v "$0" >/dev/null; } && echo yes' "$1"
shift
runs=$1
say runs sh -c 'd=$0; while [ ! -e "$d" ] && [ "$d" != / ]; do d=$(dirname "$d"); done
    test -d "$d" && test -w "$d" && df -Pk "$d" | tail -n 1' "$runs"
for path; do
    printf '\036path:%s\037' "$path"
    if [ -d "$path" ] && [ -r "$path" ] && [ -x "$path" ]; then echo folder
    elif [ -f "$path" ] && [ -r "$path" ]; then echo file
    elif [ -e "$path" ]; then echo unreadable
    else echo missing; fi
done
"""


@dataclass(frozen=True)
class LiveCluster:
    """A cluster's answers. Empty tables mean that it did not answer, not that it has nothing."""

    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    associations: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)
    """account, partition ('' = all), QOS of this user"""
    enforces: str = ""
    """AccountingStorageEnforce"""
    mpi: list[str] = field(default_factory=list)
    has_pyxis: bool = False
    python: int = 0
    """of the batch script, as 309; 0 = not there"""
    ranks_python: bool = True
    runs_free: int | None = None
    """bytes free where run folders are made; None = it cannot be written"""
    paths: dict[str, str] = field(default_factory=dict)
    """path -> folder, file, unreadable or missing"""

    def nodes_of(self, partition: str) -> list[dict[str, str]]:
        """The nodes of a partition."""
        return [node for node in self.nodes.values() if partition in node.get("Partitions", "").split(",")]

    @property
    def default_partition(self) -> str:
        """Where Slurm puts a job that names none."""
        return next((name for name, p in self.partitions.items() if p.get("Default") == "YES"), "")


def ask(connection: Connection, cluster: Cluster, runs: str, paths: list[str], ranks_python: str = "") -> LiveCluster:
    """The cluster's facts, and what is at `paths` there.

    Raises:
        UserError: the connection fails, or Slurm does not answer.
    """
    words = [cluster.software.host_python, ranks_python, runs, *paths]
    output = connection.shell(ASK, *words, limit_s=120)
    answers = dict(part.split("\037", 1) for part in output.split("\036")[1:])
    if not answers.get("config", "").strip():
        raise UserError(f"{connection}: Slurm's controller does not answer", "`scontrol ping` there says more")
    return parse(answers)


def parse(answers: dict[str, str]) -> LiveCluster:
    """The facts from the raw output of each command in ASK."""
    config = dict(re.findall(r"^(\w+)\s+=\s*(.*)$", answers.get("config", ""), re.MULTILINE))
    rows = [line.split("|") for line in answers.get("associations", "").splitlines() if line.count("|") >= 2]
    free = re.match(r"\S+\s+\d+\s+\d+\s+(\d+)", answers.get("runs", "").strip())
    return LiveCluster(
        partitions=_table(answers.get("partitions", ""), "PartitionName"),
        nodes=_table(answers.get("nodes", ""), "NodeName"),
        associations=[(row[0], row[1], tuple(q for q in row[2].split(",") if q)) for row in rows],
        enforces=config.get("AccountingStorageEnforce", ""),
        mpi=re.findall(r"^(?:srun: )?\s*(\w+)$", answers.get("mpi", ""), re.MULTILINE),
        has_pyxis=answers.get("srun", "").strip() not in ("", "0"),
        python=int(answers.get("python", "").strip() or 0),
        ranks_python=answers.get("ranks_python", "yes").strip() == "yes",
        runs_free=int(free[1]) * 1024 if free else None,
        paths={key.removeprefix("path:"): value.strip() for key, value in answers.items() if key.startswith("path:")},
    )


def _table(text: str, key: str) -> dict[str, dict[str, str]]:
    rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines() if line.strip()]
    return {row[key]: row for row in rows if key in row}


def gpus_of(node: dict[str, str]) -> tuple[int, str]:
    """How many GPUs Slurm lists for a node, and of which type ('' = it names none)."""
    match = re.search(r"\bgpu(?::([A-Za-z]\w*))?:(\d+)", node.get("Gres", ""))  # gpu:h100:8(S:0-1) or gpu:8
    return (int(match[2]), match[1] or "") if match else (0, "")


def described(live: LiveCluster) -> str:
    """For people and bug reports, as JSON."""
    return json.dumps(live.__dict__, indent=1, default=str)
