"""What the site allows a job: limits of partition, QOS and association, and reservations that stand in its way.

Slurm takes a job over a limit and lets it wait for ever, unless the site sets EnforcePartLimits or the QOS DenyOnLimit.
Source of the order in which limits count: slurm.schedmd.com/resource_limits.html, "Hierarchy".
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
    association,
    is_lifted,
    mib,
    own_reservations,
    partition_name,
    qos_names,
    with_parents,
)
from superpod.slurm.profiles.profile_values import seconds

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster


@dataclass(frozen=True)
class JobSize:
    """What one submission takes."""

    nodes: int
    gpus_per_node: int
    time: str
    """the limit of an attempt, as Slurm writes it"""
    attempts: int
    """jobs of each run to queue at once"""
    runs: int = 1
    """of a sweep"""

    @property
    def shape(self) -> JobShape:
        """One job of it."""
        return JobShape(self.nodes, self.gpus_per_node, self.time)

    @property
    def jobs(self) -> int:
        """All jobs to queue."""
        return self.attempts * self.runs


class Source(NamedTuple):
    """Where limits come from."""

    name: str
    values: Mapping[str, str]


JOB = {"MaxTRES": "a job", "MaxTRESPU": "a user at once", "MaxTRESPA": "an account at once", "GrpTRES": "all its jobs"}
"""Limits of resources -> whose sum they bound. A job above one of them can never start."""


def partition(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """The partition takes so many nodes, and jobs that name no reservation."""
    name = partition_name(cluster, live)
    known = live.partitions.get(name, {})
    for key, sign in (("MaxNodes", 1), ("MinNodes", -1)):
        bound = known.get(key, "")
        if is_lifted(cluster, live, f"Partition{key}"):
            continue
        if bound.isdigit() and sign * size.nodes > sign * int(bound):
            bad = "more than" if sign > 0 else "fewer than"
            yield Finding(
                f"the run takes {counted(size.nodes, 'node')}, {bad} {name} allows: {key} {bound}", f"--nodes {bound}"
            )
    if known.get("ReqResv") == "YES" and not own_reservations(cluster):
        yield Finding(f"{name} takes only jobs of a reservation", 'name it: slurm.options = ["--reservation=NAME"]')


def nodes(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """The partition has so many nodes that are up."""
    name = partition_name(cluster, live)
    there = live.nodes_in(name)
    up = [node for node in there if is_usable(node.get("State", ""))]
    if there and size.nodes > len(there):
        yield Finding(f"the run takes {counted(size.nodes, 'node')}, but {name} has {len(there)}", "--nodes")
    elif there and size.nodes > len(up):
        down = ", ".join(sorted(n["NodeName"] for n in there if n not in up))
        yield Finding(
            f"the run takes {counted(size.nodes, 'node')}, but {len(up)} of {name} are up; not up: {down}",
            "--nodes, or wait for them",
        )


def accounting(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """Time, resources and number of jobs are within the limits of QOS and account, where Slurm enforces them."""
    if not {"limits", "safe"} & set(live.enforces.split(",")):
        return
    sources = _sources(cluster, live)
    for name, values in sources:
        if longest := values.get("MaxWall"):
            if seconds(size.time) > seconds(longest):
                yield Finding(
                    f"an attempt of {size.time} is longer than {name} allows: MaxWall {longest}", f"--time {longest}"
                )
            break
    yield from _resource_findings(sources, _requested_resources(cluster, live, size), size)
    yield from _job_findings(live, sources, size)


def _sources(cluster: Cluster, live: LiveCluster) -> list[Source]:
    """Limits in the order in which Slurm applies them: the first that sets one counts."""
    own = association(cluster, live)
    sources = [Source(f"QOS {name}", live.qos.get(name, {})) for name in qos_names(cluster, live)]
    sources.append(Source(f"your association with account {own.account}", own.limits))
    above = [name for name in with_parents(own.account, live) if name in live.accounts]
    return [*sources, *(Source(f"account {name}", live.accounts[name]) for name in above)]


def _requested_resources(cluster: Cluster, live: LiveCluster, size: JobSize) -> dict[str, int]:
    gpus = size.nodes * size.gpus_per_node
    takes = {"node": size.nodes}
    if cluster.slurm.gpus != "none":
        takes |= {"gres/gpu": gpus, f"gres/gpu:{cluster.slurm.gpu_type}": gpus}
    cores = [int(n["CPUTot"]) for n in live.nodes_in(partition_name(cluster, live)) if n.get("CPUTot", "").isdigit()]
    if cluster.slurm.exclusive and cores:
        takes["cpu"] = size.nodes * min(cores)
    elif cluster.slurm.cpus_per_task:
        takes["cpu"] = gpus * cluster.slurm.cpus_per_task
    return takes


def _resource_findings(sources: list[Source], takes: dict[str, int], size: JobSize) -> Iterator[Finding]:
    for limit, whose in {**JOB, "MaxTRESPerNode": "a node of a job"}.items():
        bounds: dict[str, tuple[str, int]] = {}
        for name, values in sources:
            relative = "Relative" in values.get("Flags", "").split(",")  # percentages, of what only Slurm knows
            for word in list_items(values.get(limit, "")):
                resource, _, number = word.partition("=")
                if number.isdigit():  # memory has units, and is checked against the node
                    bounds.setdefault(resource, (name, sys.maxsize if relative else int(number)))
        for resource, (name, most) in bounds.items():
            need = takes.get(resource, 0) // (size.nodes if limit == "MaxTRESPerNode" else 1)
            if need > most:
                fits = most * size.nodes // need
                hint = f"--nodes {fits}" if fits and limit != "MaxTRESPerNode" else "another QOS or account"
                yield Finding(
                    f"{counted(size.nodes, 'node')} x {size.gpus_per_node} GPUs take {resource}={need}, but {name} "
                    f"allows {most} to {whose} ({limit})",
                    f"{hint}; more is your site's to give",
                )


def _job_findings(live: LiveCluster, sources: list[Source], size: JobSize) -> Iterator[Finding]:
    """At least one job may run, and all attempts may be queued beside what this user has in the queue."""
    for name, key, most in _job_limits(sources, "Jobs"):
        if most == 0:
            yield Finding(f"{name} lets no job run: {key} 0", "another QOS or account")
    rooms: list[tuple[int, int, str]] = []
    for name, key, most in _job_limits(sources, "Submit"):
        kind, _, word = name.rpartition(" ")
        column = 1 if kind == "QOS" else 0
        queued = sum(job[column] == word for job in live.queued)
        rooms.append((max(0, most - queued), queued, f"{name} allows {most} ({key})"))
    if rooms and size.jobs > min(rooms)[0]:
        room, queued, allowed = min(rooms)
        runs = f" ({size.runs} runs x {size.attempts})" if size.runs > 1 else ""
        yield Finding(
            f"{size.jobs} jobs to queue{runs} and {queued} of yours in the queue, but {allowed}",
            _fewer_jobs_hint(room, size),
        )


def _fewer_jobs_hint(room: int, size: JobSize) -> str:
    """What to write where only so many jobs can be queued."""
    if room < min(size.runs, 2):  # one value is no sweep
        return "wait for one of them to end"
    if count := room // size.runs:
        return f"--attempts {count}, or chain.attempts = {count}"
    return f"sweep {room} values at most, with --attempts 1"


def _job_limits(sources: list[Source], what: str) -> list[tuple[str, str, int]]:
    """The limits of jobs that count, each with its source: the first that sets one, as for resources.

    A QOS's limit of a user or an account takes the place of the association's. Above the user's association only Grp
    limits count, all of them: what a user has of an account's Max limits, sacctmgr prints with the association. Limits
    of a whole account count its other users' jobs too, which only Slurm sees.
    """

    def of(key: str) -> list[tuple[str, str, int]]:
        return [(name, key, int(values[key])) for name, values in sources if values.get(key, "").isdigit()]

    whole = of(f"Grp{what}")
    if whole and whole[0][0].startswith("QOS "):
        del whole[1:]
    own = [*of(f"Max{what}PU")[:1], *of(f"Max{what}PA")[:1]] or of(f"Max{what}")[:1]
    return [*own, *whole]


def reservations(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """What waits: a job that cannot end before a reservation takes its nodes starts after that. No reason to refuse."""
    if live.now is None:
        return
    name, end = partition_name(cluster, live), live.now + timedelta(seconds=seconds(size.time))
    nodes = {node["NodeName"] for node in live.nodes_in(name)}
    ahead = [r for r in live.reservations if r.name not in own_reservations(cluster) and r.nodes & nodes]
    ahead = sorted((r for r in ahead if r.start < end and r.end > live.now), key=lambda r: r.start)
    taken: set[str] = set()
    for kept in ahead:
        taken |= kept.nodes & nodes
        if size.nodes > len(nodes) - len(taken):
            minutes = int((kept.start - live.now).total_seconds()) // 60 - 1
            fits = 60 * minutes >= 2 * cluster.chain.save_s
            kind = " (maintenance)" if "MAINT" in kept.flags else ""
            shorter = f"--time {minutes // 60}:{minutes % 60:02d}:00 ends before it, or " if fits else ""
            yield Finding(
                f"an attempt of {size.time} that started now would end at {end:%m-%d %H:%M}, but reservation "
                f"{kept.name}{kind} has {len(taken)} of the {len(nodes)} nodes of {name} from "
                f"{kept.start:%m-%d %H:%M} to {kept.end:%m-%d %H:%M}: it starts only after that",
                f'{shorter}let it wait; slurm.options = ["--reservation={kept.name}"] if it is yours',
            )
            return


def host_memory(cluster: Cluster, live: LiveCluster, size: JobSize) -> Iterator[Finding]:
    """slurm.mem holds what NeMo's processes take before there is a model."""
    have = mib(cluster.slurm.mem)
    need = round(size.gpus_per_node * PROCESS_GIB * 1024)
    if 0 < have < need:
        yield Finding(
            f"slurm.mem {cluster.slurm.mem} is less than {size.gpus_per_node} ranks take before there is a model: "
            f"{PROCESS_GIB} GiB each, {need}M",
            'write mem = "0", all of the node',
        )


CHECKS = (nodes, partition, accounting, host_memory)
"""Reasons to refuse."""
