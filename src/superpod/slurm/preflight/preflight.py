"""Checks a submission before it is queued. Each finding states the rule, the numbers that broke it, and the next step.

Checks are pure functions of a submission and the state of the live cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from superpod.errors import UserError, counted
from superpod.slurm.preflight import images, limits
from superpod.slurm.preflight.limits import JobSize
from superpod.slurm.profiles import other_gpu
from superpod.slurm.profiles.live_cluster import LiveCluster
from superpod.slurm.profiles.profile_checks import PROFILE_CHECKS, Finding, check_sbatch, check_time_limit
from superpod.slurm.profiles.profile_values import seconds
from superpod.slurm.script import batch_script

if TYPE_CHECKING:
    from pathlib import Path

    from superpod.requests.request import Request
    from superpod.requests.resolve import ResolvedRun
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.submit import Submission

START_S = 300
"""Estimated seconds before the first step of an attempt on DGX H100: container, imports, model build, checkpoint."""

DISK_BYTES_S = 2e9
"""Conservative estimate of the write bandwidth per node in bytes/s."""


@dataclass(frozen=True)
class Claim:
    """The requirements of a submission that are known before NeMo builds the recipe."""

    cluster: Cluster
    live: LiveCluster
    size: JobSize
    folder: str
    """folder for runs"""
    data: Path | None = None
    """data folder; None = mock data"""


@dataclass(frozen=True)
class Case:
    """A submission and the state of the cluster to check it against."""

    submission: Submission
    live: LiveCluster
    attempts: int = 0
    """number of jobs to queue; 0 = chain.attempts of the profile"""

    @property
    def run(self) -> ResolvedRun:
        """The resolved run."""
        return self.submission.run

    @property
    def cluster(self) -> Cluster:
        """The profile of the cluster."""
        return self.submission.cluster

    @property
    def time(self) -> str:
        """The time limit per attempt."""
        return self.submission.time or self.cluster.slurm.time

    @property
    def claim(self) -> Claim:
        """The requirements of the submission that are known without NeMo."""
        run, attempts = self.run, self.attempts or self.cluster.chain.attempts
        size = JobSize(run.nodes, run.gpus_per_node, self.time, attempts)
        return Claim(self.cluster, self.live, size, self.submission.folder, run.request.data)


def refuse(problems: Sequence[Finding]) -> None:
    """Raise UserError with the messages and hints of all findings, if there are any."""
    if not problems:
        return
    lines = [f"{counted(len(problems), 'problem')} on this cluster"]
    for problem in problems:
        lines.append(f"  - {problem.message}")
        if problem.hint:
            lines.append(f"    next: {problem.hint}")
    raise UserError("\n".join(lines))


def job_size(request: Request, cluster: Cluster, *, time: str = "", attempts: int = 0, members: int = 1) -> JobSize:
    """Return the size of the submission of a request, without NeMo.

    Args:
        request: the request.
        cluster: profile of the cluster.
        time: time limit per attempt; "" = that of the profile.
        attempts: number of jobs per run; 0 = that of the profile.
        members: number of runs in a sweep.
    """
    from superpod.collection import registry

    recipe = registry.find(request.recipe)
    nodes = request.num_nodes or recipe.nodes[0]
    return JobSize(nodes, recipe.gpus_per_node, time or cluster.slurm.time, attempts or cluster.chain.attempts, members)


def claim_findings(claim: Claim) -> list[Finding]:
    """Return the requirements that the live cluster does not meet, for the partition with the fewest findings."""
    claims = [replace(claim, cluster=one) for one in split_by_partition(claim.cluster)]
    findings = min(([finding for check in CLAIM_CHECKS for finding in check(one)] for one in claims), key=len)
    return findings or list(check_sbatch(claim.cluster, claim.live))


def split_by_partition(cluster: Cluster) -> list[Cluster]:
    """Return a copy of the profile for each of its partitions; Slurm starts the job in the first that can run it."""
    names = cluster.slurm.partition.split(",")
    return [
        cluster.model_copy(update={"slurm": cluster.slurm.model_copy(update={"partition": name})}) for name in names
    ]


def notes(claim: Claim) -> list[Finding]:
    """Return notes on reservations that delay the job, such as maintenance; they are not a reason to refuse it."""
    waits = (limits.reservations(one, claim.live, claim.size) for one in split_by_partition(claim.cluster))
    return min(map(list, waits), key=len)


def refuse_unfit(submission: Submission) -> None:
    """Raise UserError with the findings of the checks that need no live cluster.

    These are the number of GPUs per node, the precision, the GPU memory and the host memory.
    """
    case = Case(submission, LiveCluster())
    host_memory = limits.check_host_memory(case.cluster, case.live, case.claim.size)
    refuse([*check_gpus_per_node(case), *check_gpu_support(case), *host_memory])


def findings(case: Case) -> list[Finding]:
    """Return the findings of all checks, in the order in which a job would encounter the problems."""
    return [*claim_findings(case.claim), *(finding for check in CHECKS for finding in check(case))]


def profile_findings(cluster: Cluster, live: LiveCluster) -> list[Finding]:
    """Return the problems of a profile on the live cluster for a job with one node, for `recipes cluster check`."""
    node = JobSize(1, cluster.gpus_per_node, cluster.slurm.time, attempts=1)
    problems = [
        [
            *(finding for check in PROFILE_CHECKS for finding in check(one, live)),
            *limits.check_accounting(one, live, node),
            *limits.check_host_memory(one, live, node),
        ]
        for one in split_by_partition(cluster)
    ]
    return min(problems, key=len) or list(check_sbatch(cluster, live))


def check_profile(claim: Claim) -> Iterator[Finding]:
    """Yield the findings of all checks of the profile, with the time limit of this submission."""
    for check in PROFILE_CHECKS:
        if check is check_time_limit:
            yield from check_time_limit(claim.cluster, claim.live, claim.size.time)
        else:
            yield from check(claim.cluster, claim.live)


def check_site_limits(claim: Claim) -> Iterator[Finding]:
    """Yield a finding for each limit of the partition, QOS or account that the size exceeds."""
    for check in limits.CHECKS:
        yield from check(claim.cluster, claim.live, claim.size)


def check_folder_name(claim: Claim) -> Iterator[Finding]:
    """Yield the findings of `folder_findings` for the folder for runs."""
    yield from folder_findings(claim.cluster, claim.folder)


def folder_findings(cluster: Cluster, folder: str) -> Iterator[Finding]:
    """Yield a finding for each character in the path of a folder for runs that sbatch or pyxis does not support."""
    hint = "specify another folder with --runs"
    if "\\" in folder:
        yield Finding(f"{folder!r} contains '\\', which sbatch's --output does not support", hint)
    problem = batch_script.mount_problem(folder)
    if cluster.container.image and problem:
        yield Finding(problem, hint)


def check_gpus_per_node(case: Case) -> Iterator[Finding]:
    """Yield a finding if the run needs more GPUs per node than the cluster has."""
    if case.run.gpus_per_node > case.cluster.gpus_per_node:
        yield Finding(
            f"{case.submission.recipe} needs {case.run.gpus_per_node} GPUs per node, but {case.cluster.name} has "
            f"{case.cluster.gpus_per_node}",
            f"`recipes list {case.cluster.gpu}` lists the recipes for {case.cluster.gpu}",
        )


def check_versions(case: Case) -> Iterator[Finding]:
    """Yield a finding if package versions in the image, as far as they are published, do not support the recipe."""
    if case.cluster.declared_only:
        return
    name = case.cluster.container.image
    problems = images.problems(name, case.run, case.cluster.env)
    if problems:
        hint = "build an image with the pinned versions (docs/slurm.md, The container)"
        yield Finding(f"container.image {name}: {'; '.join(problems)}", hint)


def check_gpu_support(case: Case) -> Iterator[Finding]:
    """Yield findings if the GPU of the cluster does not support the precision, or has too little memory."""
    planned, gpu = case.run.job, case.cluster.gpu
    if planned.node.gpu.name != gpu or planned.precision not in planned.node.gpu.precisions:
        yield from other_gpu.job_findings(case.submission.recipe, planned, gpu)
        return
    layout = case.run.plan["layouts"][0]
    if layout["verdict"] == "oom":
        yield Finding(
            f"the run exceeds the memory of {gpu}: {layout['reserved_gib']:.1f} GiB on the rank with the most memory",
            f"try --layout auto, which selects a layout that fits if there is one; or {other_gpu.memory_hint(planned)}",
        )


def check_known_failures(case: Case) -> Iterator[Finding]:
    """Yield a finding if `recipes prove` has recorded that the recipe cannot start."""
    from superpod.collection.facts import proof_level
    from superpod.collection.registry import find

    request = case.run.request
    refusal = proof_level.explain_refusal(find(request.recipe), case.run.nodes, request.changes())
    if refusal:
        yield Finding(*refusal)


def check_checkpoint_interval(case: Case) -> Iterator[Finding]:
    """Yield findings if the time limit is too short for a checkpoint interval, or chain.save_s for a checkpoint."""
    step = case.submission.step_time_s
    save_s = case.cluster.chain.save_s
    if step and case.run.save_every and not case.cluster.declared_only:
        need = START_S + case.run.save_every * step + save_s
        if seconds(case.time) < need:
            yield Finding(
                f"an attempt of {case.time} ends before its first checkpoint: startup {START_S} s + "
                f"{case.run.save_every} steps x {step:.1f} s + save {save_s} s = {need:.0f} s",
                "increase --time, or reduce log.ckpt.every_n_train_steps",
            )
    if 2 * save_s > seconds(case.time):
        yield Finding(f"--time {case.time} must be at least 2 x chain.save_s ({save_s} s)", "increase --time")
    writing_s = case.run.checkpoint_bytes / (DISK_BYTES_S * case.run.nodes)
    if writing_s > save_s:
        yield Finding(
            f"saving {case.run.checkpoint_bytes / 2**30:,.0f} GiB from {case.run.nodes} nodes may take "
            f"{writing_s:.0f} s, but chain.save_s allows {save_s} s",
            f"set chain.save_s = {round(2 * writing_s)}",
        )


def check_disk_space(case: Case) -> Iterator[Finding]:
    """Yield a finding if the free disk space is too small for four checkpoints: those kept and the one in progress."""
    from superpod.launch.preflight import LOGS_BYTES

    need, free = 4 * case.run.checkpoint_bytes + LOGS_BYTES, case.live.runs_free
    if free is not None and free < need:
        yield Finding(
            f"four checkpoints of {case.run.checkpoint_bytes / 2**30:,.1f} GiB need {need / 2**30:,.1f} GiB, but only "
            f"{free / 2**30:,.1f} GiB are free in {case.submission.folder}",
            "free some space there, or specify another folder with --runs",
        )


def check_data(claim: Claim) -> Iterator[Finding]:
    """Yield findings if the data folder does not exist on the cluster, or is not mounted into the container."""
    folder, live = claim.data, claim.live
    if folder is None:
        return
    if live.paths.get(str(folder), "folder") != "folder":
        yield Finding(f"data folder {folder} is {live.paths[str(folder)]} on the cluster", "copy it there first")
    if claim.cluster.container.image:
        mounted_paths = [PurePosixPath(path) for path in (*claim.cluster.container.mounted, claim.folder)]
        if not any(PurePosixPath(folder).is_relative_to(path) for path in mounted_paths):
            yield Finding(f"data folder {folder} is not mounted into the container", "add it to container.mounts")


CLAIM_CHECKS = (check_profile, check_site_limits, check_folder_name, check_data)
CHECKS = (
    check_gpus_per_node,
    check_known_failures,
    check_versions,
    check_gpu_support,
    check_checkpoint_interval,
    check_disk_space,
)


def paths_to_check(cluster: Cluster, data: Path | None = None) -> list[str]:
    """Return the paths to look up on the cluster, without duplicates: those of the profile, and a data folder."""
    names: list[str] = []
    if cluster.container.image:
        names += cluster.container.mounted
    if cluster.container.image.startswith("/"):
        names.append(cluster.container.image)
    names += [path for path in (cluster.folders.cache, cluster.folders.data) if path]
    if data:
        names.append(str(data))
    return list(dict.fromkeys(names))
