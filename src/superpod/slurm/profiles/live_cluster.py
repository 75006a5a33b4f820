"""Queries the partitions, accounts, limits, GPUs and folders of a live cluster with one shell script."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.slurm.script import preamble
from superpod.slurm.script.batch_script import resource_options

if TYPE_CHECKING:
    from superpod.slurm.preflight.limits import JobSize
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection

PATHS = r"""
for path; do
    if [ -d "$path" ] && [ -r "$path" ] && [ -x "$path" ]; then say "path:$path" echo folder
    elif [ -f "$path" ] && [ -r "$path" ]; then say "path:$path" echo file
    elif [ -e "$path" ]; then say "path:$path" echo unreadable
    else say "path:$path" echo missing; fi
done
"""
"""Shell code that prints the state of each path among its arguments; `say` must be defined as in QUERY."""

# Each answer is preceded by \036 (record separator), its name and \037 (unit separator).
QUERY = r"""
say() { printf '\036%s\037' "$1"; shift; "$@" 2>/dev/null; }
export SLURM_TIME_FORMAT=standard
site=$(scontrol show config 2>/dev/null | sed -n 's/^ClusterName *= *//p')
say partitions scontrol show partition -o
say nodes scontrol show node -o
say associations sacctmgr -P show assoc cluster="$site" user="$(id -un)" format=account,partition,qos,defaultqos,\
maxjobs,maxsubmit,maxwall,maxtres,maxtrespernode,grpjobs,grpsubmit,grptres
say accounts sacctmgr -P show assoc cluster="$site" user= format=account,parentname,maxjobs,maxsubmit,maxwall,maxtres,\
maxtrespernode,grpjobs,grpsubmit,grptres
say qos sacctmgr -P show qos format=name,flags,maxwall,maxtres,maxtrespernode,maxjobspu,maxsubmitpu,maxtrespu,\
maxjobspa,maxsubmitpa,maxtrespa,grpjobs,grpsubmit,grptres
say queued squeue -h -r -u "$(id -un)" -o '%a|%q'
say user id -un
say default_account sacctmgr -P show user "$(id -un)" format=user,defaultaccount
say now date +%Y-%m-%dT%H:%M:%S
say reservations scontrol show reservation -o
say reserved sh -c "scontrol show reservation -o |
    sed -n 's/^ReservationName=\\([^ ]*\\).* Nodes=\\([^ ]*\\).*/\\1 \\2/p' |
    while read -r name nodes; do echo \$name \$(scontrol show hostnames \$nodes); done"
say config scontrol show config
say mpi sh -c 'srun --mpi=list 2>&1'
say srun sh -c 'srun --help | grep -c -- --container-image'
say python sh -c '"$0" -c "import sys; print(sys.version_info[0] * 100 + sys.version_info[1])"' "$1"
shift
say ranks_python sh -c '{ test -z "$0" || command -v "$0" >/dev/null; } && echo yes' "$1"
shift
# One shell loads all modules in order: a compiler module may make the modules of its libraries available.
say login bash -lc 'for module; do
        printf "\036module:%s\037" "$module"
        type module >/dev/null 2>&1 || continue  # no modules on this machine: a node may have them
        output=$(module load "$module" 2>&1) && ! echo "$output" | grep -Eq "FAILED" && echo loads || echo missing
        module load "$module" >/dev/null 2>&1
    done' bash $1 </dev/null
shift
runs=$1
say runs sh -c 'd=$0; while [ ! -e "$d" ] && [ "$d" != / ]; do d=$(dirname "$d"); done
    # `test -w` is not enough: root passes it, but cannot write in /proc or to a read-only file system
    test -d "$d" && t=$(mktemp "$d/.superpod-XXXXXXXX") && rm -f "$t" && df -Pk "$d" | tail -n 1' "$runs"
say open find "$runs/." -maxdepth 0 -perm /022 ! -perm -1000 -printf '%m %g'
""".replace("FAILED", preamble.LOAD_FAILURE)
QUERY += PATHS


@dataclass(frozen=True)
class Association:
    """A Slurm association of this user with an account."""

    account: str
    partition: str = ""
    """"" = all partitions"""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    limits: dict[str, str] = field(default_factory=dict)
    """limits by sacctmgr's names: MaxWall, MaxTRES, GrpTRES, ...; "" = no limit"""


