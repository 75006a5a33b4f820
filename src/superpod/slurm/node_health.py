"""Checks the health of nodes: `recipes cluster health`.

The checks are shell scripts in `slurm/checks/` and Python files in `runtime/`, which srun runs on the nodes. They print
lines `name<TAB>ok|bad|skip<TAB>detail`, which this module evaluates.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common import collection, package_files
from superpod.errors import counted
from superpod.planner.formats.config_files import read_text
from superpod.slurm.profiles import node_probe
from superpod.slurm.script import cluster_variables, preamble
from superpod.slurm.script.batch_script import check_inputs

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection

CHECKS = package_files.included_folder("slurm") / "checks"
MINUTES = 10
"""Time limit of jobs that check or measure nodes."""
LIMIT_S = node_probe.WAIT_S + 60 * MINUTES + 30
"""Time limit of the connection, longer than that of the job: an aborted connection would leave the job queued."""
RUNTIME = Path(__file__).resolve().parent.parent / "runtime" / "health"


@dataclass(frozen=True)
class Verdict:
    """The result of one check on one node."""

    node: str
    check: str
    state: str
    """ok, bad or skip"""
    detail: str


def check_nodes(connection: Connection, cluster: Cluster, nodes: list[str]) -> list[Verdict]:
    """Run the checks of a profile on some nodes concurrently, and return the results.

    Raises:
        UserError: srun cannot allocate the nodes.
    """
    script = "".join(collection_checks(cluster)) + (CHECKS / "node.sh").read_text()
    health = cluster.health
    local = [name for name in health.checks if name != "bandwidth"]
    inputs = check_inputs(cluster, cluster.folders.runs)
    command = ["env", *(f"{name}={value}" for name, value in inputs.items()), "bash", "-c", script, "node.sh"]
    command += local or ["disk"]
    # The step requests all GPUs of the nodes: where Slurm confines devices, nvidia-smi lists only those of the job.
    output = connection.run([*srun_on_nodes(cluster, nodes), "--label", *command], limit_s=LIMIT_S)
    verdicts = _parse_verdicts(output, sorted_nodes(connection, cluster, nodes))
    if "time" in health.checks:
        verdicts += _compare_clocks(verdicts, health.max_skew_s)
    if "bandwidth" in health.checks:
        verdicts += bandwidth(connection, cluster, sorted_nodes(connection, cluster, nodes))
    return [verdict for verdict in verdicts if verdict.check != "clock"]


def collection_checks(cluster: Cluster) -> Iterator[str]:
    """Yield a shell function for node.sh per check of the profile that is from a user's collection."""
    for name, path in collection.checks().items():
        if name in cluster.health.checks:
            yield f"own_{name}() {{ bash -c {shlex.quote(read_text(path))} {path.name}; }}\n"


def sorted_nodes(connection: Connection, cluster: Cluster, nodes: list[str]) -> list[str]:
    """Return the nodes in the order in which srun numbers its tasks."""
    return connection.run(["scontrol", "show", "hostnames", ",".join(nodes)]).split()


def _parse_verdicts(output: str, nodes: list[str]) -> list[Verdict]:
    """Return the results in lines `task: check<TAB>state<TAB>detail`; `nodes` has the node of each task."""
    matches = (re.match(r"\s*(\d+): ([\w-]+)\t(\w+)\t(.*)", line) for line in output.splitlines())
    return [Verdict(nodes[int(match[1])], match[2], match[3], match[4]) for match in matches if match]


def _compare_clocks(verdicts: list[Verdict], max_skew_s: float) -> list[Verdict]:
    """Return a result per node: bad if its clock, printed in Unix seconds, is too far from the median."""
    clocks = {v.node: float(v.detail) for v in verdicts if v.check == "clock"}
    if len(clocks) < 2:
        return []
    median = sorted(clocks.values())[len(clocks) // 2]
    result = []
    for node, clock in clocks.items():
        skew = clock - median
        state = "bad" if abs(skew) > max_skew_s else "ok"
        result.append(Verdict(node, "time", state, f"{skew:+.2f} s from the median"))
    return result


def bandwidth(connection: Connection, cluster: Cluster, nodes: list[str]) -> list[Verdict]:
    """Measure the bus bandwidth of a short all-reduce over all GPUs of the nodes (NCCL, or gloo without GPUs).

    Returns:
        One result, which is bad if the bandwidth is below health.min_bus_gb_s or the all-reduce does not finish.

    Raises:
        UserError: srun cannot allocate the nodes, or torch is not installed for the ranks.
    """
    from superpod.slurm.submission.submit import ranks_python

    tasks = 1 if cluster.declared_only else cluster.gpus_per_node
    rendezvous = ["env", f"MASTER_ADDR={nodes[0]}", "MASTER_PORT=29500", *network_assignments(cluster)]
    command = [*srun_on_nodes(cluster, nodes, tasks), *container_options(cluster)]
    command += [*with_modules(cluster, rendezvous), ranks_python(cluster), "-c"]
    output = connection.run([*command, (RUNTIME / "bandwidth.py").read_text(), "all"], limit_s=LIMIT_S)
    match = re.search(r"^bus\t([\d.e+-]+)\t(.+)$", output, re.MULTILINE)
    if match is None:
        return [Verdict(nodes[0], "bandwidth", "bad", "the all-reduce did not finish")]
    gb_s, minimum = float(match[1]), cluster.health.min_bus_gb_s
    detail = f"{gb_s:.3g} GB/s bus bandwidth over {counted(len(nodes), 'node')} ({match[2]})"
    if minimum:
        detail += f", minimum {minimum:g}"
    return [Verdict("all", "bandwidth", "bad" if gb_s < minimum else "ok", detail)]


def srun_on_nodes(cluster: Cluster, nodes: list[str], tasks: int = 1) -> list[str]:
    """Return an srun command for these nodes and all their GPUs, with `tasks` tasks per node, limited to MINUTES."""
    return [*node_probe.srun(cluster, len(nodes), tasks=tasks, minutes=MINUTES), f"--nodelist={','.join(nodes)}"]


def container_options(cluster: Cluster) -> list[str]:
    """Return the pyxis options for the container of the ranks; [] if the profile has no image."""
    image, mounts = cluster.container.image, cluster.container.mounts
    if not image:
        return []
    options = [f"--container-image={image}"]
    if mounts:
        options.append(f"--container-mounts={','.join(mounts)}")
    # In pyxis, values set in the image take precedence, except for the variables listed here.
    names = ",".join(cluster_variables.network_variables(cluster))
    if names:
        options.append(f"--container-env={names}")
    return options


def network_assignments(cluster: Cluster) -> list[str]:
    """Return the network variables of the ranks as NAME=VALUE, for `env`."""
    return [f"{name}={value}" for name, value in cluster_variables.network_variables(cluster).items()]


def with_modules(cluster: Cluster, command: list[str]) -> list[str]:
    """Return a command that loads the modules of the profile and runs `command`; unchanged for a container."""
    if not cluster.software.modules or cluster.container.image:
        return command
    return ["bash", "-c", preamble.shell_setup(cluster.software.modules) + 'exec "$@"\n', "bash", *command]
