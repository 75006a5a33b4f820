"""Check a submission before it is queued. Each finding states the rule, the numbers that broke it, and what to change.

Checks are pure functions of a submission and the answers of the live cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
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
"""Conservative estimate of the write bandwidth per node, bytes/s; a save takes bytes / (nodes x this) seconds."""


@dataclass(frozen=True)
class Claim:
    """The requirements of a submission that are known before NeMo builds the recipe."""

    cluster: Cluster
    live: LiveCluster
    size: JobSize
    folder: str
    """folder for runs"""
    data: Path | None = None


@dataclass(frozen=True)
class Case:
    """The input of the checks."""

    submission: Submission
    live: LiveCluster
    running: str = ""
    """the process that uses the run folder; "" = none"""
    attempts: int = 0
    """jobs to queue at once; 0 = the profile's value"""

    @property
    def run(self) -> ResolvedRun:
        """The resolved run."""
        return self.submission.run

    @property
    def cluster(self) -> Cluster:
        """The profile."""
        return self.submission.cluster

    @property
    def time(self) -> str:
        """The time limit per attempt."""
        return self.submission.time or self.cluster.slurm.time

    @property
    def claim(self) -> Claim:
        """The requirements of the submission."""
        run, attempts = self.run, self.attempts or self.cluster.chain.attempts
        size = JobSize(run.nodes, run.gpus_per_node, self.time, attempts)
        return Claim(self.cluster, self.live, size, self.submission.folder, run.request.data)


def refuse(case: Case) -> None:
    """Refuse a case that has findings.

    Raises:
        UserError: with all findings.
    """
    _refuse(findings(case))


def _refuse(problems: list[Finding]) -> None:
    if not problems:
        return
    lines = [f"{counted(len(problems), 'problem')} on this cluster"]
    for problem in problems:
        lines.append(f"  - {problem.message}")
        if problem.hint:
            lines.append(f"    next: {problem.hint}")
    raise UserError("\n".join(lines))


def refuse_other_gpu(request: Request, cluster: Cluster) -> None:
    """Refuse a recipe whose plan cannot run on the cluster's GPU; does not import NeMo.

    Raises:
        UserError: with all findings.
    """
    _refuse(other_gpu.request_findings(request, cluster.gpu))


def job_size(request: Request, cluster: Cluster, *, time: str = "", attempts: int = 0, members: int = 1) -> JobSize:
    """Return the size of a request from its recipe, without NeMo; `members` is the number of runs in a sweep."""
    from superpod.collection import registry

    recipe = registry.find(request.recipe)
    nodes = request.num_nodes or recipe.nodes[0]
    return JobSize(nodes, recipe.gpus_per_node, time or cluster.slurm.time, attempts or cluster.chain.attempts, members)


def claim(request: Request, cluster: Cluster, live: LiveCluster, size: JobSize, runs: str = "") -> Claim:
    """Return the requirements of a request of this size."""
    return Claim(cluster, live, size, runs or cluster.folders.runs, request.data)


def refuse_claim(claim: Claim) -> None:
    """Refuse requirements that the live cluster cannot meet; does not import NeMo.

    Raises:
        UserError: with all findings.
    """
    _refuse(claim_findings(claim))


def claim_findings(claim: Claim) -> list[Finding]:
    """List the requirements that the live cluster does not meet, for the partition with the fewest findings."""
    claims = [replace(claim, cluster=one) for one in split_by_partition(claim.cluster)]
    findings = min(([finding for check in CLAIM_CHECKS for finding in check(one)] for one in claims), key=len)
    return findings or list(check_sbatch(claim.cluster, claim.live))


def split_by_partition(cluster: Cluster) -> list[Cluster]:
    """Return a copy of the profile for each of its partitions: Slurm starts the job in whichever can run it."""
    names = cluster.slurm.partition.split(",")
    return [
        cluster.model_copy(update={"slurm": cluster.slurm.model_copy(update={"partition": name})}) for name in names
    ]


def notes(claim: Claim) -> list[Finding]:
    """List reservations that will delay the job, such as maintenance; they are not a reason to refuse it."""
    waits = (limits.reservations(one, claim.live, claim.size) for one in split_by_partition(claim.cluster))
    return min(map(list, waits), key=len)


def refuse_unfit(submission: Submission) -> None:
    """Run the checks that need no live cluster: GPUs per node, precision, GPU memory and host memory.

    Raises:
        UserError: with all findings.
    """
    case = Case(submission, LiveCluster())
    host_memory = limits.check_host_memory(case.cluster, case.live, case.claim.size)
    _refuse([*check_gpus_per_node(case), *check_gpu_support(case), *host_memory])


def findings(case: Case) -> list[Finding]:
    """List all problems, in the order in which a job would encounter them."""
    return [*claim_findings(case.claim), *(finding for check in CHECKS for finding in check(case))]


def profile_findings(cluster: Cluster, live: LiveCluster) -> list[Finding]:
    """List the problems of a profile on the live cluster, assuming a one-node job, for `recipes cluster check`."""
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
    """Check the profile, with the time limit of this submission."""
    for check in PROFILE_CHECKS:
        if check is check_time_limit:
            yield from check_time_limit(claim.cluster, claim.live, claim.size.time)
        else:
            yield from check(claim.cluster, claim.live)


def check_site_limits(claim: Claim) -> Iterator[Finding]:
    """Check the size against the partition, QOS and account limits."""
    for check in limits.CHECKS:
        yield from check(claim.cluster, claim.live, claim.size)


def check_folder_name(claim: Claim) -> Iterator[Finding]:
    """Check that sbatch and pyxis support the path of the folder for runs."""
    yield from _folder_problems(claim.cluster, claim.folder)