@dataclass(frozen=True)
class Reservation:
    """Nodes reserved for users, accounts or maintenance."""

    name: str
    start: datetime
    end: datetime
    nodes: frozenset[str]
    flags: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class LiveCluster:
    """The state of a cluster. An empty field means that there was no answer, not that there are no entries."""

    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    associations: list[Association] = field(default_factory=list)
    """the associations of this user"""
    accounts: dict[str, dict[str, str]] = field(default_factory=dict)
    """limits of each account, shared by all its users"""
    qos: dict[str, dict[str, str]] = field(default_factory=dict)
    """limits and flags of each QOS, by sacctmgr's names"""
    queued: list[tuple[str, str]] = field(default_factory=list)
    """account and QOS of each job of this user in the queue"""
    user: str = ""
    default_account: str | None = None
    """account of a job without --account; None = unknown"""
    now: datetime | None = None
    """the cluster's time, in the same time zone as the reservations"""
    reservations: list[Reservation] = field(default_factory=list)
    enforces: str = ""
    """AccountingStorageEnforce"""
    topology: str = ""
    """TopologyPlugin, such as topology/block; "" = unknown"""
    mpi: list[str] = field(default_factory=list)
    """PMI plug-ins that srun lists"""
    mpi_failure: str = ""
    """srun's error if it cannot load the profile's PMI plug-in; otherwise "" """
    has_pyxis: bool = False
    python: int = 0
    """version of Python for the batch script, such as 309 for 3.9; 0 = it does not run"""
    ranks_python: bool = True
    """whether the Python interpreter for the ranks exists"""
    modules: dict[str, str] = field(default_factory=dict)
    """state of each module: loads, missing, or "" if the machine has no `module` command"""
    runs_free: int | None = None
    """free bytes in the folder for runs; None = it is not writable"""
    runs_open: str = ""
    """mode of the folder for runs if other users can write to it and it lacks the sticky bit; "" otherwise"""
    rejection: str = ""
    """sbatch's reason for rejecting a job of this size with the profile's options; "" = accepted"""
    paths: dict[str, str] = field(default_factory=dict)
    """state of each path: folder, file, unreadable or missing"""

    def nodes_in(self, partition: str) -> list[dict[str, str]]:
        """Return the nodes of one or more partitions, whose names are separated by commas."""
        names = {*partition.split(",")}
        return [node for node in self.nodes.values() if names & {*node.get("Partitions", "").split(",")}]

    @property
    def default_partition(self) -> str:
        """The partition of a job without --partition."""
        return next((name for name, p in self.partitions.items() if p.get("Default") == "YES"), "")


def query_cluster(
    connection: Connection,
    cluster: Cluster,
    runs: str,
    paths: list[str],
    ranks_python: str = "",
    size: JobSize | None = None,
) -> LiveCluster:
    """Return the state of a cluster, including the answer of `sbatch --test-only` to a job.

    Args:
        connection: connection to a login node.
        cluster: profile of the cluster.
        runs: folder for runs.
        paths: files and folders to look up.
        ranks_python: Python interpreter for the ranks; "" = not looked up.
        size: size of the job; None = one node with the profile's time limit, ignoring rejections that depend on the
            size.

    Raises:
        UserError: the connection fails, or Slurm does not answer.
    """
    arguments = [cluster.software.host_python, ranks_python, " ".join(cluster.software.modules), runs, *paths]
    output = connection.shell(QUERY, *arguments, limit_s=120)
    answers = dict(part.split("\037", 1) for part in output.split("\036")[1:])
    if not answers.get("config", "").strip():
        raise UserError(
            f"{connection}: Slurm's controller does not answer",
            "run `scontrol ping` there; `recipes render` needs no controller",
        )
    return replace(
        parse(answers),
        rejection=_sbatch_rejection(connection, cluster, size),
        mpi_failure=_mpi_failure(connection, cluster),
    )


