"""Collects the environment variables of the ranks, for the run (collection/facts/environment.py) and the cluster.

Each has a reason, which the batch script contains as a comment.
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
    Variable("PYTHONUNBUFFERED", "1", "the last lines of a killed rank reach its log"),
    Variable("OMP_NUM_THREADS", "1", "as torchrun sets it: the ranks of a node do not compete for its cores"),
    Variable("TOKENIZERS_PARALLELISM", "false", "tokenizer threads do not survive the data loader's fork"),
    Variable("HF_HUB_OFFLINE", "1", "ranks do not query the Hugging Face Hub; preflight checks that the files exist"),
    Variable("TRANSFORMERS_OFFLINE", "1", "the same for the transformers package"),
)
"""Variables for every rank, on GPUs or CPUs."""

When = Callable[["Node", str], bool]

NETWORK: tuple[tuple[str, str, When, str], ...] = (
    (
        *("NCCL_IB_DISABLE", "1"),
        lambda node, network: network == "ethernet",
        "this network has no RDMA, so NCCL need not search for it at startup",
    ),
    ("NCCL_IB_GID_INDEX", "3", lambda node, network: network == "roce", "the GID of RoCE v2, which is routable"),
    (
        *("NCCL_NET_GDR_LEVEL", "PHB"),
        lambda node, network: node.nvlink_c2c,
        "Grace: GPUDirect RDMA across the host bridge",
    ),
    ("NCCL_NET_GDR_C2C", "1", lambda node, network: node.nvlink_c2c, "Grace: GPUDirect RDMA over NVLink-C2C"),
)
"""Name, value, condition (on the node and the network type) and reason. Source: NCCL's documentation."""


def variables(cluster: Cluster, job: PlannedJob, overrides: Iterable[str] = ()) -> list[Variable]:
    """Return the environment variables of every rank; those in `[env]` of the profile come last and take precedence.

    Raises:
        UserError: a variable in `[env]` would make the job fail at startup.
    """
    if cluster.declared_only:
        profile_variables = [Variable(name, value, PROFILE_SOURCE) for name, value in cluster.env.items()]
        other_variables = [v for v in (*PROCESS, *_site_variables(cluster)) if v.name not in cluster.env]
        return other_variables + profile_variables
    job = job.replace(node=hardware.builtin().node(cluster.gpu))  # a recipe for H100 may run on H200
    env = [*PROCESS, *environment.variables(job, overrides), *_network_kind_variables(cluster, job.node)]
    env += _site_variables(cluster)
    return environment.with_user_variables(env, cluster.env, PROFILE_SOURCE, job)


PROFILE_SOURCE = "set by [env] of the cluster profile"

_NETWORK_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_")


def network_variables(cluster: Cluster) -> dict[str, str]:
    """Return the variables of NCCL, gloo, UCX and libfabric for the ranks, so that measurements use the same links."""
    env = _site_variables(cluster)
    if not cluster.declared_only:
        node = hardware.builtin().node(cluster.gpu)
        env = [*_network_kind_variables(cluster, node), *env]
    values = {variable.name: variable.value for variable in env} | cluster.env
    return {name: value for name, value in values.items() if name.startswith(_NETWORK_PREFIXES)}


def _network_kind_variables(cluster: Cluster, node: Node) -> list[Variable]:
    """Return the variables that the type of network and the node require."""
    kind = cluster.network.kind
    return [Variable(name, value, reason) for name, value, when, reason in NETWORK if when(node, kind)]


def _site_variables(cluster: Cluster) -> list[Variable]:
    """Return the variables that keys of the profile set: CPU binding, interfaces, HCAs and the cache folder."""
    variables, network = [], cluster.network
    if cluster.slurm.cpu_bind == "gpu" and not cluster.declared_only:
        reason = "each rank runs on the CPUs local to its GPU (runtime/rank/binding.py)"
        variables.append(Variable(binding.BINDING_VARIABLE, "gpu", reason))
    if network.interface and not cluster.declared_only:
        variables.append(Variable("NCCL_SOCKET_IFNAME", network.interface, "interface for NCCL's bootstrap"))
    if network.interface:
        variables.append(Variable("GLOO_SOCKET_IFNAME", network.interface, "interface for gloo"))
    if network.hcas:
        variables.append(Variable("NCCL_IB_HCA", network.hcas, "HCAs of the compute network; the others carry storage"))
    if cluster.folders.cache:
        variables.append(Variable("HF_HOME", cluster.folders.cache, "tokenizers and weights downloaded beforehand"))
    return variables