def _folder_problems(cluster: Cluster, folder: str) -> Iterator[Finding]:
    hint = "specify another folder with --runs"
    if "\\" in folder:
        yield Finding(f"{folder!r} contains '\\', which sbatch's --output does not support", hint)
    problem = batch_script.mount_problem(folder)
    if cluster.container.image and problem:
        yield Finding(problem, hint)


def refuse_folder(cluster: Cluster, folder: str) -> None:
    """Refuse a folder for runs whose path sbatch or pyxis does not support; does not import NeMo.

    Raises:
        UserError: with all findings.
    """
    _refuse(list(_folder_problems(cluster, folder)))


def check_gpus_per_node(case: Case) -> Iterator[Finding]:
    """Check the number of GPUs per node."""
    if case.run.gpus_per_node > case.cluster.gpus_per_node:
        yield Finding(
            f"{case.submission.recipe} needs {case.run.gpus_per_node} GPUs per node, but {case.cluster.name} has "
            f"{case.cluster.gpus_per_node}",
            f"choose a recipe for {case.cluster.gpu}: recipes list {case.cluster.gpu}",
        )


def check_versions(case: Case) -> Iterator[Finding]:
    """Check the package versions in the image, if they are published, against those that the recipe needs."""
    if case.cluster.declared_only:
        return
    name = case.cluster.container.image
    problems = images.problems(name, case.run, case.cluster.env)
    if problems:
        hint = "build an image with the pinned versions: docs/slurm.md, The container"
        yield Finding(f"container.image {name}: {'; '.join(problems)}", hint)


def check_gpu_support(case: Case) -> Iterator[Finding]:
    """Check that the GPU supports the precision and has enough memory."""
    planned, gpu = case.run.job, case.cluster.gpu
    if planned.node.gpu.name != gpu or planned.precision not in planned.node.gpu.precisions:
        yield from other_gpu.job_findings(case.submission.recipe, planned, gpu)
        return
    layout = case.run.plan["layouts"][0]
    if layout["verdict"] == "oom":
        yield Finding(
            f"the run exceeds the memory of {gpu}: {layout['reserved_gib']:.1f} GiB on the rank with the highest use",
            f"try --layout auto, which finds a layout that fits if one exists; or {other_gpu.memory_hint(planned)}",
        )


def check_known_failures(case: Case) -> Iterator[Finding]:
    """Check that the recipe is not known to fail at startup; `recipes prove` records such failures."""
    from superpod.collection.facts import proof_level
    from superpod.collection.registry import find

    request = case.run.request
    refusal = proof_level.explain_refusal(find(request.recipe), case.run.nodes, request.changes())
    if refusal:
        yield Finding(*refusal)


def check_checkpoint_interval(case: Case) -> Iterator[Finding]:
    """Check that every attempt has enough time for one checkpoint interval and a save."""
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
        yield Finding(f"--time {case.time} must be at least twice chain.save_s, which is {save_s} s", "increase --time")
    writing_s = case.run.checkpoint_bytes / (DISK_BYTES_S * case.run.nodes)
    if writing_s > save_s:
        yield Finding(
            f"saving {case.run.checkpoint_bytes / 2**30:,.0f} GiB from {case.run.nodes} nodes may take "
            f"{writing_s:.0f} s, but chain.save_s allows {save_s} s",
            f"set chain.save_s = {round(2 * writing_s)}",
        )


def check_disk_space(case: Case) -> Iterator[Finding]:
    """Check the free disk space for the checkpoints that are kept and the one being written."""
    from superpod.launch.preflight import LOGS_BYTES

    need, free = 4 * case.run.checkpoint_bytes + LOGS_BYTES, case.live.runs_free
    if free is not None and free < need:
        yield Finding(
            f"four checkpoints of {case.run.checkpoint_bytes / 2**30:,.1f} GiB need {need / 2**30:,.1f} GiB, but only "
            f"{free / 2**30:,.1f} GiB are free in {case.submission.folder}",
            "free some space there, or specify another folder with --runs",
        )


def check_data(claim: Claim) -> Iterator[Finding]:
    """Check that the data folder exists on the cluster and, with a container, is mounted."""
    folder, live = claim.data, claim.live
    if folder is None:
        return
    if live.paths.get(str(folder), "folder") != "folder":
        yield Finding(f"data folder {folder} is {live.paths[str(folder)]} on the cluster", "copy it there first")
    if claim.cluster.container.image:
        mounted_paths = [PurePosixPath(path) for path in (*claim.cluster.container.mounted, claim.folder)]
        if not any(PurePosixPath(folder).is_relative_to(path) for path in mounted_paths):
            yield Finding(f"data folder {folder} is not mounted into the container", "add it to container.mounts")


def check_folder_in_use(case: Case) -> Iterator[Finding]:
    """Check that no other job uses the run folder."""
    if case.running:
        yield Finding(f"the run is in use by {case.running}", "wait until it ends, or cancel it: `recipes cancel`")


CLAIM_CHECKS = (check_profile, check_site_limits, check_folder_name, check_data)
CHECKS = (
    check_gpus_per_node,
    check_known_failures,
    check_versions,
    check_gpu_support,
    check_checkpoint_interval,
    check_disk_space,
    check_folder_in_use,
)


def paths_to_check(cluster: Cluster, data: Path | None = None) -> list[str]:
    """List the paths to check on the cluster, without duplicates: those in the profile and a run's data folder."""
    names: list[str] = []
    if cluster.container.image:
        names += cluster.container.mounted
    if cluster.container.image.startswith("/"):
        names.append(cluster.container.image)
    names += [path for path in (cluster.folders.cache, cluster.folders.data) if path]
    if data:
        names.append(str(data))
    return list(dict.fromkeys(names))
