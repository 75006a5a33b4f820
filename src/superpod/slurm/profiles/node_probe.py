"""Checks a profile on a compute node with one short job.

A login node has no GPUs, and its network interfaces, modules and disks differ from those of the compute nodes. Like a
run, the job requests a node with all its GPUs. It changes nothing.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.planner import hardware
from superpod.planner.hardware import match_gpu
from superpod.slurm.profiles import live_cluster
from superpod.slurm.profiles.profile_checks import (
    Finding,
    check_host_python,
    format_version,
    module_findings,
    mpi_finding,
)
from superpod.slurm.script import preamble
from superpod.slurm.script.batch_script import resource_options

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection

WAIT_S = 60
"""Maximum seconds in the queue."""

# The answers have the format of live_cluster.QUERY. Arguments: modules, host_python, Python for the ranks, path and
# content of a file written on the login node, paths...
PROBE = (
    preamble.DIE
    + preamble.MODULES
    + r"""
say() { printf '\036%s\037' "$1"; shift; "$@" 2>/dev/null; }
say host hostname
for module in $1; do
    if ( load "$module" ) >/dev/null 2>&1; then load "$module" >/dev/null 2>&1; say "module:$module" echo loads
    elif type module >/dev/null 2>&1; then say "module:$module" echo missing
    else say "module:$module" echo "no module command"; fi
