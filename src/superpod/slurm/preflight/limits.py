"""Checks a job against the limits of the partition, QOS and association, and against reservations.

Unless EnforcePartLimits or the QOS flag DenyOnLimit is set, Slurm accepts a job that exceeds a limit and leaves it
pending forever. The precedence of limits follows slurm.schedmd.com/resource_limits.html, "Hierarchy".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from superpod.errors import counted
from superpod.launch.preflight import PROCESS_GIB
from superpod.slurm.profiles.live_cluster import LiveCluster, is_usable, list_items
from superpod.slurm.profiles.profile_checks import (
    Finding,
    account_and_parents,
    association,
    is_lifted,
    partition_name,
    profile_reservations,
    qos_names,
    to_mib,
)
from superpod.slurm.profiles.profile_values import seconds

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster


@dataclass(frozen=True)
class JobSize:
    """The size of a submission: nodes, time limit and number of jobs."""

    nodes: int
    gpus_per_node: int
    time: str
    """time limit per attempt, in Slurm's time format"""
    attempts: int
    """number of jobs to queue per run"""
    runs: int = 1
    """number of runs in a sweep"""

    @property
    def jobs(self) -> int:
        """The number of jobs to queue for all runs."""
        return self.attempts * self.runs


class Source(NamedTuple):
    """A QOS, association or account, and its limits by sacctmgr's names."""

    name: str
    values: Mapping[str, str]


RESOURCE_LIMITS = {
    "MaxTRES": "per job",
    "MaxTRESPU": "per user",
    "MaxTRESPA": "per account",
    "GrpTRES": "for all its jobs together",
    "MaxTRESPerNode": "per node of a job",
}
"""Scope of each resource limit. A job that exceeds one of them never starts."""


