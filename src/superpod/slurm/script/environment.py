"""What the ranks of a job find in their environment: what the run needs (`environment.py`), and what the
cluster adds, each with its reason. `recipes render` writes the reasons into the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from superpod.collection.facts import environment
from superpod.collection.facts.environment import Variable
from superpod.planner import hardware
from superpod.runtime.rank import binding

if TYPE_CHECKING:
    from superpod.planner.hardware import Node
    from superpod.planner.planned_job import PlannedJob
    from superpod.slurm.profiles.profiles import Cluster

PROCESS = (
    Variable("PYTHONUNBUFFERED", "1", "a rank that is killed has written its last lines"),
    Variable("OMP_NUM_THREADS", "1", "as torchrun sets it: ranks of a node must not fight for its cores"),
    Variable("TOKENIZERS_PARALLELISM", "false", "tokenizer threads do not survive the data loader's fork"),
    Variable("HF_HUB_OFFLINE", "1", "a thousand ranks must not ask the hub; preflight looks for the files"),
    Variable("TRANSFORMERS_OFFLINE", "1", "the same, for transformers"),
)
"""Of every rank, on GPUs or not."""

When = Callable[["Node", str], bool]

NETWORK: tuple[tuple[str, str, When, str], ...] = (
    (
        *("NCCL_IB_DISABLE", "1"),
        lambda node, network: network == "ethernet",
        "no RDMA here: do not spend the start-up on looking for it",
    ),
    ("NCCL_IB_GID_INDEX", "3", lambda node, network: network == "roce", "the RoCE v2 address, which is routed"),
    (
        *("NCCL_NET_GDR_LEVEL", "PHB"),
        lambda node, network: node.nvlink_c2c,
        "Grace: NICs reach GPU memory across the host bridge",
    ),
    ("NCCL_NET_GDR_C2C", "1", lambda node, network: node.nvlink_c2c, "... over NVLink-C2C"),
)
"""name, value, when (by node, and by kind of network), why. Source: NCCL's list of variables."""


def variables(cluster: Cluster, job: PlannedJob, overrides: Iterable[str] = ()) -> list[Variable]:
    """The environment of every rank, in the order it is written; a profile's own `[env]` comes last and wins.

    Raises:
        UserError: the job would end at its start with the profile's own.
    """
    if cluster.declared_only:
        own = [Variable(name, value, OWN) for name, value in cluster.env.items()]
        return [v for v in (*PROCESS, *_of_the_site(cluster)) if v.name not in cluster.env] + own
    job = job.replace(node=hardware.builtin().node(cluster.gpu))  # a recipe for H100 may run on H200
    needed = [*PROCESS, *environment.variables(job, overrides), *_of_the_network(cluster, job.node)]
    needed += _of_the_site(cluster)
    return environment.with_own(needed, cluster.env, OWN, job)


OWN = "the profile says so"

_OF_THE_WIRE = ("NCCL_", "GLOO_", "UCX_", "FI_")


def of_the_wire(cluster: Cluster) -> dict[str, str]:
    """What decides how ranks reach each other, for a measurement of the same links; no secrets are among them."""
    node = hardware.builtin().node(cluster.gpu)
    needed = [*([] if cluster.declared_only else _of_the_network(cluster, node)), *_of_the_site(cluster)]
    values = {variable.name: variable.value for variable in needed} | cluster.env
    return {name: value for name, value in values.items() if name.startswith(_OF_THE_WIRE)}


def _of_the_network(cluster: Cluster, node: Node) -> list[Variable]:
    kind = cluster.network.kind
    return [Variable(name, value, reason) for name, value, when, reason in NETWORK if when(node, kind)]


def _of_the_site(cluster: Cluster) -> list[Variable]:
    variables, network = [], cluster.network
    if cluster.slurm.cpu_bind == "gpu" and not cluster.declared_only:
        variables.append(
            Variable(binding.CHOICE, "gpu", "ranks run on the CPUs beside their GPUs (runtime/rank/binding.py)")
        )
    if network.interface:
        why = "the network that nodes greet each other on"
        variables += [Variable("NCCL_SOCKET_IFNAME", network.interface, why)] if not cluster.declared_only else []
        variables.append(Variable("GLOO_SOCKET_IFNAME", network.interface, why))
    if network.hcas:
        variables.append(Variable("NCCL_IB_HCA", network.hcas, "the compute HCAs; the others carry storage"))
    if cluster.folders.cache:
        variables.append(Variable("HF_HOME", cluster.folders.cache, "tokenizers and weights, fetched beforehand"))
    return variables
