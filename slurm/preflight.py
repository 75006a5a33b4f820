"""Refuse before the queue does: each check says the rule, the numbers that broke it, and what to write instead.

Checks are functions of what is wanted and of what the site has answered, so that every one can be tried by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from superpod.errors import UserError, did_you_mean
from superpod.slurm.live_cluster import LiveCluster, gpus_of
from superpod.slurm.profiles import seconds

if TYPE_CHECKING:
    from pathlib import Path

    from superpod.lifecycle.resolve import ResolvedRun
    from superpod.slurm.profiles import Cluster
    from superpod.slurm.submit import Submission

START_S = 300
"""What an attempt takes before its first step: containers, imports, building, loading; roughly as on DGX H100s."""

DISK_BYTES_S = 2e9
"""What one node writes of a checkpoint in a second, cautiously; a save takes its bytes over nodes x this."""


class Finding(NamedTuple):
    """One thing that would go wrong, and the next move."""

    message: str
    hint: str = ""


@dataclass(frozen=True)
class Case:
    """Everything that the checks look at."""

    submission: Submission
    site: LiveCluster
    running: str = ""
    """who uses the run folder right now; '' = nobody"""

    @property
    def run(self) -> ResolvedRun:
        """What would run."""
        return self.submission.run

    @property
    def cluster(self) -> Cluster:
        """The profile."""
        return self.submission.cluster

    @property
    def time(self) -> str:
        """The limit of an attempt."""
        return self.submission.time or self.cluster.slurm.time

    @property
    def partition(self) -> str:
        """Where the job would go."""
        return self.cluster.slurm.partition or self.site.default_partition


def refuse(case: Case) -> None:
    """Raises UserError with every finding, when there is any."""
    found = findings(case)
    if found:
        words = [f"{f.message}\n    next: {f.hint}" if f.hint else f.message for f in found]
        raise UserError("\n".join([f"{len(found)} thing(s) would go wrong", *(f"  - {w}" for w in words)]))


def findings(case: Case) -> list[Finding]:
    """Everything that would go wrong, in the order in which it would."""
    return [finding for check in CHECKS for finding in check(case)]


def of_site(cluster: Cluster, site: LiveCluster) -> list[Finding]:
    """What a profile says that the live cluster would refuse: `recipes cluster check`."""
    return [finding for check in SITE_CHECKS for finding in check(cluster, site)]


# -- the profile against the live cluster ---------------------------------------------------------------------------


def account(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """An account that this user has."""
    mine = list(dict.fromkeys(a for a, _, _ in site.associations))
    if not site.associations or ("associations" not in site.enforces and not cluster.slurm.account):
        return
    if not cluster.slurm.account:
        if site.enforces and len(mine) > 1:
            yield Finding("slurm.account is empty, and Slurm asks for one", f"yours: {', '.join(mine)}")
    elif cluster.slurm.account not in mine:
        yield Finding(
            f"slurm.account {cluster.slurm.account!r} is none of yours", f"yours: {', '.join(mine) or 'none at all'}"
        )


def partition(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """A partition that exists, is up, and takes this account."""
    name = cluster.slurm.partition or site.default_partition
    known = site.partitions.get(name)
    if known is None:
        hint = did_you_mean(name, list(site.partitions)) or f"there are {', '.join(site.partitions)}"
        yield Finding(f"slurm.partition {name!r} does not exist", hint)
    elif known.get("State", "UP") != "UP":
        yield Finding(f"partition {name} is {known['State']}", "wait for its administrators, or take another")
    elif known.get("AllowAccounts", "ALL") != "ALL" and cluster.slurm.account not in known["AllowAccounts"].split(","):
        yield Finding(
            f"partition {name} does not take account {cluster.slurm.account!r}", f"it takes {known['AllowAccounts']}"
        )


def qos(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """A QOS that this user has."""
    mine = list(dict.fromkeys(q for a, _, qs in site.associations for q in qs))
    if cluster.slurm.qos and mine and cluster.slurm.qos not in mine:
        yield Finding(f"slurm.qos {cluster.slurm.qos!r} is none of yours", f"yours: {', '.join(mine)}")


def constraint(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """Features that some node of the partition has."""
    name = cluster.slurm.partition or site.default_partition
    features = {f for n in site.nodes_of(name) for f in n.get("AvailableFeatures", "").split(",")} - {"(null)", ""}
    for word in re.findall(r"[A-Za-z_][\w.-]*", cluster.slurm.constraint):
        if word not in features:
            said = ", ".join(sorted(features)) or "none at all"
            yield Finding(f"slurm.constraint {word!r} is a feature of no node in {name}", f"features there: {said}")


def gres(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """GPUs in the number and of the type that the profile says, where Slurm knows them."""
    name = cluster.slurm.partition or site.default_partition
    nodes = site.nodes_of(name)
    if not nodes:
        return
    most = max(gpus_of(node)[0] for node in nodes)
    if cluster.slurm.gpus == "none":
        return
    if most == 0:
        yield Finding(
            f"no node of {name} has GPUs in Slurm's books", 'write slurm.gpus = "none": nodes are given whole'
        )
    elif most < cluster.gpus_per_node:
        yield Finding(
            f"gpus_per_node is {cluster.gpus_per_node}, and the nodes of {name} have {most}",
            f"write gpus_per_node = {most}",
        )
    types = {gpus_of(node)[1] for node in nodes} - {""}
    if cluster.slurm.gpu_type and cluster.slurm.gpu_type not in types:
        yield Finding(
            f"slurm.gpu_type {cluster.slurm.gpu_type!r} is in no node of {name}", f"types: {', '.join(types)}"
        )


def memory(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """No more memory than a node has."""
    name = cluster.slurm.partition or site.default_partition
    most = max((int(n.get("RealMemory", 0)) for n in site.nodes_of(name)), default=0)
    match = re.fullmatch(r"(\d+)([KMGT]?)", cluster.slurm.mem)
    asked = int(match[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]] if match else 0
    if most and asked > most:
        yield Finding(f"slurm.mem {cluster.slurm.mem} is more than a node of {name} has: {most}M", 'write mem = "0"')


def limit(cluster: Cluster, site: LiveCluster, time: str = "") -> Iterator[Finding]:
    """No longer than the partition allows."""
    name = cluster.slurm.partition or site.default_partition
    longest = site.partitions.get(name, {}).get("MaxTime", "UNLIMITED")
    asked = time or cluster.slurm.time
    if longest not in ("UNLIMITED", "") and seconds(asked) > seconds(longest):
        yield Finding(f"an attempt of {asked} is longer than {name} allows: {longest}", f"--time {longest}")


def mpi(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """A PMI plug-in that this Slurm has."""
    if site.mpi and cluster.slurm.mpi not in site.mpi:
        yield Finding(f"slurm.mpi {cluster.slurm.mpi!r} is not in this Slurm", f"it has {', '.join(site.mpi)}")


def pyxis(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """pyxis, where a container is asked for."""
    if cluster.container.image and not site.has_pyxis:
        yield Finding(
            "srun has no --container-image here: pyxis is not installed",
            'write container.image = "", and a virtual environment on a shared disk as software.python',
        )


def image(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """An image file that can be read; a registry's name is not looked up."""
    name = cluster.container.image
    if name.startswith("/") and site.paths.get(name, "file") != "file":
        yield Finding(f"container.image {name} is {site.paths[name]}", "enroot import writes it: docs/slurm.md")