done
version='import sys; print(sys.version_info[0] * 100 + sys.version_info[1])'
say python "$2" -c "$version"
say ranks_python ${3:+"$3"} ${3:+-c} ${3:+"$version"}
say shared cat "$4"
say writable sh -c 'f=$1.node && echo "$2" >"$f" && rm "$f" && echo yes' sh "$4" "$5"
say gpus nvidia-smi --query-gpu=name --format=csv,noheader
say interfaces ls /sys/class/net
say route awk '$2 == "00000000" {print $1; exit}' /proc/net/route
say hcas sh -c 'for port in /sys/class/infiniband/*/ports/1; do test -e "$port/rate" || continue
    name=${port#/sys/class/infiniband/}
    echo "${name%%/*}|$(cat "$port/link_layer")|$(cut -d" " -f1 "$port/rate")"; done'
say sbatch sh -c 'command -v sbatch'
shift 5
"""
    + live_cluster.PATHS
)


@dataclass(frozen=True)
class Hca:
    """The first port of a host channel adapter."""

    name: str
    link_layer: str
    """InfiniBand or Ethernet; "" = unknown"""
    gb_s: float
    """data rate in Gbit/s; 0 = unknown"""


@dataclass(frozen=True)
class NodeFacts:
    """The state of a compute node."""

    host: str
    modules: dict[str, str] = field(default_factory=dict)
    """state of each module: loads, missing, or `no module command`"""
    python: int = 0
    """version of Python for the batch script, such as 309 for 3.9; 0 = it does not run"""
    ranks_python: int = 0
    """version of Python for the ranks, in the same format"""
    shared: bool = False
    """whether the node can read a file that the login node wrote into the folder for runs"""
    writable: bool = False
    """whether the node can write to the folder for runs"""
    gpus: tuple[str, ...] = ()
    """names of the GPUs according to nvidia-smi"""
    interfaces: tuple[str, ...] = ()
    route: str = ""
    """interface of the default route"""
    hcas: tuple[Hca, ...] = ()
    has_sbatch: bool = False
    mpi_failure: str = ""
    """srun's error with the profile's PMI plug-in, if a job step starts only without it; otherwise "" """
    paths: dict[str, str] = field(default_factory=dict)

    @property
    def network(self) -> str:
        """The type of network: infiniband, roce or ethernet, the values of network.kind."""
        layers = {hca.link_layer for hca in self.hcas} - {""}
        if "InfiniBand" in layers:
            return "infiniband"
        return "roce" if layers else "ethernet"


class NoNodeAvailable(UserError):
    """No node ran the job, so the profile was not checked."""


def probe_node(connection: Connection, cluster: Cluster, paths: list[str], ranks_python: str = "") -> NodeFacts:
    """Return the state of one node, queried in a job.

    Args:
        connection: connection to a login node.
        cluster: profile of the cluster.
        paths: files and folders to look up on the node.
        ranks_python: Python interpreter for the ranks; "" = not looked up.

    Raises:
        NoNodeAvailable: no node is free within WAIT_S seconds, or Slurm rejects the profile's options.
        UserError: the folder for runs is not writable on the login node.
    """
    name, content = f".superpod-check-{secrets.token_hex(8)}", secrets.token_hex(8)
    file = connection.shell(WRITE_FILE, cluster.folders.runs, name, content).strip()
    if not file:
        raise UserError(f"{cluster.folders.runs} is not writable", "set folders.runs to another folder")
    command = ["bash", "-c", PROBE, "probe", " ".join(cluster.software.modules), cluster.software.host_python]
    command += [ranks_python, file, content, *paths]
    # If the profile has a --nodelist option, probe the first of these nodes.
    nodelist = live_cluster.nodelist_option(cluster)
    nodes = live_cluster.expand_hosts(connection, nodelist) if nodelist else []
    if nodes:
        command = [f"--nodelist={nodes[0]}", *command]
    try:
        return parse(_run_probe(connection, cluster, command), content)
    finally:
        connection.run(["rm", "-f", file])


def _run_probe(connection: Connection, cluster: Cluster, command: list[str]) -> str:
    """Run a command on one node and return its output.

    If the job step starts only with --mpi=none, srun's error is appended to the output as the answer `mpi_failure`.
    """
    limit_s = WAIT_S + 120
    try:
        return connection.run([*srun(cluster, 1, minutes=1), *command], limit_s=limit_s)
    except UserError as error:
        failure = error
    if cluster.slurm.mpi != "none":
        without_mpi = cluster.model_copy(update={"slurm": cluster.slurm.model_copy(update={"mpi": "none"})})
        with contextlib.suppress(UserError):
            output = connection.run([*srun(without_mpi, 1, minutes=1), *command], limit_s=limit_s)
            return f"{output}\036mpi_failure\037{failure}"
    raise NoNodeAvailable(f"no node ran a job with this profile within {WAIT_S + 60} s: {failure}", failure.hint)


# The file is written into the nearest existing parent folder, because a check does not create folders.
WRITE_FILE = r"""
d=$1
while [ ! -e "$d" ] && [ "$d" != / ]; do d=$(dirname "$d"); done
{ echo "$3" >"$d/$2"; } 2>/dev/null && echo "$d/$2"
"""


def srun(cluster: Cluster, nodes: int, *, minutes: int, tasks: int = 1) -> list[str]:
    """Return an srun command for all GPUs of `nodes` nodes with `tasks` tasks each, limited to `minutes`.

    It fails if the job waits longer than WAIT_S seconds.
    """
    resources = resource_options(cluster, nodes, cluster.gpus_per_node, str(minutes))
    # slurm.cpus_per_task applies to ranks; here a task may use all CPUs of its node.
    resources = [option for option in resources if not option.startswith("--cpus-per-task=")]
    # --immediate keeps waiting if a limit holds the job; on SIGTERM from `timeout`, srun cancels the job.
    command = ["timeout", str(WAIT_S + 60 * minutes), "srun", *resources, f"--ntasks-per-node={tasks}"]
    command += [option for option in cluster.slurm.options if option != "--ignore-pbs"]  # not an option of srun
    command += ["--job-name=recipes-check", f"--mpi={cluster.slurm.mpi}"]
    return [*command, f"--immediate={WAIT_S}", "--quiet"]


def parse(output: str, content: str) -> NodeFacts:
    """Return the state of a node from the output of PROBE; `content` is that of the file written on the login node."""
    answers = {name: text.strip() for name, text in (part.split("\037", 1) for part in output.split("\036")[1:])}
    rows = (line.split("|") for line in answers.get("hcas", "").splitlines() if line.count("|") == 2)

    def with_prefix(prefix: str) -> dict[str, str]:
        return {key.removeprefix(prefix): value for key, value in answers.items() if key.startswith(prefix)}

    return NodeFacts(
        host=answers.get("host", ""),
        modules=with_prefix("module:"),
        python=_digits_or_zero(answers.get("python", "")),
        ranks_python=_digits_or_zero(answers.get("ranks_python", "")),
        shared=answers.get("shared") == content,
        writable=answers.get("writable") == "yes",
        gpus=tuple(answers.get("gpus", "").splitlines()),
        interfaces=tuple(answers.get("interfaces", "").split()),
        route=answers.get("route", ""),
        hcas=tuple(Hca(name, layer, _rate(rate)) for name, layer, rate in rows),
        has_sbatch=bool(answers.get("sbatch")),
        mpi_failure=answers.get("mpi_failure", ""),
        paths=with_prefix("path:"),
    )


def _rate(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def _digits_or_zero(text: str) -> int:
    return int(text) if text.isdigit() else 0


def check_gpus(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """Yield a finding if the node has fewer GPUs than the profile, or GPUs of another type."""
    if cluster.declared_only:
        return
    if len(node.gpus) < cluster.gpus_per_node:
        yield Finding(
            f"gpus_per_node is {cluster.gpus_per_node}, but a job on {node.host} has {len(node.gpus)}",
            'set slurm.gpus to the option that your site uses, "gres" or "gpus-per-node"',
        )
    kinds = {match_gpu(name) for name in node.gpus} - {""}
    if kinds and cluster.gpu not in kinds:
        yield Finding(f"gpu is {cluster.gpu!r}, but {node.host} has {node.gpus[0]}", f'set gpu = "{min(kinds)}"')


def check_interface(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """Yield a finding for each name in network.interface that no interface of the node matches.

    As in NCCL_SOCKET_IFNAME, names are prefixes, or complete names after `=`; a list after `^` excludes interfaces.
    """
    interface_list = cluster.network.interface
    if not interface_list or interface_list.startswith("^"):
        return
    is_exact = interface_list.startswith("=")
    for name in interface_list.removeprefix("=").split(","):
        matching = [i for i in node.interfaces if i == name or (i.startswith(name) and not is_exact)]
        if not matching:
            existing_names = ", ".join(n for n in node.interfaces if n != "lo") or "none"
            yield Finding(
                f"network.interface: {node.host} has no interface {name!r}",
                f"interfaces on {node.host}: {existing_names}",
            )


def check_hcas(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """Yield findings if network.hcas, network.kind or the data rate of the fabric does not match the node's HCAs."""
    existing_hcas = {hca.name: hca for hca in node.hcas}
    listed, kind = cluster.network.hcas, cluster.network.kind
    names: list[str] = []
    if not listed.startswith("^"):
        names = [name.partition(":")[0] for name in listed.removeprefix("=").split(",") if name]
    missing_names = [name for name in names if name not in existing_hcas]
    if missing_names:
        yield Finding(
            f"network.hcas: {node.host} has no {', '.join(missing_names)}",
            f"HCAs on {node.host}: {', '.join(existing_hcas) or 'none'}",
        )
    if kind not in ("infiniband", "roce") or cluster.declared_only:
        return
    layer = {"infiniband": "InfiniBand", "roce": "Ethernet"}[kind]
    compute = [existing_hcas[name] for name in names if name in existing_hcas] or list(existing_hcas.values())
    if not any(hca.link_layer == layer for hca in compute):
        layers = ", ".join(sorted({hca.link_layer for hca in compute} - {""})) or "no HCA"
        yield Finding(f"network.kind is {kind!r}, but {node.host} has {layers}", f'set kind = "{node.network}"')
    elif cluster.fabric:
        yield from _check_network_rate(cluster, [hca for hca in compute if hca.link_layer == layer], node.host)


def _check_network_rate(cluster: Cluster, compute: list[Hca], host: str) -> Iterator[Finding]:
    """Yield a finding if the fastest HCA is more than 10 % slower than the fabric in the profile."""
    fabric = hardware.builtin().fabrics[cluster.fabric]
    fastest_rate = max(hca.gb_s for hca in compute)
    if 0 < fastest_rate < 0.9 * fabric.gbps:
        fits = [name for name, other in hardware.builtin().fabrics.items() if other.gbps == fastest_rate]
        yield Finding(
            f"fabric {cluster.fabric} has {fabric.gbps:g} Gb/s per port, but {host} has {fastest_rate:g} Gb/s",
            f"set fabric = {' or '.join(fits)}" if fits else "a cable or a port may have negotiated a lower rate",
        )


def check_pythons(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """Yield a finding if Python on the node is older than 3.9 for the batch script, or 3.10 for the ranks (NeMo)."""
    yield from check_host_python(cluster, node.python, f" on {node.host}")
    if cluster.container.image:
        return
    if not node.ranks_python:
        yield Finding(
            f"the Python interpreter for the ranks does not run on {node.host}",
            "set software.python to a Python on a shared file system",
        )
    elif node.ranks_python < 310:
        yield Finding(
            f"the ranks use Python {format_version(node.ranks_python)} on {node.host}, but NeMo needs 3.10 or later",
            "set software.python to a newer Python",
        )


def check_modules(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """Yield a finding for each module that does not load on the node."""
    yield from module_findings(cluster, node.modules, f" on {node.host}")


def check_folders(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """Yield a finding for each folder of the profile that the node cannot access, or cannot write to if it must."""
    if not node.shared:
        yield Finding(
            f"folders.runs {cluster.folders.runs}: {node.host} cannot read a file written on the login node",
            "specify a folder on a file system shared by all nodes",
        )
    elif not node.writable:
        yield Finding(f"folders.runs {cluster.folders.runs} is not writable on {node.host}", "specify another folder")
    paths = [("folders.cache", cluster.folders.cache), ("folders.data", cluster.folders.data)]
    if cluster.container.image:
        paths.append(("container.image", cluster.container.image))
        paths += [("container.mounts", path) for path in cluster.container.mounted]
    for key, path in paths:
        state = node.paths.get(path, "folder")
        if PurePosixPath(path).is_absolute() and state not in ("folder", "file"):
            yield Finding(f"{key}: {path} is {state} on {node.host}", "move it to a file system shared by all nodes")


def check_self_submit(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """Yield a finding if chain.self_submit is set and the node has no sbatch."""
    if cluster.chain.self_submit and not node.has_sbatch:
        yield Finding(
            f"chain.self_submit is set, but {node.host} has no sbatch",
            "remove it, and queue more attempts with `recipes top-up`",
        )


def check_mpi(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """Yield a finding if job steps do not start with the profile's PMI plug-in."""
    if node.mpi_failure:
        yield mpi_finding(cluster, node.mpi_failure, f" on {node.host}")


CHECKS = (
    check_mpi,
    check_gpus,
    check_interface,
    check_hcas,
    check_pythons,
    check_modules,
    check_folders,
    check_self_submit,
)


def findings(cluster: Cluster, node: NodeFacts) -> list[Finding]:
    """Return the differences between a profile and a node."""
    return [finding for check in CHECKS for finding in check(cluster, node)]


VERIFIABLE_KEYS = {
    "the controller": {
        *("slurm.account", "slurm.partition", "slurm.qos", "slurm.constraint", "slurm.gpus", "slurm.gpu_type"),
        *("slurm.cpus_per_task", "slurm.mem", "slurm.time", "slurm.mpi", "slurm.options", "gpu", "gpus_per_node"),
    },
    "this machine": {
        *("login.host", "login.user", "login.port", "login.key"),
        *("container.image", "container.mounts", "folders.runs", "folders.cache", "folders.data"),
    },
    "a node": {
        *("gpu", "gpus_per_node", "fabric", "software.python", "software.host_python", "software.modules"),
        *("network.kind", "network.interface", "network.hcas", "chain.self_submit", "container.image"),
        *("container.mounts", "folders.runs", "folders.cache", "folders.data"),
    },
}
"""Keys that the controller, the login node or a compute node can verify. Some of the other keys are choices (times,
limits, notifications); the contents of an image and the binding of ranks are verified only by a run."""


def node_only_keys() -> list[str]:
    """Return the keys that only a compute node can verify."""
    return sorted(VERIFIABLE_KEYS["a node"] - VERIFIABLE_KEYS["the controller"] - VERIFIABLE_KEYS["this machine"])