# Messages of sbatch for a job that cannot start now (slurm_errno.c and slurm_protocol_defs of Slurm 22.05).
_TRANSIENT = re.compile(
    r"Requested nodes are busy|Required node not available|Requested partition configuration not available now"
    r"|Unable to contact|Socket timed out|Connection refused|temporarily unable|try again"
)
UNAVAILABLE = "Requested node configuration is not available"
"""Message of sbatch if no node has the requested size, but also while nodes are down, drained or reserved."""
_SIZE_DEPENDENT = re.compile(r"violates|time limit|[Cc]ount specification|" + UNAVAILABLE)
"""Rejections that depend on the size or time limit of the job."""


def expand_hosts(connection: Connection, option: str) -> list[str]:
    """Return the names of the nodes in an option such as `--nodelist=node[1-2]`.

    Raises:
        UserError: the value is not a Slurm hostlist.
    """
    return connection.run(["scontrol", "show", "hostnames", option.partition("=")[2]]).split()


def nodelist_option(cluster: Cluster) -> str:
    """Return the last `--nodelist=...` option of a profile, which is the one that sbatch uses; "" if there is none."""
    return next((option for option in reversed(cluster.slurm.options) if option.startswith("--nodelist=")), "")


def _sbatch_rejection(connection: Connection, cluster: Cluster, size: JobSize | None) -> str:
    """Return sbatch's reason for rejecting a job with the profile's options; "" if it accepts it. Queues nothing."""
    if size is not None:
        resources = resource_options(cluster, size.nodes, size.gpus_per_node, size.time)
    else:
        nodelist = nodelist_option(cluster)
        nodes = len(expand_hosts(connection, nodelist)) if nodelist else 0
        resources = resource_options(cluster, nodes or 1, cluster.gpus_per_node)
    options = [*resources, *cluster.slurm.options]
    output = connection.shell('sbatch --test-only --wrap=true "$@" 2>&1 && echo accepted || true', *options)
    lines = [re.sub(r"^(sbatch: |error: |allocation failure: )+", "", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line and line != "Unspecified error" and not line.startswith('Try "')]
    if not lines or lines[-1] == "accepted" or any(map(_TRANSIENT.search, lines)):
        return ""
    if size is None and any(map(_SIZE_DEPENDENT.search, lines)):
        return ""
    return "; ".join(lines)


_MPI = """
mpi=$1
shift
srun --mpi=none --test-only --nodes=1 --ntasks=1 "$@" true >/dev/null 2>&1 || exit 0 # the reason is not the plug-in
srun --mpi="$mpi" --test-only --nodes=1 --ntasks=1 "$@" true 2>&1 || true
"""


def _mpi_failure(connection: Connection, cluster: Cluster) -> str:
    """Return srun's error if it cannot load the profile's PMI plug-in; otherwise "".

    `srun --mpi=list` is not sufficient, because it also lists plug-ins whose library is missing.
    """
    slurm = cluster.slurm
    if slurm.mpi == "none":
        return ""
    job_options = {"account": slurm.account, "partition": slurm.partition}
    output = connection.shell(_MPI, slurm.mpi, *(f"--{name}={value}" for name, value in job_options.items() if value))
    errors = re.findall(r"^srun: error: *(.*)", output, re.MULTILINE)
    return errors[0] if errors else ""


def parse(answers: dict[str, str]) -> LiveCluster:
    """Return the state of a cluster from the output of the commands in QUERY, by their names."""
    config = dict(re.findall(r"^(\w+)\s+=\s*(.*)$", answers.get("config", ""), re.MULTILINE))
    free_match = re.match(r"\S+\s+\d+\s+\d+\s+(\d+)", answers.get("runs", "").strip())
    now = answers.get("now", "").strip()
    queued_rows = (line.partition("|") for line in answers.get("queued", "").splitlines())
    return LiveCluster(
        partitions=_parse_table(answers.get("partitions", ""), "PartitionName"),
        nodes=_parse_table(answers.get("nodes", ""), "NodeName"),
        associations=[_parse_association(row) for row in _parse_rows(answers.get("associations", ""))],
        accounts={row["Account"]: row for row in _parse_rows(answers.get("accounts", "")) if "Account" in row},
        qos={row["Name"]: row for row in _parse_rows(answers.get("qos", "")) if "Name" in row},
        queued=[(account, qos) for account, _, qos in queued_rows],
        user=answers.get("user", "").strip(),
        default_account=next(
            (row.get("Def Acct", "") for row in _parse_rows(answers.get("default_account", ""))), None
        ),
        now=datetime.fromisoformat(now) if now else None,
        reservations=_parse_reservations(answers),
        enforces=config.get("AccountingStorageEnforce", ""),
        topology=config.get("TopologyPlugin", ""),
        mpi=re.findall(r"^(?:srun: )?\s*(\w+)$", answers.get("mpi", ""), re.MULTILINE),
        has_pyxis=answers.get("srun", "").strip() not in ("", "0"),
        python=int(answers.get("python", "").strip() or 0),
        ranks_python=answers.get("ranks_python", "yes").strip() == "yes",
        modules={k.removeprefix("module:"): v.strip() for k, v in answers.items() if k.startswith("module:")},
        runs_free=int(free_match[1]) * 1024 if free_match else None,
        runs_open=_open_mode(answers),
        paths={key.removeprefix("path:"): value.strip() for key, value in answers.items() if key.startswith("path:")},
    )


def _open_mode(answers: dict[str, str]) -> str:
    """Return the mode of the folder for runs if other users can write to it and it lacks the sticky bit; else ""."""
    mode, _, group = answers.get("open", "").strip().partition(" ")
    only_group = mode.isdigit() and not int(mode, 8) & 0o002
    if only_group and group == answers.get("user", "").strip():
        return ""  # the group has this user as its only member
    return mode


def _parse_table(text: str, key: str) -> dict[str, dict[str, str]]:
    """Return the rows of `scontrol show ... -o` (KEY=VALUE ...) by the value of `key`."""
    rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines() if line.strip()]
    return {row[key]: row for row in rows if key in row}


