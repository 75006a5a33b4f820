"""Refuse before the queue does: every check names the rule, the numbers that broke it, and what to write instead.

Checks are pure functions of a submission and of what the live cluster has answered, so each can be tested alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.slurm import batch_script, images, limits, other_gpu
from superpod.slurm.limits import JobSize
from superpod.slurm.live_cluster import LiveCluster
from superpod.slurm.profile_checks import PROFILE_CHECKS, Finding, limit, refused
from superpod.slurm.profiles import seconds

if TYPE_CHECKING:
    from pathlib import Path

    from superpod.lifecycle.request import Request
    from superpod.lifecycle.resolve import ResolvedRun
    from superpod.slurm.profiles import Cluster
    from superpod.slurm.submit import Submission

START_S = 300
"""Seconds of an attempt before its first step: containers, imports, building, loading; roughly as on DGX H100s."""

DISK_BYTES_S = 2e9
"""Bytes of a checkpoint that one node writes in a second, a cautious guess; a save takes bytes / (nodes x this)."""


@dataclass(frozen=True)
class Claim:
    """What a submission claims of its cluster: all that is known before NeMo builds the recipe."""

    cluster: Cluster
    live: LiveCluster
    size: JobSize
    folder: str
    """the folder for runs"""
    data: Path | None = None


@dataclass(frozen=True)
class Case:
    """Everything that the checks look at."""

    submission: Submission
    live: LiveCluster
    running: str = ""
    """who is using the run folder; '' = nobody"""
    attempts: int = 0
    """jobs to queue at once; 0 = the profile's"""

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
    def claim(self) -> Claim:
        """What it claims of the cluster."""
        run, attempts = self.run, self.attempts or self.cluster.chain.attempts
        size = JobSize(run.nodes, run.gpus_per_node, self.time, attempts)
        return Claim(self.cluster, self.live, size, self.submission.folder, run.request.data)


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


def refuse_other_gpu(request: Request, cluster: Cluster) -> None:
    """Refuse, before NeMo is imported, a recipe for another GPU whose plan does not work on the cluster's.

    Raises:
        UserError: with every finding.
    """
    _refuse(other_gpu.of_request(request, cluster.gpu))


def job_size(request: Request, cluster: Cluster, *, time: str = "", attempts: int = 0, members: int = 1) -> JobSize:
    """What a request takes, at its recipe's size; NeMo is not imported. `members` are a sweep's runs."""
    from superpod.recipes import registry

    recipe = registry.find(request.recipe)
    nodes = request.num_nodes or recipe.nodes[0]
    return JobSize(nodes, recipe.gpus_per_node, time or cluster.slurm.time, attempts or cluster.chain.attempts, members)


def claim(request: Request, cluster: Cluster, live: LiveCluster, size: JobSize, runs: str = "") -> Claim:
    """What a request of this size claims of a cluster."""
    return Claim(cluster, live, size, runs or cluster.folders.runs, request.data)


def refuse_claim(claim: Claim) -> None:
    """Refuse what the live cluster cannot give, before NeMo is imported.

    Raises:
        UserError: with every finding.
    """
    _refuse(claim_findings(claim))


def claim_findings(claim: Claim) -> list[Finding]:
    """What the live cluster cannot give."""
    claims = [replace(claim, cluster=one) for one in by_partition(claim.cluster)]
    findings = min(([finding for check in CLAIM_CHECKS for finding in check(one)] for one in claims), key=len)
    return findings or list(refused(claim.cluster, claim.live))


def by_partition(cluster: Cluster) -> list[Cluster]:
    """The profile with one of its partitions at a time: of several, Slurm takes the one that can start the job."""
    names = cluster.slurm.partition.split(",")
    return [
        cluster.model_copy(update={"slurm": cluster.slurm.model_copy(update={"partition": name})}) for name in names
    ]


def notes(claim: Claim) -> list[Finding]:
    """What makes a job wait, and is no reason to refuse it: reservations, such as for maintenance."""
    waits = (limits.reservations(one, claim.live, claim.size) for one in by_partition(claim.cluster))
    return min(map(list, waits), key=len)


def refuse_unfit(submission: Submission) -> None:
    """Refuse what no live cluster has to be asked for: too many GPUs for a node, a precision or memory that is missing,
    host memory that its processes alone exceed.

    Raises:
        UserError: with every finding.
    """
    case = Case(submission, LiveCluster())
    host_memory = limits.host_memory(case.cluster, case.live, case.claim.size)
    _refuse([*size(case), *generation(case), *host_memory])


def findings(case: Case) -> list[Finding]:
    """All problems, in the order in which a job would meet them."""
    return [*claim_findings(case.claim), *(finding for check in CHECKS for finding in check(case))]


def profile_findings(cluster: Cluster, live: LiveCluster) -> list[Finding]:
    """What the live cluster would refuse in a profile: `recipes cluster check`."""
    node = JobSize(1, cluster.gpus_per_node, cluster.slurm.time, attempts=1)
    problems = [
        # one whole node; a submission is judged by its own size
        [
            *(finding for check in PROFILE_CHECKS for finding in check(one, live)),
            *limits.accounting(one, live, node),
            *limits.host_memory(one, live, node),
        ]
        for one in by_partition(cluster)
    ]
    return min(problems, key=len) or list(refused(cluster, live))


