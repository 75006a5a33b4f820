"""Refuse before the queue does: every check names the rule, the numbers that broke it, and what to write instead.

Checks are pure functions of a submission and of what the live cluster has answered, so each can be tested alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from superpod.errors import UserError, did_you_mean
from superpod.slurm import images
from superpod.slurm.live_cluster import LiveCluster, gpus_of
from superpod.slurm.profiles import seconds

if TYPE_CHECKING:
    from pathlib import Path

    from superpod.lifecycle.resolve import ResolvedRun
    from superpod.slurm.profiles import Cluster
    from superpod.slurm.submit import Submission

START_S = 300
"""Seconds of an attempt before its first step: containers, imports, building, loading; roughly as on DGX H100s."""

DISK_BYTES_S = 2e9
"""Bytes of a checkpoint that one node writes in a second, a cautious guess; a save takes bytes / (nodes x this)."""


class Finding(NamedTuple):
    """One problem, and the next move."""

    message: str
    hint: str = ""


@dataclass(frozen=True)
class Case:
    """Everything that the checks look at."""

    submission: Submission
    live: LiveCluster
    running: str = ""
    """who is using the run folder; '' = nobody"""

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
        """The time limit of an attempt."""
        return self.submission.time or self.cluster.slurm.time

    @property
    def partition(self) -> str:
        """Where the job would go."""
        return _partition_name(self.cluster, self.live)


def refuse(case: Case) -> None:
    """Refuse a case that has findings.

    Raises:
        UserError: with every finding.
    """
    _refuse(findings(case))


def _refuse(problems: list[Finding]) -> None:
    if problems:
        texts = [f"{p.message}\n    next: {p.hint}" if p.hint else p.message for p in problems]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} on this cluster"
        raise UserError("\n".join([count, *(f"  - {text}" for text in texts)]))


def refuse_unfit(submission: Submission) -> None:
    """Refuse what no live cluster has to be asked for: too many GPUs for a node, a precision or memory that is missing.

    Raises:
        UserError: with every finding.
    """
    case = Case(submission, LiveCluster())
    _refuse([finding for check in (size, generation) for finding in check(case)])


def findings(case: Case) -> list[Finding]:
    """All problems, in the order in which a job would meet them."""
    return [finding for check in CHECKS for finding in check(case)]


def profile_findings(cluster: Cluster, live: LiveCluster) -> list[Finding]:
    """What the live cluster would refuse in a profile: `recipes cluster check`."""
    return [finding for check in PROFILE_CHECKS for finding in check(cluster, live)]


# -- the profile against the live cluster ---------------------------------------------------------------------------


def _partition_name(cluster: Cluster, live: LiveCluster) -> str:
    return cluster.slurm.partition or live.default_partition


def account(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The account is one of this user's."""
    accounts = list(dict.fromkeys(a for a, _, _ in live.associations))
    if not live.associations or ("associations" not in live.enforces and not cluster.slurm.account):
        return
    if not cluster.slurm.account:
        if live.enforces and len(accounts) > 1:
            yield Finding("slurm.account is empty, and Slurm requires one", f"yours: {', '.join(accounts)}")
    elif cluster.slurm.account not in accounts:
        yield Finding(
            f"slurm.account {cluster.slurm.account!r} is not one of yours",
            f"yours: {', '.join(accounts) or 'none at all'}",
        )


