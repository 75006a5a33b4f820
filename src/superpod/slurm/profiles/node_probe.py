"""What only a compute node can say of a profile: one short job asks it.

A login node has other interfaces, modules and disks than the nodes, and no GPUs. The job takes one node with its GPUs,
as a run would, reads, and leaves nothing behind.
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
from superpod.slurm.profiles import live_cluster
from superpod.slurm.profiles.profile_checks import Finding, format_version, host_python, module_findings, mpi_finding
from superpod.slurm.profiles.profile_values import match_gpu
from superpod.slurm.script import preamble
from superpod.slurm.script.batch_script import resource_options

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection

WAIT_S = 60
"""Seconds that the job may wait for a node."""

# Answers as those of live_cluster.ASK. Arguments: modules, host_python, ranks' Python, a file that the login node has
# written, its content, paths...
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
for path; do
    if [ -d "$path" ] && [ -r "$path" ] && [ -x "$path" ]; then say "path:$path" echo folder
    elif [ -f "$path" ] && [ -r "$path" ]; then say "path:$path" echo file
    elif [ -e "$path" ]; then say "path:$path" echo unreadable
    else say "path:$path" echo missing; fi
done
"""
)


@dataclass(frozen=True)
class Hca:
    """A host channel adapter, and its first port."""

    name: str
    link_layer: str
    """"" = a port that does not say"""
    gb_s: float
    """gigabits a second; 0 = it does not say"""


@dataclass(frozen=True)
class NodeFacts:
    """A node's answers."""

    host: str
    modules: dict[str, str] = field(default_factory=dict)
    """module -> loads, missing, or `no module command`"""
    python: int = 0
    """of the batch script, as 309; 0 = not there"""
    ranks_python: int = 0
    shared: bool = False
    """a file that the login node wrote into the folder for runs is there"""
    writable: bool = False
    gpus: tuple[str, ...] = ()
    """names, as nvidia-smi says them"""
    interfaces: tuple[str, ...] = ()
    route: str = ""
    """interface of the default route"""
    hcas: tuple[Hca, ...] = ()
    has_sbatch: bool = False
    mpi_failure: str = ""
    """why no step starts with the profile's PMI plug-in, though one does without; "" = one does"""
    paths: dict[str, str] = field(default_factory=dict)

    @property
    def network(self) -> str:
        """The kind of network, as profiles call it."""
        layers = {hca.link_layer for hca in self.hcas} - {""}
        return "infiniband" if "InfiniBand" in layers else "roce" if layers else "ethernet"


class NoNodeAvailable(UserError):
    """No node has answered, which says nothing of the profile."""


def probe_node(connection: Connection, cluster: Cluster, paths: list[str], ranks_python: str = "") -> NodeFacts:
    """The facts of one node that Slurm gives at once.

    Raises:
        NoNode: no node is free within WAIT_S seconds, or Slurm refuses the profile's options.
        UserError: the folder for runs cannot be written here.
    """
    name, content = f".superpod-check-{secrets.token_hex(8)}", secrets.token_hex(8)
    place = connection.shell(PLACE, cluster.folders.runs, name, content).strip()
    if not place:
        raise UserError(f"{cluster.folders.runs} cannot be written", "set folders.runs to another folder")
    words = ["bash", "-c", PROBE, "probe", " ".join(cluster.software.modules), cluster.software.host_python]
    words += [ranks_python, place, content, *paths]
    # One node of those that the profile names.
    named = live_cluster.nodelist_option(cluster)
    words = [
        f"--nodelist={node}" for node in (live_cluster.expand_hosts(connection, named) if named else [])[:1]
    ] + words
    try:
        return parse(_run_probe(connection, cluster, words), content)
    finally:
        connection.run(["rm", "-f", place])


