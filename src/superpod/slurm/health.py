"""Node health before a job: `recipes cluster health`.

srun sends the checks to the nodes: shell in `slurm/checks/`, Python in `runtime/`. This module judges what they print.
A check prints lines `name<TAB>ok|bad|skip<TAB>words`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common import collection, package_files
from superpod.planner.formats.files import text_of
from superpod.slurm.profiles import node_probe
from superpod.slurm.script import environment, preamble
from superpod.slurm.script.batch_script import check_inputs

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection

CHECKS = package_files.included("slurm") / "checks"
MINUTES = 10
"""of a job that checks or measures"""
LIMIT_S = node_probe.WAIT_S + 60 * MINUTES + 30
"""after the job's own end: a connection that gives up first would leave the job in the queue"""
RUNTIME = Path(__file__).resolve().parent.parent / "runtime" / "health"


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
    inputs = check_inputs(cluster, cluster.folders.runs)
    command = ["env", *(f"{name}={value}" for name, value in inputs.items()), "bash", "-c", script, "node.sh"]
    command += local or ["disk"]
    # The step requests the node's GPUs: where Slurm confines devices, nvidia-smi lists only the GPUs of the job.
    output = connection.run([*srun_on_nodes(cluster, nodes), "--label", *command], limit_s=LIMIT_S)
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
    from superpod.slurm.submission.submit import ranks_python

    tasks = 1 if cluster.declared_only else cluster.gpus_per_node
    words = [*srun_on_nodes(cluster, nodes, tasks), *container_options(cluster)]
    words += with_modules(
        cluster, ["env", f"MASTER_ADDR={nodes[0]}", "MASTER_PORT=29500", *network_assignments(cluster)]
    )
    words += [ranks_python(cluster), "-c"]
    output = connection.run([*words, (RUNTIME / "pairs.py").read_text(), "all"], limit_s=LIMIT_S)
    match = re.search(r"^bus\t([\d.e+-]+)\t(.+)$", output, re.MULTILINE)
    if match is None:
        return [Verdict(nodes[0], "bandwidth", "bad", "the all-reduce has not ended")]
    gb_s, least = float(match[1]), cluster.health.min_bus_gb_s
    words_of = f"{gb_s:.3g} GB/s on the bus over {len(nodes)} nodes ({match[2]})" + (
        f", want {least:g}" if least else ""
    )
    return [Verdict("all", "bandwidth", "bad" if gb_s < least else "ok", words_of)]


def srun_on_nodes(cluster: Cluster, nodes: list[str], tasks: int = 1) -> list[str]:
    """srun on these nodes with their GPUs, as a run has them, for MINUTES at most."""
    return [*node_probe.srun(cluster, len(nodes), tasks=tasks, minutes=MINUTES), f"--nodelist={','.join(nodes)}"]


def container_options(cluster: Cluster) -> list[str]:
    """The container that the ranks run in."""
    image, mounts = cluster.container.image, cluster.container.mounts
    if not image:
        return []
    # In pyxis the image's value of a variable wins, except for those named here.
    names = ",".join(environment.network_variables(cluster))
    return [f"--container-image={image}", *([f"--container-mounts={','.join(mounts)}"] if mounts else [])] + (
        [f"--container-env={names}"] if names else []
    )


def network_assignments(cluster: Cluster) -> list[str]:
    """The variables by which ranks reach each other, for `env`."""
    return [f"{name}={value}" for name, value in environment.network_variables(cluster).items()]


def with_modules(cluster: Cluster, words: list[str]) -> list[str]:
    """A command after the profile's modules have been loaded; a container has its software in it, and no `module`."""
    if not cluster.software.modules or cluster.container.image:
        return words
    return ["bash", "-c", preamble.shell_setup(cluster.software.modules) + 'exec "$@"\n', "bash", *words]