def partition(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The partition exists, is up, and accepts this account."""
    name = _partition_name(cluster, live)
    known = live.partitions.get(name)
    if known is None:
        hint = did_you_mean(name, list(live.partitions)) or f"there are {', '.join(live.partitions)}"
        yield Finding(f"slurm.partition {name!r} does not exist", hint)
    elif known.get("State", "UP") != "UP":
        yield Finding(f"partition {name} is {known['State']}", "wait for its administrators, or choose another")
    elif known.get("AllowAccounts", "ALL") != "ALL" and cluster.slurm.account not in known["AllowAccounts"].split(","):
        yield Finding(
            f"partition {name} does not accept account {cluster.slurm.account!r}",
            f"it accepts {known['AllowAccounts']}",
        )


def qos(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The QOS is one of this user's."""
    names = list(dict.fromkeys(name for _, _, names in live.associations for name in names))
    if cluster.slurm.qos and names and cluster.slurm.qos not in names:
        yield Finding(f"slurm.qos {cluster.slurm.qos!r} is not one of yours", f"yours: {', '.join(names)}")


def constraint(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Every feature of the constraint is one that a node of the partition has."""
    name = _partition_name(cluster, live)
    features = {f for n in live.nodes_of(name) for f in n.get("AvailableFeatures", "").split(",")} - {"(null)", ""}
    for word in re.findall(r"[A-Za-z_][\w.-]*", cluster.slurm.constraint):
        if word not in features:
            listed = ", ".join(sorted(features)) or "none at all"
            yield Finding(f"slurm.constraint {word!r} is a feature of no node in {name}", f"features there: {listed}")


def gres(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Nodes have the number and type of GPUs that the profile names, if Slurm counts GPUs."""
    name = _partition_name(cluster, live)
    nodes = live.nodes_of(name)
    if not nodes:
        return
    most = max(gpus_of(node)[0] for node in nodes)
    if cluster.slurm.gpus == "none":
        return
    if most == 0:
        yield Finding(f"Slurm lists no GPUs for any node of {name}", 'write slurm.gpus = "none": jobs get whole nodes')
    elif most < cluster.gpus_per_node:
        yield Finding(
            f"gpus_per_node is {cluster.gpus_per_node}, but the nodes of {name} have {most}",
            f"write gpus_per_node = {most}",
        )
    types = {gpus_of(node)[1] for node in nodes} - {""}
    if cluster.slurm.gpu_type and cluster.slurm.gpu_type not in types:
        yield Finding(
            f"slurm.gpu_type {cluster.slurm.gpu_type!r} is in no node of {name}", f"types: {', '.join(types)}"
        )


def memory(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The memory is no more than a node has."""
    name = _partition_name(cluster, live)
    most = max((int(n.get("RealMemory", 0)) for n in live.nodes_of(name)), default=0)
    match = re.fullmatch(r"(\d+)([KMGT]?)", cluster.slurm.mem)
    requested = int(match[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]] if match else 0
    if most and requested > most:
        yield Finding(f"slurm.mem {cluster.slurm.mem} is more than a node of {name} has: {most}M", 'write mem = "0"')


def limit(cluster: Cluster, live: LiveCluster, time: str = "") -> Iterator[Finding]:
    """The time limit is no longer than the partition allows."""
    name = _partition_name(cluster, live)
    longest = live.partitions.get(name, {}).get("MaxTime", "UNLIMITED")
    limit_text = time or cluster.slurm.time
    if longest not in ("UNLIMITED", "") and seconds(limit_text) > seconds(longest):
        yield Finding(f"an attempt of {limit_text} is longer than {name} allows: {longest}", f"--time {longest}")


def mpi(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The PMI plug-in is one that this Slurm has."""
    if live.mpi and cluster.slurm.mpi not in live.mpi:
        yield Finding(f"slurm.mpi {cluster.slurm.mpi!r} is not in this Slurm", f"it has {', '.join(live.mpi)}")


def pyxis(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """pyxis is installed, if the profile names a container."""
    if cluster.container.image and not live.has_pyxis:
        yield Finding(
            "srun has no --container-image here: pyxis is not installed",
            'write container.image = "", and a virtual environment on a shared disk as software.python',
        )


def image(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The image file can be read; the name of an image in a registry is not looked up."""
    name = cluster.container.image
    if name.startswith("/") and live.paths.get(name, "file") != "file":
        yield Finding(f"container.image {name} is {live.paths[name]}", "enroot import writes it: docs/slurm.md")


def mounts(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """Every mounted path exists."""
    for outside in cluster.container.mounted if cluster.container.image else []:
        if live.paths.get(outside, "folder") not in ("folder", "file"):
            yield Finding(f"container.mounts: {outside} is {live.paths[outside]}", "mount only what every node has")


def python(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The Pythons of the batch script and of the ranks exist, and the former is 3.9 or later."""
    name = cluster.software.host_python
    if not live.python:
        yield Finding(f"software.host_python {name!r} does not exist", "name a Python 3.9 or later")
    elif live.python < 309:
        yield Finding(f"software.host_python {name!r} is {live.python // 100}.{live.python % 100}", "3.9 or later")
    if not live.ranks_python:
        yield Finding(f"the ranks' Python {cluster.software.python!r} does not exist", "see software.python")


def runs_folder(cluster: Cluster, live: LiveCluster) -> Iterator[Finding]:
    """The folder for runs can be written."""
    if live.runs_free is None:
        yield Finding(f"{cluster.folders.runs} cannot be written", "set folders.runs, or --runs, to another folder")


PROFILE_CHECKS = (
    account,
    partition,
    qos,
    constraint,
    gres,
    memory,
    limit,
    mpi,
    pyxis,
    image,
    mounts,
    python,
    runs_folder,
)


# -- the recipe against the cluster ---------------------------------------------------------------------------------


def profile(case: Case) -> Iterator[Finding]:
    """The profile passes its own checks, with this submission's time limit."""
    for check in PROFILE_CHECKS:
        yield from limit(case.cluster, case.live, case.time) if check is limit else check(case.cluster, case.live)


def folder_name(case: Case) -> Iterator[Finding]:
    """sbatch and pyxis can name the folder for runs."""
    for sign, who in (("\\", "sbatch's --output"), (":", "a container mount"), (",", "a container mount")):
        if sign in case.submission.folder and (sign == "\\" or case.cluster.container.image):
            yield Finding(
                f"{case.submission.folder!r} contains {sign!r}, which {who} cannot", "name another folder with --runs"
            )


def size(case: Case) -> Iterator[Finding]:
    """The cluster has the nodes and the GPUs per node."""
    if case.run.gpus_per_node > case.cluster.gpus_per_node:
        yield Finding(
            f"{case.submission.recipe} takes {case.run.gpus_per_node} GPUs a node, but {case.cluster.name} has "
            f"{case.cluster.gpus_per_node}",
            f"a recipe for {case.cluster.gpu}: recipes list {case.cluster.gpu}",
        )
    nodes = case.live.nodes_of(case.partition)
    usable = [n for n in nodes if not re.search(r"DOWN|DRAIN|FAIL|NOT_RESP", n.get("State", ""))]
    if nodes and case.run.nodes > len(nodes):
        yield Finding(f"the run takes {case.run.nodes} nodes, but {case.partition} has {len(nodes)}", "--nodes")
    elif nodes and case.run.nodes > len(usable):
        down = ", ".join(sorted(n["NodeName"] for n in nodes if n not in usable))
        yield Finding(
            f"the run takes {case.run.nodes} nodes, but {len(usable)} of {case.partition} are up; not up: {down}",
            "--nodes, or wait for them",
        )


def versions(case: Case) -> Iterator[Finding]:
    """The image, if its versions are published, holds those that the recipe needs."""
    name = case.cluster.container.image
    if problems := [] if case.cluster.declared_only else images.problems(name, case.run, case.cluster.env):
        hint = "make an image with the pinned versions: docs/slurm.md, The container"
        yield Finding(f"container.image {name}: {'; '.join(problems)}", hint)


def generation(case: Case) -> Iterator[Finding]:
    """The GPU has the precision, and memory for the model."""
    from superpod.planner import hardware, legality, predict

    planned, facts, gpu = case.run.job, hardware.builtin(), case.cluster.gpu
    node = facts.node(gpu)
    if planned.precision not in node.gpu.precisions:
        yield Finding(
            f"{gpu} has no {planned.precision}: it has {', '.join(node.gpu.precisions)}", f"recipes list {gpu}"
        )
        return
    if planned.node.gpu.name == gpu:
        layout = case.run.plan["layouts"][0]
        if layout["verdict"] == "oom":
            yield Finding(
                f"it does not fit the GPU's memory: {layout['reserved_gib']:.1f} GiB on the fullest rank of {gpu}",
                "with=full_recompute, more nodes, or a layout that fits: `recipes plan`",
            )
        return
    there = planned.replace(node=node, fabric=facts.fabric_of(node))
    for violation in legality.violations(there):
        yield Finding(violation.message, violation.fix)
    prediction = predict.one(there)
    if prediction.verdict == "oom":
        yield Finding(f"a recipe for {planned.node.gpu.name} does not fit {gpu}: {prediction.reason}", "recipes plan")


def proof(case: Case) -> Iterator[Finding]:
    """The recipe is not known to end at its start (`recipes prove`)."""
    from superpod.recipes import proof_level
    from superpod.recipes.registry import find

    request = case.run.request
    if broken := proof_level.refusal(find(request.recipe), case.run.nodes, request.overrides):
        yield Finding(*broken)


def interval(case: Case) -> Iterator[Finding]:
    """Every attempt has time for a checkpoint interval and a save."""
    step = case.run.step_time_s
    save_s = case.cluster.chain.save_s
    if step and case.run.save_every and not case.cluster.declared_only:
        need = START_S + case.run.save_every * step + save_s
        if seconds(case.time) < need:
            yield Finding(
                f"an attempt of {case.time} ends before its first checkpoint: start {START_S} s + "
                f"{case.run.save_every} steps x {step:.1f} s + save {save_s} s = {need:.0f} s",
                "a longer --time, or log.ckpt.every_n_train_steps",
            )
    if 2 * save_s > seconds(case.time):
        yield Finding(f"--time {case.time} leaves too little before chain.save_s {save_s}", "a longer --time")
    writing_s = case.run.checkpoint_bytes / (DISK_BYTES_S * case.run.nodes)
    if writing_s > save_s:
        yield Finding(
            f"saving {case.run.checkpoint_bytes / 2**30:,.0f} GiB from {case.run.nodes} nodes may take "
            f"{writing_s:.0f} s, but chain.save_s allows {save_s}",
            f"write chain.save_s = {round(2 * writing_s)}",
        )


def room(case: Case) -> Iterator[Finding]:
    """The disk has room for the checkpoints that are kept and for the one being written."""
    from superpod.launchers.preflight import LOGS_BYTES

    need, free = 4 * case.run.checkpoint_bytes + LOGS_BYTES, case.live.runs_free
    if free is not None and free < need:
        yield Finding(
            f"four checkpoints of {case.run.checkpoint_bytes / 2**30:,.1f} GiB need {need / 2**30:,.1f} GiB, but "
            f"{free / 2**30:,.1f} are free under {case.submission.folder}",
            "make room there, or name another folder with --runs",
        )


def data(case: Case) -> Iterator[Finding]:
    """The data folder exists on the cluster, inside a mount if there is a container."""
    folder = case.submission.run.request.data
    if folder is None:
        return
    if case.live.paths.get(str(folder), "folder") != "folder":
        yield Finding(f"data folder {folder} is {case.live.paths[str(folder)]} on the cluster", "copy it there first")
    if case.cluster.container.image:
        inside = [PurePosixPath(path) for path in case.cluster.container.mounted]
        if not any(PurePosixPath(folder).is_relative_to(m) for m in [*inside, PurePosixPath(case.submission.folder)]):
            yield Finding(f"data folder {folder} is in no mount of the container", "add it to container.mounts")


def cache(case: Case) -> Iterator[Finding]:
    """The cache of tokenizers and weights exists, if the profile names one."""
    name = case.cluster.folders.cache
    if name and case.live.paths.get(name, "folder") != "folder":
        yield Finding(f"folders.cache {name} is {case.live.paths[name]}", "create it, and put the tokenizer into it")


def folder_in_use(case: Case) -> Iterator[Finding]:
    """No other job uses the run folder."""
    if case.running:
        yield Finding(f"the run is in use by {case.running}", "wait for it, or `recipes cancel` it")


CHECKS = (profile, folder_name, size, proof, versions, generation, interval, room, data, cache, folder_in_use)


def paths(cluster: Cluster, data: Path | None = None) -> list[str]:
    """The paths to look for on the cluster: the profile's, and the data folder of a run."""
    names = cluster.container.mounted if cluster.container.image else []
    names += [cluster.container.image] if cluster.container.image.startswith("/") else []
    names += [cluster.folders.cache] if cluster.folders.cache else []
    names += [str(data)] if data else []
    return list(dict.fromkeys(names))
