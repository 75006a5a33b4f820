"""Finds slow nodes by measuring the bandwidth between all pairs of nodes: `recipes cluster bisect`.

The measurement is an NCCL all-reduce over the GPUs of both nodes, which uses the same InfiniBand ports as training.
Without torch and GPUs, it runs ib_write_bw on each HCA, or TCP if ib_write_bw is not installed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from superpod.errors import UserError
from superpod.slurm.node_health import (
    LIMIT_S,
    RUNTIME,
    container_options,
    network_assignments,
    sorted_nodes,
    srun_on_nodes,
    with_modules,
)

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection

PASSES = 3
"""Maximum number of measurements of each pair, of which the best is used."""
SLOW = 0.5
"""Fraction of the median bandwidth below which a node is slow."""
TRANSPORTS = ("nccl", "ib", "gloo", "tcp")
MIB = {"nccl": 256, "ib": 1024, "gloo": 16, "tcp": 16}
"""Message size in MiB, large enough for the latency to be negligible."""


@dataclass(frozen=True)
class Pair:
    """The measured bandwidth between two nodes."""

    nodes: tuple[str, str]
    gb_s: float
    """bandwidth in GB/s"""
    how: str = ""
    """the network that NCCL used, or the slowest HCA"""


class Bisection(NamedTuple):
    """The measurements, the transport, and the slow nodes."""

    pairs: list[Pair]
    slow: list[str]
    """names of the slow nodes"""
    transport: str
    why: str
    """reason for using this transport instead of a better one; "" for NCCL"""


def bisect(connection: Connection, cluster: Cluster, nodes: list[str], mib: int = 0, transport: str = "") -> Bisection:
    """Measure the bandwidth of all pairs of nodes and find the slow nodes (see `slow_nodes`).

    Args:
        connection: connection to the cluster.
        cluster: profile of the cluster.
        nodes: names of three or more nodes.
        mib: message size in MiB; 0 = that of the transport in MIB.
        transport: one of TRANSPORTS; "" = the best that all nodes support.

    Raises:
        UserError: fewer than three nodes, an unknown transport, or srun cannot allocate the nodes.
    """
    if len(nodes) < 3:
        raise UserError(f"a comparison needs at least 3 nodes, not {len(nodes)}", "specify three or more nodes")
    if transport and transport not in TRANSPORTS:
        raise UserError(f"--transport must be one of {', '.join(TRANSPORTS)}, not {transport!r}", "use one of them")
    ordered = sorted_nodes(connection, cluster, nodes)
    if transport:
        why = "requested"
    else:
        transport, why = choose_transport(connection, cluster, ordered)
    best: dict[tuple[str, str], Pair] = {}
    for _ in range(PASSES):
        for pair in _measure_pairs(connection, cluster, ordered, mib or MIB[transport], transport):
            if pair.gb_s > best.get(pair.nodes, Pair(pair.nodes, -1.0)).gb_s:
                best[pair.nodes] = pair
        pairs = [*best.values()]
        if not slow_nodes(pairs):
            break  # unlike a busy host, a bad cable is slow in every pass
    return Bisection(pairs, slow_nodes(pairs), transport, why)


def choose_transport(connection: Connection, cluster: Cluster, nodes: list[str]) -> tuple[str, str]:
    """Return the best transport that all nodes support, and the reason for not using a better one ("" for NCCL)."""
    if cluster.declared_only:
        return "tcp", "the GPUs are declared but do not exist"
    reasons = []
    for transport in ("nccl", "ib"):
        try:
            output = connection.run(_command(cluster, nodes, transport, 1, ["obstacle", transport]), limit_s=LIMIT_S)
        except UserError as error:
            reasons.append(f"no {transport}: {str(error).splitlines()[-1]}")
            continue
        answers = re.findall(r"^obstacle\t(\S+)\t(.*)$", output, re.MULTILINE)
        reasons_against = [f"{node} has {why}" for node, why in answers if why]
        if len(answers) == len(nodes) and not reasons_against:
            return transport, "; ".join(reasons)
        reasons.append(f"no {transport}: {reasons_against[0] if reasons_against else 'not every node answered'}")
    return "tcp", "; ".join(reasons)


def _command(cluster: Cluster, nodes: list[str], transport: str, tasks: int, arguments: list[str]) -> list[str]:
    """Return the srun command that runs bandwidth.py with `arguments` in the environment that a transport needs."""
    from superpod.slurm.submission.submit import ranks_python

    if transport in ("nccl", "gloo"):
        python = [
            *container_options(cluster),
            *with_modules(cluster, ["env", *network_assignments(cluster), ranks_python(cluster)]),
        ]
    else:
        python = [cluster.software.host_python]
    script = (RUNTIME / "bandwidth.py").read_text()
    return [*srun_on_nodes(cluster, nodes, tasks), *python, "-c", script, *arguments]


def _measure_pairs(connection: Connection, cluster: Cluster, nodes: list[str], mib: int, transport: str) -> list[Pair]:
    """Measure the bandwidth of all pairs of nodes once, with messages of `mib` MiB."""
    tasks = cluster.gpus_per_node if transport == "nccl" else 1
    names = cluster.network.hcas if transport == "ib" else cluster.network.interface
    command = _command(cluster, nodes, transport, tasks, [transport, str(mib), names, *nodes])
    output = connection.run(command, limit_s=LIMIT_S)
    rows = re.findall(r"^pair\t(\S+)\t(\S+)\t([\d.e+-]+)\t(.*)$", output, re.MULTILINE)
    return [Pair((a, b), float(gb_s), how) for a, b, gb_s, how in rows]


def slow_nodes(pairs: list[Pair]) -> list[str]:
    """Return the nodes whose fastest pair is slower than SLOW times the median of all nodes' fastest pairs."""
    if not pairs:
        return []
    best: dict[str, float] = {}
    for pair in pairs:
        for node in pair.nodes:
            best[node] = max(best.get(node, 0.0), pair.gb_s)
    median = sorted(best.values())[len(best) // 2]
    return sorted(node for node, gb_s in best.items() if gb_s < SLOW * median)