def _run_probe(connection: Connection, cluster: Cluster, words: list[str]) -> str:
    """What srun with these words prints. A step that starts with --mpi=none alone is a finding, not a missing node."""
    limit_s = WAIT_S + 120
    try:
        return connection.run([*srun(cluster, 1, minutes=1), *words], limit_s=limit_s)
    except UserError as error:
        failure = error
    if cluster.slurm.mpi != "none":
        plain = cluster.model_copy(update={"slurm": cluster.slurm.model_copy(update={"mpi": "none"})})
        with contextlib.suppress(UserError):
            output = connection.run([*srun(plain, 1, minutes=1), *words], limit_s=limit_s)
            return f"{output}\036mpi_failure\037{failure}"
    raise NoNodeAvailable(f"no node has run a job of this profile within {WAIT_S + 60} s: {failure}", failure.hint)


# The nearest folder above that exists: looking makes no folder.
PLACE = r"""
d=$1
while [ ! -e "$d" ] && [ "$d" != / ]; do d=$(dirname "$d"); done
{ echo "$3" >"$d/$2"; } 2>/dev/null && echo "$d/$2"
"""


def srun(cluster: Cluster, nodes: int, *, minutes: int, tasks: int = 1) -> list[str]:
    """srun on whole nodes with their GPUs, as a run takes them; it gives up after WAIT_S in the queue."""
    resources = resource_options(cluster, nodes, cluster.gpus_per_node, str(minutes))
    # srun takes the last of two values; CPUs per task are those of a rank, and one task may have all of its node's.
    resources = [word for word in resources if not word.startswith("--cpus-per-task=")]
    # --immediate waits on where a limit holds the job back; at TERM srun takes the job out of the queue.
    words = ["timeout", str(WAIT_S + 60 * minutes), "srun", *resources, f"--ntasks-per-node={tasks}"]
    words += [option for option in cluster.slurm.options if option != "--ignore-pbs"]  # which srun(1) has not
    words += ["--job-name=recipes-check", f"--mpi={cluster.slurm.mpi}"]
    return [*words, f"--immediate={WAIT_S}", "--quiet"]


def parse(output: str, content: str) -> NodeFacts:
    """The facts from what PROBE printed."""
    answers = {k: v.strip() for k, v in (part.split("\037", 1) for part in output.split("\036")[1:])}
    rows = (line.split("|") for line in answers.get("hcas", "").splitlines() if line.count("|") == 2)

    def named(prefix: str) -> dict[str, str]:
        return {key.removeprefix(prefix): value for key, value in answers.items() if key.startswith(prefix)}

    return NodeFacts(
        host=answers.get("host", ""),
        modules=named("module:"),
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
        paths=named("path:"),
    )


