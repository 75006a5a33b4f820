"""Find slow nodes by measuring the bandwidth between every pair of nodes: `recipes cluster bisect`.

The measurement is an NCCL all-reduce over the GPUs of both nodes, which uses the same InfiniBand ports as training.
Without torch and GPUs it is ib_write_bw on each HCA; without that, TCP.
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
"""measurements of each pair; the best one counts"""
SLOW = 0.5
"""fraction of the median bandwidth below which a node is slow"""
TRANSPORTS = ("nccl", "ib", "gloo", "tcp")
MIB = {"nccl": 256, "ib": 1024, "gloo": 16, "tcp": 16}
"""MiB per measurement: enough for the latency to be negligible"""


@dataclass(frozen=True)
class Pair:
    """Measured bandwidth between two nodes, GB/s."""

    nodes: tuple[str, str]
    gb_s: float
    how: str = ""
    """the network that NCCL used, or the slowest HCA"""


class Bisection(NamedTuple):
    """The measurements, the transport, and the slow nodes."""

    pairs: list[Pair]
    slow: list[str]
    transport: str
    why: str
    """why no better transport was used; "" for NCCL"""


def bisect(connection: Connection, cluster: Cluster, nodes: list[str], mib: int = 0, transport: str = "") -> Bisection:
    """Measure the bandwidth of every pair of nodes and find the slow nodes (see `slow_nodes`).

    Args:
        connection: to the cluster.
        cluster: the profile.
        nodes: names of three or more nodes.
        mib: MiB per measurement; 0 = the transport's default.
        transport: one of TRANSPORTS; "" = the best that every node has.

    Raises:
        UserError: fewer than three nodes, an unknown transport, or srun cannot allocate the nodes.
    """
    if len(nodes) < 3:
        raise UserError(f"a comparison needs at least 3 nodes, not {len(nodes)}", "specify three or more nodes")
    if transport and transport not in TRANSPORTS:
        raise UserError(f"{transport!r} is not a transport", f"transports: {', '.join(TRANSPORTS)}")
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
            break  # a bad cable is slow in every pass, a busy host is not
    return Bisection(pairs, slow_nodes(pairs), transport, why)


def choose_transport(connection: Connection, cluster: Cluster, nodes: list[str]) -> tuple[str, str]:
    """Return the best transport that every node has, and why there is no better one."""
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


def _command(cluster: Cluster, nodes: list[str], transport: str, tasks: int, words: list[str]) -> list[str]:
    """Return the srun command that runs bandwidth.py on these nodes, with the software that the transport needs."""
    from superpod.slurm.submission.submit import ranks_python

    if transport in ("nccl", "gloo"):
        python = [
            *container_options(cluster),
            *with_modules(cluster, ["env", *network_assignments(cluster), ranks_python(cluster)]),
        ]
    else:
        python = [cluster.software.host_python]
    script = (RUNTIME / "bandwidth.py").read_text()
    return [*srun_on_nodes(cluster, nodes, tasks), *python, "-c", script, *words]


def _measure_pairs(connection: Connection, cluster: Cluster, nodes: list[str], mib: int, transport: str) -> list[Pair]:
    tasks = cluster.gpus_per_node if transport == "nccl" else 1
    names = cluster.network.hcas if transport == "ib" else cluster.network.interface
    words = _command(cluster, nodes, transport, tasks, [transport, str(mib), names, *nodes])
    output = connection.run(words, limit_s=LIMIT_S)
    rows = re.findall(r"^pair\t(\S+)\t(\S+)\t([\d.e+-]+)\t(.*)$", output, re.MULTILINE)
    return [Pair((a, b), float(gb_s), how) for a, b, gb_s, how in rows]


def slow_nodes(pairs: list[Pair], share: float = SLOW) -> list[str]:
    """List the nodes whose best pair is slow: a good node is fast when paired with another good node."""
    if not pairs:
        return []
    best: dict[str, float] = {}
    for pair in pairs:
        for node in pair.nodes:
            best[node] = max(best.get(node, 0.0), pair.gb_s)
    median = sorted(best.values())[len(best) // 2]
    return sorted(node for node, gb_s in best.items() if gb_s < share * median)
