"""A slow node or link, by measurement of every pair of nodes: `recipes cluster bisect`.

The transport is training's own where there is one: an all-reduce of NCCL over the GPUs of both nodes, which takes the
same InfiniBand ports. Without torch and GPUs, ib_write_bw through each HCA; without that, TCP.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from superpod.errors import UserError
from superpod.slurm.health import (
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
"""measurements of every pair; the best one counts"""
SLOW = 0.5
"""share of the median bandwidth below which a node is slow"""
TRANSPORTS = ("nccl", "ib", "gloo", "tcp")
MIB = {"nccl": 256, "ib": 1024, "gloo": 16, "tcp": 16}
"""of one measurement: enough that the start of it does not count"""


@dataclass(frozen=True)
class Pair:
    """Measured bandwidth between two nodes, GB/s."""

    nodes: tuple[str, str]
    gb_s: float
    how: str = ""
    """the network that NCCL took, or the slowest HCA"""


class Bisection(NamedTuple):
    """What was measured, how, and which nodes are slow."""

    pairs: list[Pair]
    slow: list[str]
    transport: str
    why: str
    """why no better transport was taken; "" for NCCL"""


def bisect(connection: Connection, cluster: Cluster, nodes: list[str], mib: int = 0, transport: str = "") -> Bisection:
    """The bandwidth of every pair of nodes, and the slow nodes (see `slow_nodes`).

    Raises:
        UserError: fewer than three nodes, no such transport, or srun does not get the nodes.
    """
    if len(nodes) < 3:
        raise UserError(f"{len(nodes)} nodes make no comparison", "name three or more")
    if transport and transport not in TRANSPORTS:
        raise UserError(f"no transport is called {transport!r}", f"one of {', '.join(TRANSPORTS)}")
    ordered = sorted_nodes(connection, cluster, nodes)
    why = "you chose it" if transport else ""
    if not transport:
        transport, why = choose(connection, cluster, ordered)
    best: dict[tuple[str, str], Pair] = {}
    for _ in range(PASSES):
        for pair in _measured(connection, cluster, ordered, mib or MIB[transport], transport):
            if pair.gb_s > best.get(pair.nodes, Pair(pair.nodes, -1.0)).gb_s:
                best[pair.nodes] = pair
        pairs = [*best.values()]
        if not slow_nodes(pairs):
            break  # a bad cable is slow every time, a busy host only once
    return Bisection(pairs, slow_nodes(pairs), transport, why)


def choose(connection: Connection, cluster: Cluster, nodes: list[str]) -> tuple[str, str]:
    """The best transport that every node has, and why not a better one."""
    if cluster.declared_only:
        return "tcp", "the GPUs are declared and not there"
    reasons = []
    for transport in ("nccl", "ib"):
        try:
            output = connection.run(_command(cluster, nodes, transport, 1, ["can", transport]), limit_s=LIMIT_S)
        except UserError as error:
            reasons.append(f"no {transport}: {str(error).splitlines()[-1]}")
            continue
        answers = re.findall(r"^can\t(\S+)\t(.*)$", output, re.MULTILINE)
        lacking = [f"{node} has {why}" for node, why in answers if why]
        if len(answers) == len(nodes) and not lacking:
            return transport, "; ".join(reasons)
        reasons.append(f"no {transport}: {lacking[0] if lacking else 'not every node answered'}")
    return "tcp", "; ".join(reasons)


def _command(cluster: Cluster, nodes: list[str], transport: str, tasks: int, words: list[str]) -> list[str]:
    """srun of pairs.py on these nodes, in the software that the transport needs."""
    from superpod.slurm.submission.submit import ranks_python

    if transport in ("nccl", "gloo"):
        python = [
            *container_options(cluster),
            *with_modules(cluster, ["env", *network_assignments(cluster), ranks_python(cluster)]),
        ]
    else:
        python = [cluster.software.host_python]
    script = (RUNTIME / "pairs.py").read_text()
    return [*srun_on_nodes(cluster, nodes, tasks), *python, "-c", script, *words]


def _measured(connection: Connection, cluster: Cluster, nodes: list[str], mib: int, transport: str) -> list[Pair]:
    tasks = cluster.gpus_per_node if transport == "nccl" else 1
    names = cluster.network.hcas if transport == "ib" else cluster.network.interface
    words = _command(cluster, nodes, transport, tasks, [transport, str(mib), names, *nodes])
    output = connection.run(words, limit_s=LIMIT_S)
    rows = re.findall(r"^pair\t(\S+)\t(\S+)\t([\d.e+-]+)\t(.*)$", output, re.MULTILINE)
    return [Pair((a, b), float(gb_s), how) for a, b, gb_s, how in rows]


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