def _parse_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of a `sacctmgr --parsable2` table, whose first line contains the column names."""
    head, *lines = text.splitlines() or [""]
    return [dict(zip(head.split("|"), line.split("|"), strict=False)) for line in lines if "|" in line]


def _parse_association(row: dict[str, str]) -> Association:
    names = list_items(row.get("QOS", ""))
    set_limits = {key: value for key, value in row.items() if re.match(r"(Max|Grp)", key)}
    return Association(row.get("Account", ""), row.get("Partition", ""), names, row.get("Def QOS", ""), set_limits)


def _parse_reservations(answers: dict[str, str]) -> list[Reservation]:
    nodes = {name: frozenset(rest) for name, *rest in map(str.split, answers.get("reserved", "").splitlines())}
    return [
        Reservation(
            name,
            _parse_time(row.get("StartTime", ""), datetime.min),
            _parse_time(row.get("EndTime", ""), datetime.max),
            nodes.get(name, frozenset()),
            *(list_items(row.get(key, "")) for key in ("Flags", "Users", "Accounts")),
        )
        for name, row in _parse_table(answers.get("reservations", ""), "ReservationName").items()
    ]


def _parse_time(text: str, fallback: datetime) -> datetime:
    """Return the time in an ISO 8601 text, or `fallback` for "Unknown" and "NONE"."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return fallback


def list_items(text: str) -> tuple[str, ...]:
    """Return the items of a comma-separated list from Slurm, without "(null)" and "ALL"."""
    return tuple(item for item in text.split(",") if item not in ("", "(null)", "ALL"))


def count_gpus(node: dict[str, str]) -> tuple[int, str]:
    """Return the number of GPUs in the Gres of a node, and their type ("" if Slurm does not list it)."""
    match = re.search(r"\bgpu(?::([A-Za-z][\w.-]*))?:(\d+)", node.get("Gres", ""))  # gpu:h100:8(S:0-1) or gpu:8
    if match is None:
        return 0, ""
    return int(match[2]), match[1] or ""


def is_usable(state: str) -> bool:
    """Return whether a node in this state can run jobs, possibly after Slurm powers it up.

    For example, DOWN and IDLE+DRAIN are not usable, but IDLE+CLOUD+POWERED_DOWN is.
    """
    flags = {re.sub(r"\W+$", "", word) for word in state.split("+")}
    if flags & {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"}:
        return False
    powered_down = any(flag.startswith("POWER") for flag in flags)
    return powered_down or "NOT_RESPONDING" not in flags
