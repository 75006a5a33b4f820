"""Check a job against site limits (partition, QOS, association) and reservations.

Slurm accepts a job that exceeds a limit and leaves it pending forever, unless EnforcePartLimits or the QOS flag
DenyOnLimit is set. The precedence of limits follows slurm.schedmd.com/resource_limits.html, "Hierarchy".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from superpod.errors import counted
from superpod.launch.preflight import PROCESS_GIB
from superpod.slurm.profiles.live_cluster import JobShape, LiveCluster, is_usable, list_items
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
    """The size of a submission."""

    nodes: int
    gpus_per_node: int
    time: str
    """time limit per attempt, in Slurm's time format"""
    attempts: int
    """jobs to queue per run"""
    runs: int = 1
    """number of runs in a sweep"""

    @property
    def shape(self) -> JobShape:
        """The size of one job."""
        return JobShape(self.nodes, self.gpus_per_node, self.time)

    @property
    def jobs(self) -> int:
        """The number of jobs to queue."""
        return self.attempts * self.runs


class Source(NamedTuple):
    """A QOS, association or account with its limits."""

    name: str
    values: Mapping[str, str]


JOB = {
    "MaxTRES": "per job",
    "MaxTRESPU": "per user",
    "MaxTRESPA": "per account",
    "GrpTRES": "for all its jobs together",
}
"""Resource limit -> what it applies to. A job that exceeds one of these limits never starts."""


def check_partition(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """Check the number of nodes against the partition's limits, and whether the partition requires a reservation."""
    name = partition_name(cluster, live)
    partition = live.partitions.get(name, {})
    for key, sign in (("MaxNodes", 1), ("MinNodes", -1)):
        bound = partition.get(key, "")
        if is_lifted(cluster, live, f"Partition{key}"):
            continue
        if bound.isdigit() and sign * size.nodes > sign * int(bound):
            relation = "more" if sign > 0 else "fewer"
            yield Finding(
                f"the run needs {counted(size.nodes, 'node')}, {relation} than {name} allows: {key} {bound}",
                f"--nodes {bound}",
            )
    if partition.get("ReqResv") == "YES" and not profile_reservations(cluster):
        yield Finding(f"partition {name} requires a reservation", 'specify it: slurm.options = ["--reservation=NAME"]')


def check_nodes(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """Check that the partition has enough nodes, and that enough of them are up."""
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
    """Check the time limit, resources and number of jobs against the QOS and account limits, if Slurm enforces them."""
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
    """List the sources of limits in Slurm's order of precedence: the first source that sets a limit applies."""
    own_association = association(cluster, live)
    sources = [Source(f"QOS {name}", live.qos.get(name, {})) for name in qos_names(cluster, live)]
    sources.append(Source(f"your association with account {own_association.account}", own_association.limits))
    parent_accounts = [name for name in account_and_parents(own_association.account, live) if name in live.accounts]
    return [*sources, *(Source(f"account {name}", live.accounts[name]) for name in parent_accounts)]


def _requested_resources(cluster: Cluster, live: LiveCluster, size: JobSize) -> dict[str, int]:
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
    for limit, scope in {**JOB, "MaxTRESPerNode": "per node of a job"}.items():
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
    """Return resource -> (source, bound); the first source that limits a resource applies."""
    bounds: dict[str, tuple[str, int]] = {}
    for name, values in sources:
        is_relative = "Relative" in values.get("Flags", "").split(",")  # percentages of an amount that only Slurm knows
        for item in list_items(values.get(limit, "")):
            resource, _, number = item.partition("=")
            if number.isdigit():  # memory has units, and is checked against the node
                bounds.setdefault(resource, (name, sys.maxsize if is_relative else int(number)))
    return bounds


def _job_findings(live: LiveCluster, sources: list[Source], size: JobSize) -> Iterator[Finding]:
    """Check that jobs may run, and that all attempts may be queued in addition to the user's queued jobs."""
    for name, key, most in _job_limits(sources, "Jobs"):
        if most == 0:
            yield Finding(f"{name} does not let any job run: {key}=0", "use another QOS or account")

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
            f"{size.jobs} jobs to queue{runs}, and {queued_jobs} of yours are queued already, but {allowed}",
            _fewer_jobs_hint(free, size),
        )


def _fewer_jobs_hint(free_jobs: int, size: JobSize) -> str:
    """Return a hint on how to reduce the number of jobs to at most `free_jobs`."""
    if free_jobs < min(size.runs, 2):  # a sweep has at least two runs
        return "wait for one of them to end"
    attempts = free_jobs // size.runs
    if attempts:
        return f"--attempts {attempts}, or chain.attempts = {attempts}"
    return f"sweep at most {free_jobs} values, with --attempts 1"


def _job_limits(sources: list[Source], what: str) -> list[tuple[str, str, int]]:
    """List the limits on the number of jobs, as (source, key, bound).

    A QOS limit per user or account replaces the limit of the association. Of the parent accounts, all Grp limits apply
    but no Max limits: sacctmgr already prints inherited Max limits with the user's association. Account-wide limits
    also count the jobs of other users, which only Slurm knows.
    """

    def limits(key: str) -> list[tuple[str, str, int]]:
        return [(name, key, int(values[key])) for name, values in sources if values.get(key, "").isdigit()]

    shared = limits(f"Grp{what}")
    if shared and shared[0][0].startswith("QOS "):
        del shared[1:]
    own_limits = [*limits(f"Max{what}PU")[:1], *limits(f"Max{what}PA")[:1]] or limits(f"Max{what}")[:1]
    return [*own_limits, *shared]


def reservations(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """Report the first reservation that would delay the job, because an attempt cannot end before the reservation
    starts. This is a note, not a reason to refuse the job.
    """
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
            f"{reservation.start:%m-%d %H:%M} to {reservation.end:%m-%d %H:%M}: the job will start afterwards",
            hint,
        )
        return


def check_host_memory(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """Check that slurm.mem is enough for the NeMo processes themselves, without a model."""
    available_mib = to_mib(cluster.slurm.mem)
    need = round(size.gpus_per_node * PROCESS_GIB * 1024)
    if 0 < available_mib < need:
        yield Finding(
            f"slurm.mem {cluster.slurm.mem} is less than what {size.gpus_per_node} ranks need even without a model: "
            f"{PROCESS_GIB} GiB each, {need}M",
            'set mem = "0" for all memory of the node',
        )


CHECKS = (check_nodes, check_partition, check_accounting, check_host_memory)
"""Checks whose findings are reasons to refuse."""