def check_partition(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """Yield findings if the number of nodes violates a limit of the partition, or a required reservation is missing."""
    name = partition_name(cluster, live)
    partition = live.partitions.get(name, {})
    for key, sign in (("MaxNodes", 1), ("MinNodes", -1)):
        bound = partition.get(key, "")
        if is_lifted(cluster, live, f"Partition{key}"):
            continue
        if bound.isdigit() and sign * size.nodes > sign * int(bound):
            relation = "more" if sign > 0 else "fewer"
            yield Finding(
                f"the run needs {counted(size.nodes, 'node')}, {relation} than partition {name} allows: {key} {bound}",
                f"--nodes {bound}",
            )
    if partition.get("ReqResv") == "YES" and not profile_reservations(cluster):
        yield Finding(f"partition {name} requires a reservation", 'set slurm.options = ["--reservation=NAME"]')


def check_nodes(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """Yield a finding if the partition has too few nodes, or too few of them are up."""
    name = partition_name(cluster, live)
    all_nodes = live.nodes_in(name)
    if not all_nodes:
        return
    usable_nodes = [node for node in all_nodes if is_usable(node.get("State", ""))]
    if size.nodes > len(all_nodes):
        yield Finding(f"the run needs {counted(size.nodes, 'node')}, but {name} has {len(all_nodes)}", "reduce --nodes")
    elif size.nodes > len(usable_nodes):
        unusable_nodes = ", ".join(sorted(node["NodeName"] for node in all_nodes if node not in usable_nodes))
        yield Finding(
            f"the run needs {counted(size.nodes, 'node')}, but only {len(usable_nodes)} of {name} are up; "
            f"not up: {unusable_nodes}",
            "reduce --nodes, or wait until they are up",
        )


def check_accounting(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """Yield a finding for each limit of a QOS or account that the time limit, resources or jobs exceed, if enforced."""
    if not {"limits", "safe"} & set(live.enforces.split(",")):
        return
    sources = _sources(cluster, live)
    limiting = next((source for source in sources if source.values.get("MaxWall")), None)
    if limiting:
        max_wall = limiting.values["MaxWall"]
        if seconds(size.time) > seconds(max_wall):
            yield Finding(
                f"the time limit {size.time} exceeds the limit of {limiting.name}: MaxWall {max_wall}",
                f"--time {max_wall}",
            )
    yield from _resource_findings(sources, _requested_resources(cluster, live, size), size)
    yield from _job_findings(live, sources, size)


def _sources(cluster: Cluster, live: LiveCluster) -> list[Source]:
    """Return the QOS, association and accounts in Slurm's order of precedence: the first that sets a limit applies."""
    own_association = association(cluster, live)
    sources = [Source(f"QOS {name}", live.qos.get(name, {})) for name in qos_names(cluster, live)]
    sources.append(Source(f"your association with account {own_association.account}", own_association.limits))
    parent_accounts = [name for name in account_and_parents(own_association.account, live) if name in live.accounts]
    return [*sources, *(Source(f"account {name}", live.accounts[name]) for name in parent_accounts)]


def _requested_resources(cluster: Cluster, live: LiveCluster, size: JobSize) -> dict[str, int]:
    """Return the amount of each trackable resource (TRES) of a job: node, cpu, gres/gpu and gres/gpu:TYPE."""
    gpus = size.nodes * size.gpus_per_node
    resources = {"node": size.nodes}
    if cluster.slurm.gpus != "none":
        resources |= {"gres/gpu": gpus, f"gres/gpu:{cluster.slurm.gpu_type}": gpus}
    cores = [int(n["CPUTot"]) for n in live.nodes_in(partition_name(cluster, live)) if n.get("CPUTot", "").isdigit()]
    if cluster.slurm.exclusive and cores:
        resources["cpu"] = size.nodes * min(cores)
    elif cluster.slurm.cpus_per_task:
        resources["cpu"] = gpus * cluster.slurm.cpus_per_task
    return resources


def _resource_findings(sources: list[Source], request: dict[str, int], size: JobSize) -> Iterator[Finding]:
    """Yield a finding for each resource limit that the requested resources exceed."""
    for limit, scope in RESOURCE_LIMITS.items():
        per_node = limit == "MaxTRESPerNode"
        for resource, (name, most) in _resource_bounds(sources, limit).items():
            need = request.get(resource, 0) // (size.nodes if per_node else 1)
            if need <= most:
                continue
            fitting_nodes = most * size.nodes // need
            hint = "use another QOS or account"
            if fitting_nodes and not per_node:
                hint = f"--nodes {fitting_nodes}"
            yield Finding(
                f"{counted(size.nodes, 'node')} x {size.gpus_per_node} GPUs need {resource}={need}, but {name} "
                f"allows {most} {scope} ({limit})",
                f"{hint}, or ask the site for a higher limit",
            )


def _resource_bounds(sources: list[Source], limit: str) -> dict[str, tuple[str, int]]:
    """Return the source and the value of a limit for each resource; the first source that sets one applies."""
    bounds: dict[str, tuple[str, int]] = {}
    for name, values in sources:
        is_relative = "Relative" in values.get("Flags", "").split(",")  # percentages of amounts known only to Slurm
        for item in list_items(values.get(limit, "")):
            resource, _, number = item.partition("=")
            if number.isdigit():  # memory has a unit; it is checked against the node instead
                bounds.setdefault(resource, (name, sys.maxsize if is_relative else int(number)))
    return bounds


def _job_findings(live: LiveCluster, sources: list[Source], size: JobSize) -> Iterator[Finding]:
    """Yield findings if no job may run, or not all jobs may be queued in addition to the user's queued jobs."""
    for name, key, most in _job_limits(sources, "Jobs"):
        if most == 0:
            yield Finding(f"{name} allows no running jobs: {key}=0", "use another QOS or account")

    available: list[tuple[int, int, str]] = []
    for name, key, most in _job_limits(sources, "Submit"):
        kind, _, value = name.rpartition(" ")
        column = 1 if kind == "QOS" else 0
        queued_jobs = sum(job[column] == value for job in live.queued)
        available.append((max(0, most - queued_jobs), queued_jobs, f"{name} allows {most} ({key})"))
    if available and size.jobs > min(available)[0]:
        free, queued_jobs, allowed = min(available)
        runs = f" ({size.runs} runs x {size.attempts})" if size.runs > 1 else ""
        yield Finding(
            f"{counted(size.jobs, 'job')} to queue{runs}, and {queued_jobs} of yours are queued already, but {allowed}",
            _fewer_jobs_hint(free, size),
        )


def _fewer_jobs_hint(free_jobs: int, size: JobSize) -> str:
    """Return a hint for reducing the number of jobs to at most `free_jobs`."""
    if free_jobs < min(size.runs, 2):  # a sweep has at least two runs
        return "wait for one of them to end"
    attempts = free_jobs // size.runs
    if attempts:
        return f"--attempts {attempts}, or chain.attempts = {attempts}"
    return f"sweep at most {free_jobs} values, with --attempts 1"


def _job_limits(sources: list[Source], suffix: str) -> list[tuple[str, str, int]]:
    """Return the limits on the number of running jobs ("Jobs") or queued jobs ("Submit"), as (source, key, limit).

    A QOS limit per user or account replaces the limit of the association. Of the parent accounts, all Grp limits apply
    but no Max limits, because sacctmgr prints inherited Max limits with the user's association. Account-wide limits
    also count the jobs of other users, which are not known here.
    """

    def limits(key: str) -> list[tuple[str, str, int]]:
        return [(name, key, int(values[key])) for name, values in sources if values.get(key, "").isdigit()]

    shared = limits(f"Grp{suffix}")
    if shared and shared[0][0].startswith("QOS "):
        del shared[1:]
    own_limits = [*limits(f"Max{suffix}PU")[:1], *limits(f"Max{suffix}PA")[:1]] or limits(f"Max{suffix}")[:1]
    return [*own_limits, *shared]


def reservations(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """Yield a note on the first reservation that delays the job, because an attempt cannot end before it starts."""
    if live.now is None:
        return
    name, end = partition_name(cluster, live), live.now + timedelta(seconds=seconds(size.time))
    nodes = {node["NodeName"] for node in live.nodes_in(name)}
    other_reservations = [
        r for r in live.reservations if r.name not in profile_reservations(cluster) and r.nodes & nodes
    ]
    overlapping = [r for r in other_reservations if r.start < end and r.end > live.now]
    reserved: set[str] = set()
    for reservation in sorted(overlapping, key=lambda r: r.start):
        reserved |= reservation.nodes & nodes
        if size.nodes <= len(nodes) - len(reserved):
            continue
        kind = " (maintenance)" if "MAINT" in reservation.flags else ""
        minutes = int((reservation.start - live.now).total_seconds()) // 60 - 1
        hint = f'let the job wait; if the reservation is yours, slurm.options = ["--reservation={reservation.name}"]'
        if 60 * minutes >= 2 * cluster.chain.save_s:
            hint = f"--time {minutes // 60}:{minutes % 60:02d}:00 ends before it, or {hint}"
        yield Finding(
            f"an attempt with the limit {size.time} that started now would end at {end:%m-%d %H:%M}, but reservation "
            f"{reservation.name}{kind} has {len(reserved)} of the {len(nodes)} nodes of {name} from "
            f"{reservation.start:%m-%d %H:%M} to {reservation.end:%m-%d %H:%M}, so the job will start afterwards",
            hint,
        )
        return


def check_host_memory(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """Yield a finding if slurm.mem is too small for the NeMo processes of a node, even without a model."""
    available_mib = to_mib(cluster.slurm.mem)
    need = round(size.gpus_per_node * PROCESS_GIB * 1024)
    if 0 < available_mib < need:
        yield Finding(
            f"slurm.mem {cluster.slurm.mem} is too small for {size.gpus_per_node} ranks, which need {need}M "
            f"({PROCESS_GIB} GiB each) even without a model",
            'set mem = "0" for all memory of the node',
        )


CHECKS = (check_nodes, check_partition, check_accounting, check_host_memory)
"""Checks whose findings are reasons to refuse a submission."""
