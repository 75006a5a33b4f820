"""Node health before a job, and bad links by measurement: `recipes cluster health` and `bisect`.

srun sends the checks to the nodes: shell in `slurm/checks/`, Python in `node/`. This module judges what they print. A
check prints lines `name<TAB>ok|bad|skip<TAB>words`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superpod import collection
from superpod.errors import UserError
from superpod.planner.files import text_of

if TYPE_CHECKING:
    from superpod.slurm.connection import Connection
    from superpod.slurm.profiles import Cluster

CHECKS = Path(__file__).resolve().parent / "checks"
RUNTIME = Path(__file__).resolve().parent.parent / "node"
PASSES = 3
"""measurements of every pair; the best one counts"""
SLOW = 0.5
"""share of the median bandwidth below which a node is slow"""


@dataclass(frozen=True)
class Verdict:
    """The result of one check on one node."""

    node: str
    check: str
    state: str
    """ok, bad or skip"""
    words: str


def check_nodes(connection: Connection, cluster: Cluster, nodes: list[str]) -> list[Verdict]:
    """Run every check of the profile on all nodes at once.

    Raises:
        UserError: srun does not get the nodes.
    """
    script = "".join(own_checks(cluster)) + (CHECKS / "node.sh").read_text()
    health = cluster.health
    local = [name for name in health.checks if name != "bandwidth"]
    environment = {
        "FREE_GIB": str(health.free_gib),
        "RUNS": cluster.folders.runs,
        "GPUS": str(0 if cluster.declared_only else cluster.gpus_per_node),
        "HCAS": cluster.network.hcas,
    }
    command = ["env", *(f"{k}={v}" for k, v in environment.items()), "bash", "-c", script, "node.sh"]
    command += local or ["disk"]
    output = connection.run([*_srun(cluster, nodes), "--label", *command], limit_s=300)
    verdicts = _verdicts(output, sorted_nodes(connection, cluster, nodes))
    if "time" in health.checks:
        verdicts += _clocks(verdicts, health.max_skew_s)
    if "bandwidth" in health.checks:
        verdicts += bandwidth(connection, cluster, sorted_nodes(connection, cluster, nodes))
    return [verdict for verdict in verdicts if verdict.check != "clock"]


def own_checks(cluster: Cluster) -> Iterator[str]:
    """The profile's checks that come from the user's collections, each as a shell function for node.sh."""
    for name, path in collection.checks().items():
        if name in cluster.health.checks:
            yield f"own_{name}() {{ bash -c {shlex.quote(text_of(path))} {path.name}; }}\n"


def sorted_nodes(connection: Connection, cluster: Cluster, nodes: list[str]) -> list[str]:
    """Nodes in the order in which srun numbers its tasks."""
    return connection.run(["scontrol", "show", "hostnames", ",".join(nodes)]).split()


def _srun(cluster: Cluster, nodes: list[str]) -> list[str]:
    slurm = cluster.slurm
    words = ["srun", f"--nodes={len(nodes)}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}", "--time=10"]
    words += [f"--account={slurm.account}"] if slurm.account else []
    words += [f"--partition={slurm.partition}"] if slurm.partition else []
    # --immediate: fail after 60 s rather than wait in the queue.
    return [*words, "--job-name=recipes-health", f"--mpi={slurm.mpi}", "--immediate=60"]


def _verdicts(output: str, nodes: list[str]) -> list[Verdict]:
    """From lines `task: check<TAB>state<TAB>words`; srun's --label writes the task's number."""
    matches = (re.match(r"\s*(\d+): ([\w-]+)\t(\w+)\t(.*)", line) for line in output.splitlines())
    return [Verdict(nodes[int(match[1])], match[2], match[3], match[4]) for match in matches if match]


def _clocks(verdicts: list[Verdict], most_s: float) -> list[Verdict]:
    """Each node's clock compared with the median; each node printed its own in Unix seconds."""
    clocks = {v.node: float(v.words) for v in verdicts if v.check == "clock"}
    if len(clocks) < 2:
        return []
    middle = sorted(clocks.values())[len(clocks) // 2]
    return [
        Verdict(node, "time", "bad" if abs(t - middle) > most_s else "ok", f"{t - middle:+.2f} s from the others")
        for node, t in clocks.items()
    ]


def bandwidth(connection: Connection, cluster: Cluster, nodes: list[str]) -> list[Verdict]:
    """A short all-reduce over every GPU of the nodes (NCCL; gloo where there is none): its bus bandwidth.

    Raises:
        UserError: srun does not get the nodes, or the ranks have no torch.
    """
    from superpod.slurm.submit import python_of

    tasks = 1 if cluster.declared_only else cluster.gpus_per_node
    env = ["env", f"MASTER_ADDR={nodes[0]}", "MASTER_PORT=29500"]
    if cluster.network.interface:
        # Without it, gloo binds to the address of the host name, which other nodes may not reach.
        env += [f"{name}_SOCKET_IFNAME={cluster.network.interface}" for name in ("GLOO", "NCCL")]
    box = [f"--container-image={cluster.container.image}"] if cluster.container.image else []
    gpus = [] if cluster.declared_only else [f"--gpus-per-node={tasks}"]
    # srun takes the last of two --ntasks-per-node.
    words = [*_srun(cluster, nodes), f"--ntasks-per-node={tasks}", *gpus, *box, *env, python_of(cluster), "-c"]
    output = connection.run([*words, (RUNTIME / "allreduce.py").read_text()], limit_s=300)
    match = re.search(r"^bus\t([\d.e+-]+)\t(\S+)$", output, re.MULTILINE)
    if match is None:
        return [Verdict(nodes[0], "bandwidth", "bad", "the all-reduce has not ended")]
    gb_s, least = float(match[1]), cluster.health.min_bus_gb_s
    words_of = f"{gb_s:.3g} GB/s on the bus over {len(nodes)} nodes ({match[2]})" + (
        f", want {least:g}" if least else ""
    )
    return [Verdict("all", "bandwidth", "bad" if gb_s < least else "ok", words_of)]


@dataclass(frozen=True)
class Pair:
    """Measured bandwidth between two nodes, GB/s."""

    nodes: tuple[str, str]
    gb_s: float


def bisect(connection: Connection, cluster: Cluster, nodes: list[str], mib: int = 16) -> tuple[list[Pair], list[str]]:
    """The bandwidth of every pair of nodes, and the slow nodes (see `slow_nodes`).

    Raises:
        UserError: fewer than three nodes, or srun does not get them.
    """
    if len(nodes) < 3:
        raise UserError(f"{len(nodes)} nodes make no comparison", "name three or more")
    ordered = sorted_nodes(connection, cluster, nodes)
    best: dict[tuple[str, str], float] = {}
    for _ in range(PASSES):
        for pair in _measured(connection, cluster, nodes, ordered, mib):
            best[pair.nodes] = max(best.get(pair.nodes, 0.0), pair.gb_s)
        pairs = [Pair(names, gb_s) for names, gb_s in best.items()]
        if not slow_nodes(pairs):
            break  # a bad cable is slow every time, a busy host only once
    return pairs, slow_nodes(pairs)


def _measured(connection: Connection, cluster: Cluster, nodes: list[str], ordered: list[str], mib: int) -> list[Pair]:
    script = (RUNTIME / "pairs.py").read_text()
    command = [cluster.software.host_python, "-c", script, str(mib), *ordered]
    output = connection.run([*_srun(cluster, nodes), *command], limit_s=600)
    rows = re.findall(r"^pair\t(\S+)\t(\S+)\t([\d.e+-]+)$", output, re.MULTILINE)
    return [Pair((a, b), float(gb_s)) for a, b, gb_s in rows]


def slow_nodes(pairs: list[Pair], share: float = SLOW) -> list[str]:
    """The nodes whose best pair is slow: a good node has a fast pair with another good one."""
    if not pairs:
        return []
    best: dict[str, float] = {}
    for pair in pairs:
        for node in pair.nodes:
            best[node] = max(best.get(node, 0.0), pair.gb_s)
    fastest = sorted(best.values())[len(best) // 2]
    return sorted(node for node, gb_s in best.items() if gb_s < share * fastest)