def profile(claim: Claim) -> Iterator[Finding]:
    """The profile passes its own checks, with this submission's time limit."""
    for check in PROFILE_CHECKS:
        if check is limit:
            yield from limit(claim.cluster, claim.live, claim.size.time)
        else:
            yield from check(claim.cluster, claim.live)


def site_limits(claim: Claim) -> Iterator[Finding]:
    """Partition, QOS and account allow a job of this size."""
    for check in limits.CHECKS:
        yield from check(claim.cluster, claim.live, claim.size)


def folder_name(claim: Claim) -> Iterator[Finding]:
    """sbatch and pyxis can name the folder for runs."""
    yield from _unnameable(claim.cluster, claim.folder)


def _unnameable(cluster: Cluster, folder: str) -> Iterator[Finding]:
    hint = "name another folder with --runs"
    if "\\" in folder:
        yield Finding(f"{folder!r} contains '\\', which sbatch's --output cannot", hint)
    if cluster.container.image and (problem := batch_script.unmountable(folder)):
        yield Finding(problem, hint)


def refuse_folder(cluster: Cluster, folder: str) -> None:
    """Refuse, before NeMo is imported, a folder for runs that sbatch or pyxis cannot name.

    Raises:
        UserError: with every finding.
    """
    _refuse(list(_unnameable(cluster, folder)))


def size(case: Case) -> Iterator[Finding]:
    """The nodes have the GPUs."""
    if case.run.gpus_per_node > case.cluster.gpus_per_node:
        yield Finding(
            f"{case.submission.recipe} takes {case.run.gpus_per_node} GPUs a node, but {case.cluster.name} has "
            f"{case.cluster.gpus_per_node}",
            f"a recipe for {case.cluster.gpu}: recipes list {case.cluster.gpu}",
        )


def versions(case: Case) -> Iterator[Finding]:
    """The image, if its versions are published, holds those that the recipe needs."""
    name = case.cluster.container.image
    if problems := [] if case.cluster.declared_only else images.problems(name, case.run, case.cluster.env):
        hint = "make an image with the pinned versions: docs/slurm.md, The container"
        yield Finding(f"container.image {name}: {'; '.join(problems)}", hint)


def generation(case: Case) -> Iterator[Finding]:
    """The GPU has the precision, and memory for the model."""
    planned, gpu = case.run.job, case.cluster.gpu
    if planned.node.gpu.name != gpu or planned.precision not in planned.node.gpu.precisions:
        yield from other_gpu.of_job(case.submission.recipe, planned, gpu)
    elif (layout := case.run.plan["layouts"][0])["verdict"] == "oom":
        yield Finding(
            f"it does not fit the GPU's memory: {layout['reserved_gib']:.1f} GiB on the fullest rank of {gpu}",
            f"a layout that fits: --layout auto, where there is one; else {other_gpu.more_memory(planned)}",
        )


def proof(case: Case) -> Iterator[Finding]:
    """The recipe is not known to end at its start (`recipes prove`)."""
    from superpod.recipes.facts import proof_level
    from superpod.recipes.registry import find

    request = case.run.request
    if broken := proof_level.refusal(find(request.recipe), case.run.nodes, request.changes()):
        yield Finding(*broken)


def interval(case: Case) -> Iterator[Finding]:
    """Every attempt has time for a checkpoint interval and a save."""
    step = case.submission.step_time_s
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


def data(claim: Claim) -> Iterator[Finding]:
    """The data folder exists on the cluster, inside a mount if there is a container."""
    folder, live = claim.data, claim.live
    if folder is None:
        return
    if live.paths.get(str(folder), "folder") != "folder":
        yield Finding(f"data folder {folder} is {live.paths[str(folder)]} on the cluster", "copy it there first")
    if claim.cluster.container.image:
        inside = [PurePosixPath(path) for path in claim.cluster.container.mounted]
        if not any(PurePosixPath(folder).is_relative_to(m) for m in [*inside, PurePosixPath(claim.folder)]):
            yield Finding(f"data folder {folder} is in no mount of the container", "add it to container.mounts")


def folder_in_use(case: Case) -> Iterator[Finding]:
    """No other job uses the run folder."""
    if case.running:
        yield Finding(f"the run is in use by {case.running}", "wait for it, or `recipes cancel` it")


CLAIM_CHECKS = (profile, site_limits, folder_name, data)
CHECKS = (size, proof, versions, generation, interval, room, folder_in_use)


def paths(cluster: Cluster, data: Path | None = None) -> list[str]:
    """The paths to look for on the cluster: the profile's, and the data folder of a run."""
    names = [*cluster.container.mounted] if cluster.container.image else []
    names += [cluster.container.image] if cluster.container.image.startswith("/") else []
    names += [path for path in (cluster.folders.cache, cluster.folders.data) if path]
    names += [str(data)] if data else []
    return list(dict.fromkeys(names))