def mounts(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """Mounts of what is there."""
    for outside in cluster.container.mounted if cluster.container.image else []:
        if site.paths.get(outside, "folder") not in ("folder", "file"):
            yield Finding(f"container.mounts: {outside} is {site.paths[outside]}", "mount what every node has")


def python(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """A Python for the batch script, and one for the ranks."""
    name = cluster.software.host_python
    if not site.python:
        yield Finding(f"software.host_python {name!r} is not there", "name a Python 3.9 or later")
    elif site.python < 309:
        yield Finding(f"software.host_python {name!r} is {site.python // 100}.{site.python % 100}", "3.9 or later")
    if not site.ranks_python:
        yield Finding(f"the ranks' Python {cluster.software.python!r} is not there", "see software.python")


def runs_folder(cluster: Cluster, site: LiveCluster) -> Iterator[Finding]:
    """A folder for runs that can be written."""
    if site.runs_free is None:
        yield Finding(f"{cluster.folders.runs} cannot be written", "name another as folders.runs, or with --runs")


SITE_CHECKS = (account, partition, qos, constraint, gres, memory, limit, mpi, pyxis, image, mounts, python, runs_folder)


# -- the recipe against the cluster ---------------------------------------------------------------------------------


def profile(case: Case) -> Iterator[Finding]:
    """The profile's own mistakes, with this submission's limit and folder."""
    for check in SITE_CHECKS:
        yield from limit(case.cluster, case.site, case.time) if check is limit else check(case.cluster, case.site)


def folder_name(case: Case) -> Iterator[Finding]:
    """A folder that sbatch and pyxis can name."""
    for sign, who in (("\\", "sbatch's --output"), (":", "a container mount"), (",", "a container mount")):
        if sign in case.submission.folder and (sign == "\\" or case.cluster.container.image):
            yield Finding(
                f"{case.submission.folder!r} holds {sign!r}, which {who} cannot", "name another folder with --runs"
            )


def size(case: Case) -> Iterator[Finding]:
    """Nodes and GPUs that there are."""
    if case.run.gpus_per_node > case.cluster.gpus_per_node:
        yield Finding(
            f"{case.submission.recipe} takes {case.run.gpus_per_node} GPUs a node, and {case.cluster.name} has "
            f"{case.cluster.gpus_per_node}",
            f"a recipe for {case.cluster.gpu}: recipes list {case.cluster.gpu}",
        )
    nodes = case.site.nodes_of(case.partition)
    usable = [n for n in nodes if not re.search(r"DOWN|DRAIN|FAIL|NOT_RESP", n.get("State", ""))]
    if nodes and case.run.nodes > len(nodes):
        yield Finding(f"{case.run.nodes} nodes are asked for, and {case.partition} has {len(nodes)}", "--nodes")
    elif nodes and case.run.nodes > len(usable):
        down = ", ".join(sorted(n["NodeName"] for n in nodes if n not in usable))
        yield Finding(
            f"{case.run.nodes} nodes are asked for, and {len(usable)} of {case.partition} are up; not up: {down}",
            "--nodes, or wait for them",
        )


def generation(case: Case) -> Iterator[Finding]:
    """A precision that this GPU has, and memory for the model."""
    from superpod.planner import hardware, legality, predict

    planned, facts, gpu = case.run.job, hardware.builtin(), case.cluster.gpu
    node = facts.node(gpu)
    if planned.precision not in node.gpu.precisions:
        yield Finding(
            f"{planned.precision} is in no {gpu}: it has {', '.join(node.gpu.precisions)}", f"recipes list {gpu}"
        )
        return
    if planned.node.gpu.name == gpu:
        layout = case.run.plan["layouts"][0]
        if layout["verdict"] == "oom":
            yield Finding(f"it does not fit the GPU's memory: {layout['reserved_gib']:.1f} GiB", "recipes plan")
        return
    there = planned.replace(node=node, fabric=facts.fabric_of(node))
    for violation in legality.violations(there):
        yield Finding(violation.message, violation.fix)
    prediction = predict.one(there)
    if prediction.verdict == "oom":
        yield Finding(f"a recipe for {planned.node.gpu.name} does not fit {gpu}: {prediction.reason}", "recipes plan")


def interval(case: Case) -> Iterator[Finding]:
    """Time for a checkpoint interval and a save in every attempt."""
    step = case.run.step_time_s
    save_s = case.cluster.chain.save_s
    if step and case.run.save_every and not case.cluster.declared_only:
        need = START_S + case.run.save_every * step + save_s
        if seconds(case.time) < need:
            yield Finding(
                f"an attempt of {case.time} is over before a checkpoint: start {START_S} s + "
                f"{case.run.save_every} steps x {step:.1f} s + save {save_s} s = {need:.0f} s",
                "a longer --time, or log.ckpt.every_n_train_steps",
            )
    if 2 * save_s > seconds(case.time):
        yield Finding(f"--time {case.time} leaves too little before chain.save_s {save_s}", "a longer --time")
    takes = case.run.checkpoint_bytes / (DISK_BYTES_S * case.run.nodes)
    if takes > save_s:
        yield Finding(
            f"saving {case.run.checkpoint_bytes / 2**30:,.0f} GiB from {case.run.nodes} nodes may take {takes:.0f} s, "
            f"and chain.save_s gives it {save_s}",
            f"write chain.save_s = {round(2 * takes)}",
        )


def room(case: Case) -> Iterator[Finding]:
    """Disk space for the checkpoints that are kept, and the one in the making."""
    from superpod.launchers.preflight import LOGS_BYTES

    need, free = 4 * case.run.checkpoint_bytes + LOGS_BYTES, case.site.runs_free
    if free is not None and free < need:
        yield Finding(
            f"four checkpoints of {case.run.checkpoint_bytes / 2**30:,.1f} GiB need {need / 2**30:,.1f} GiB, and "
            f"{free / 2**30:,.1f} are free under {case.submission.folder}",
            "make room there, or name another folder with --runs",
        )


def data(case: Case) -> Iterator[Finding]:
    """Data and tokenizer where the nodes look for them, and inside the mounts of a container."""
    folder = case.submission.run.request.data
    if folder is None:
        return
    if case.site.paths.get(str(folder), "folder") != "folder":
        yield Finding(f"data folder {folder} is {case.site.paths[str(folder)]} on the cluster", "copy it there first")
    if case.cluster.container.image:
        inside = [PurePosixPath(path) for path in case.cluster.container.mounted]
        if not any(PurePosixPath(folder).is_relative_to(m) for m in [*inside, PurePosixPath(case.submission.folder)]):
            yield Finding(f"data folder {folder} is in no mount of the container", "add it to container.mounts")


def cache(case: Case) -> Iterator[Finding]:
    """The folder of tokenizers and weights, where the profile names one."""
    name = case.cluster.folders.cache
    if name and case.site.paths.get(name, "folder") != "folder":
        yield Finding(f"folders.cache {name} is {case.site.paths[name]}", "make it, and fetch the tokenizer into it")


def alone(case: Case) -> Iterator[Finding]:
    """A run folder that no other job uses."""
    if case.running:
        yield Finding(f"the run is in use by {case.running}", "wait for it, or `recipes cancel` it")


CHECKS = (profile, folder_name, size, generation, interval, room, data, cache, alone)


def paths(cluster: Cluster, data: Path | None = None) -> list[str]:
    """What is looked for on the cluster: of its profile, and the data folder of a run."""
    names = cluster.container.mounted if cluster.container.image else []
    names += [cluster.container.image] if cluster.container.image.startswith("/") else []
    names += [cluster.folders.cache] if cluster.folders.cache else []
    names += [str(data)] if data else []
    return list(dict.fromkeys(names))