def _rate(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def _digits_or_zero(text: str) -> int:
    return int(text) if text.isdigit() else 0


def gpus(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """The GPUs are of the profile's kind, and as many."""
    if cluster.declared_only:
        return
    if len(node.gpus) < cluster.gpus_per_node:
        yield Finding(
            f"gpus_per_node is {cluster.gpus_per_node}, but a job on {node.host} has {len(node.gpus)}",
            'slurm.gpus, "gres" or "gpus-per-node", is the form in which your site gives GPUs',
        )
    kinds = {match_gpu(name) for name in node.gpus} - {""}
    if kinds and cluster.gpu not in kinds:
        yield Finding(f"gpu is {cluster.gpu!r}, but {node.host} has {node.gpus[0]}", f'write gpu = "{min(kinds)}"')


def interface(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """The interface of the bootstrap is there. NCCL takes several, prefixes, and `=` and `^` before them."""
    listed = cluster.network.interface
    if not listed or listed.startswith("^"):
        return
    exact = listed.startswith("=")
    for name in listed.removeprefix("=").split(","):
        if not any(one == name if exact else one.startswith(name) for one in node.interfaces):
            there = ", ".join(n for n in node.interfaces if n != "lo") or "none"
            yield Finding(f"network.interface {name!r} is not on {node.host}", f"interfaces there: {there}")


def hcas(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """The HCAs are there, of the profile's kind of network, at the speed of its fabric."""
    there = {hca.name: hca for hca in node.hcas}
    listed, kind = cluster.network.hcas, cluster.network.kind
    plain = [] if listed.startswith("^") else [n.partition(":")[0] for n in listed.removeprefix("=").split(",") if n]
    missing = [name for name in plain if name not in there]
    if missing:
        yield Finding(
            f"network.hcas: {', '.join(missing)} not on {node.host}", f"HCAs there: {', '.join(there) or 'none'}"
        )
    if kind in ("infiniband", "roce") and not cluster.declared_only:
        layer = {"infiniband": "InfiniBand", "roce": "Ethernet"}[kind]
        compute = [there[name] for name in plain if name in there] or list(there.values())
        if not any(hca.link_layer == layer for hca in compute):
            layers = ", ".join(sorted({hca.link_layer for hca in compute} - {""})) or "no HCA at all"
            yield Finding(f"network.kind is {kind!r}, but {node.host} has {layers}", f'write kind = "{node.network}"')
        elif cluster.fabric:
            yield from _speed(cluster, [hca for hca in compute if hca.link_layer == layer], node.host)


def _speed(cluster: Cluster, compute: list[Hca], host: str) -> Iterator[Finding]:
    fabric = hardware.builtin().fabrics[cluster.fabric]
    fastest = max(hca.gb_s for hca in compute)
    if 0 < fastest < 0.9 * fabric.gbps:
        fits = [name for name, one in hardware.builtin().fabrics.items() if one.gbps == fastest]
        yield Finding(
            f"fabric {cluster.fabric} is {fabric.gbps:g} Gb/s a port, but {host} has {fastest:g}",
            f"write fabric = {' or '.join(fits)}" if fits else "a cable or port may have come up at a lower rate",
        )


def pythons(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """The batch script's Python is 3.9 or later on the node, and the ranks' one 3.10 or later, as NeMo needs."""
    yield from host_python(cluster, node.python, f" on {node.host}")
    if cluster.container.image:
        return
    if not node.ranks_python:
        yield Finding(f"the ranks' Python does not run on {node.host}", "software.python: on a shared disk")
    elif node.ranks_python < 310:
        yield Finding(
            f"the ranks' Python is {format_version(node.ranks_python)} on {node.host}", "NeMo needs 3.10 or later"
        )


def modules(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """Every module loads."""
    yield from module_findings(cluster, node.modules, f" on {node.host}")


def folders(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """The folder for runs is the login node's own, and can be written; the profile's other paths are there."""
    if not node.shared:
        yield Finding(
            f"folders.runs {cluster.folders.runs}: what is written here is not seen on {node.host}",
            "name a folder on a disk that all nodes share",
        )
    elif not node.writable:
        yield Finding(f"folders.runs {cluster.folders.runs} cannot be written on {node.host}", "name another folder")
    keys = {"container.image": [cluster.container.image], "container.mounts": cluster.container.mounted}
    keys = keys if cluster.container.image else {}
    for key, paths in {
        **keys,
        "folders.cache": [cluster.folders.cache],
        "folders.data": [cluster.folders.data],
    }.items():
        for path in paths:
            if PurePosixPath(path).is_absolute() and (state := node.paths.get(path, "folder")) not in (
                "folder",
                "file",
            ):
                yield Finding(f"{key}: {path} is {state} on {node.host}", "it must be on a disk that all nodes share")


def self_submit(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """A job that submits the next attempt has sbatch."""
    if cluster.chain.self_submit and not node.has_sbatch:
        yield Finding(f"chain.self_submit, but {node.host} has no sbatch", "leave it out; `recipes top-up` does it")


def mpi(cluster: Cluster, node: NodeFacts) -> Iterator[Finding]:
    """Steps start with the PMI plug-in."""
    if node.mpi_failure:
        yield mpi_finding(cluster, node.mpi_failure, f" on {node.host}")


CHECKS = (mpi, gpus, interface, hcas, pythons, modules, folders, self_submit)


def findings(cluster: Cluster, node: NodeFacts) -> list[Finding]:
    """What a node disproves of a profile."""
    return [finding for check in CHECKS for finding in check(cluster, node)]


PROVED = {
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
"""Who can prove which keys. The others are choices (times, limits, who hears of a run), or proven by a run alone: what
an image holds, and how ranks are bound."""


def node_only_keys() -> list[str]:
    """The keys that nothing but a node can prove."""
    return sorted(PROVED["a node"] - PROVED["the controller"] - PROVED["this machine"])
