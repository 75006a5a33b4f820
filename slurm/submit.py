"""Turn a resolved run and a cluster into a script, and a script into attempts in the queue."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod import collection
from superpod.errors import UserError
from superpod.lifecycle import planned_run
from superpod.lifecycle.profile_request import ProfileRequest
from superpod.node import payload, progress
from superpod.node.files import write_json
from superpod.node.guard import CHAIN, chained_jobs
from superpod.node.run_folder import RunFolder
from superpod.planner import plans
from superpod.recipes.facts import needs
from superpod.recipes.registry import find
from superpod.slurm import batch_script, environment, other_gpu, segments, sharing
from superpod.slurm.profiles import seconds

if TYPE_CHECKING:
    from superpod.lifecycle.resolve import ResolvedRun
    from superpod.planner.planned_job import PlannedJob
    from superpod.recipes.facts.environment import Variable
    from superpod.slurm.connection import Connection
    from superpod.slurm.profiles import Cluster

SCRIPT = "job.sbatch"
"""File name of the batch script in a run folder."""


@dataclass(frozen=True)
class Submission:
    """A resolved run for a cluster: where its folder lies, and how long an attempt may take."""

    run: ResolvedRun
    cluster: Cluster
    runs: str = ""
    """the folder for runs; "" = the profile's"""
    time: str = ""
    """the limit of an attempt; "" = the profile's"""

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return self.run.request.recipe

    @property
    def folder(self) -> str:
        """The folder for runs on the cluster."""
        return self.runs or self.cluster.folders.runs

    @property
    def job(self) -> PlannedJob:
        """The planner's job on the cluster's GPUs, whatever GPU the recipe is for; a rehearsal has none."""
        return self.run.job if self.cluster.declared_only else other_gpu.on(self.run.job, self.cluster.gpu)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """plan.json: the run's plan, on the cluster's GPUs."""
        return self.run.plan if self.job is self.run.job else plans.of_run(self.job)

    @property
    def step_time_s(self) -> float | None:
        """As planned on the cluster's GPUs; None where the planner has no figure."""
        return self.plan["layouts"][0]["step_time_s"]

    @property
    def other_gpu_note(self) -> list[str]:
        """That the recipe is for another GPU than the cluster's, with the step time on both; [] where it is not."""
        own, gpu = self.run.job.node.gpu.name, self.job.node.gpu.name
        note = other_gpu.note(self.recipe, own, gpu, self.run.step_time_s, self.step_time_s)
        return [note] if note else []


@dataclass(frozen=True)
class QueuedJobs:
    """The jobs of one run that went into the queue, and what stood in the way of more."""

    ids: list[str]
    wanted: int
    refusal: str = ""
    """sbatch's words for the first job that it did not take"""

    @property
    def shortfall(self) -> str:
        """That fewer went in than were wanted, and why; '' when all did."""
        return f"{len(self.ids)} of {self.wanted} jobs are queued; {self.refusal}" if self.refusal else ""

    def __str__(self) -> str:
        return ", ".join(self.ids)


def script(submission: Submission, *, name: str = "") -> str:
    """The sbatch script of a resolved run. Pure.

    Raises:
        UserError: a value cannot be written into the script.
    """
    run, cluster = submission.run, submission.cluster
    return batch_script.render(
        batch_script.BatchJob(
            recipe=submission.recipe,
            cluster=cluster,
            nodes=run.nodes,
            gpus=run.gpus_per_node,
            runs=submission.folder,
            variables=(*environment.variables(cluster, run.job, run.request.overrides), *_of_profile(run)),
            recipe_file=run.source,
            recipe_lines=tuple(run.lines),
            runtime=payload.runtime(tuple(_carried(run, cluster).items())),
            python=python_of(cluster),
            facts=facts(submission),
            name=name,
            time=submission.time,
            model=str(run.data_facts.get("finetune", {}).get("model", "")),
            segment=segments.segment(cluster, run.job, run.nodes, run.gpus_per_node),
        )
    )


def _of_profile(run: ResolvedRun) -> list[Variable]:
    return ProfileRequest.parse(run.request.profile).variables() if run.request.profile else []


def _carried(run: ResolvedRun, cluster: Cluster) -> dict[str, Path]:
    return {**collection.carried(), **planned_run.sources(run), **package(run, cluster)}


def package(run: ResolvedRun, cluster: Cluster) -> dict[str, Path]:
    """This project, which a container lacks: the steps that import and export a fine-tuning's model run it.

    A rehearsal's ranks too. Where they build the recipe, they find none but what the job carries, as it carries a part.
    Path in the job's code folder -> file; nothing of `node/`, which every job carries.
    """
    tunes = "finetune" in run.data_facts
    if not (tunes and cluster.container.image) and not (run.on_node and (tunes or cluster.declared_only)):
        return {}
    root = payload.PACKAGE
    inside = [path for folder in PACKAGE for path in sorted((root / folder).rglob("*.*")) if path.is_file()]
    kept = [path for path in inside if path.suffix in (".py", ".toml") and path.stat().st_size < LARGEST]
    top = [path for path in sorted(root.glob("*.py")) if path.name not in payload.FILES]
    files = [*top, *kept]
    return {f"superpod/{path.relative_to(root).as_posix()}": path for path in files}


PACKAGE = ("planner", "recipes", "lifecycle", "rehearsal", "launchers")
LARGEST = 200_000
"""Bytes of a file that travels; larger ones are tables of published runs, which no step reads."""


def python_of(cluster: Cluster) -> str:
    """The ranks' Python: the profile's, or `python` in a container, or else the Python that runs this."""
    return cluster.software.python or ("python" if cluster.container.image else sys.executable)


def facts(submission: Submission) -> dict[str, object]:
    """What run.json records of a run on Slurm."""
    run, cluster = submission.run, submission.cluster
    return {
        **run.request.facts(),
        **run.data_facts,
        "cluster": cluster.name,
        "nodes": run.nodes,
        "gpus_per_node": run.gpus_per_node,
        "max_steps": run.max_steps,
        "attempts": cluster.chain.attempts,
        "stalled_s": cluster.chain.stalled_s,
        "save_s": cluster.chain.save_s,
        "limit_s": seconds(submission.time or cluster.slurm.time),
        "save_every": run.save_every,
        "checkpoint_bytes": run.checkpoint_bytes,
        "step_time_s": submission.step_time_s,
        "needs": needs.of(find(run.request.recipe).model, submission.job),
        **({"rehearsal": True} if cluster.declared_only else {}),
    }


def outlook(submission: Submission, attempts: int) -> str:
    """That so many jobs end before the run does, at the planned pace; '' when they suffice, or nothing is planned."""
    from superpod.slurm.preflight import START_S

    cluster, step_time_s = submission.cluster, submission.step_time_s
    if cluster.declared_only or not step_time_s:
        return ""
    limit_s = seconds(submission.time or cluster.slurm.time)
    chain = progress.Chain(attempts, limit_s, START_S + cluster.chain.save_s)
    return progress.outlook(0, submission.run.max_steps, step_time_s, chain)


def new_run(submission: Submission, connection: Connection) -> str:
    """Create the run folder, with the script in it, on the cluster; returns its path there.

    Raises:
        UserError: the folder cannot be written.
    """
    rights = submission.cluster.folders
    if not connection.remote:
        with sharing.umask(rights.umask):
            return str(_create(Path(submission.folder), submission, rights.group).path)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _create(Path(scratch), submission)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for entry in sorted(folder.path.iterdir()):
                archive.add(entry, arcname=entry.name, filter=sharing.with_all_rights)
        words = [submission.folder, rights.umask, rights.group, submission.recipe, folder.path.name]
        return connection.run(["sh", "-c", sharing.REMOTE, "sh", *words], stdin=stream.getvalue()).strip()


def _create(runs: Path, submission: Submission, group: str = "") -> RunFolder:
    run = submission.run
    folder = RunFolder.create(runs, submission.recipe, facts=facts(submission), recipe_lines=run.lines)
    folder.write_plan(submission.plan)
    text = script(submission, name=job_name(str(folder.path)))
    (folder.path / SCRIPT).write_text(text, encoding="utf-8")
    try:
        sharing.give(folder.path, group)
    except UserError:
        shutil.rmtree(folder.path)
        raise
    return folder


def job_name(run: str) -> str:
    """The name of every job of a run: with Slurm's `singleton`, jobs of one name run one at a time."""
    path = Path(run)
    return f"{path.parent.name}.{path.name}"


def start(
    submission: Submission, connection: Connection, attempts: int, after: Sequence[str] = ()
) -> tuple[str, QueuedJobs]:
    """Make the run folder and queue its attempts; returns its path and their jobs. A refused run leaves no folder.

    Raises:
        UserError: the folder cannot be written, or sbatch refuses, with its message.
    """
    run = new_run(submission, connection)
    try:
        jobs = queue(connection, run, attempts, after=after)
        remember(connection, run, jobs.ids)
    except BaseException:
        discard(connection, [run])
        raise
    return run, jobs


def discard(connection: Connection, runs: Sequence[str]) -> None:
    """Remove new run folders, and the jobs that were queued for them."""
    unqueue(connection, runs)
    connection.run(["rm", "-rf", "--", *runs])


def unqueue(connection: Connection, runs: Sequence[str]) -> None:
    """Cancel all jobs of runs, by name: sbatch may have died with its answer."""
    for run in runs:
        with contextlib.suppress(UserError):
            connection.run(["scancel", f"--name={job_name(run)}"])


def queue(
    connection: Connection, run: str, attempts: int, exclude: Sequence[str] = (), after: Sequence[str] = ()
) -> QueuedJobs:
    """Queue a number of attempts of a run, each of which waits for those before it.

    `exclude` names nodes that have failed; `after` are dependencies such as `afterok:123`.

    Raises:
        UserError: sbatch refuses the first, with its message.
    """
    first = QueuedJobs([_sbatch(connection, run, exclude, after)], 1)
    return queue_more(connection, run, first, attempts, exclude, after)


def queue_more(
    connection: Connection,
    run: str,
    before: QueuedJobs,
    attempts: int,
    exclude: Sequence[str] = (),
    after: Sequence[str] = (),
) -> QueuedJobs:
    """Go on until `attempts` jobs are queued, those `before` included: what sbatch refuses, a later top-up adds."""
    ids = [*before.ids]
    while len(ids) < attempts:
        try:
            ids.append(_sbatch(connection, run, exclude, after))
        except UserError as error:  # a limit on queued jobs
            return QueuedJobs(ids, attempts, str(error))
    return QueuedJobs(ids, attempts)


def _sbatch(connection: Connection, run: str, exclude: Sequence[str], after: Sequence[str]) -> str:
    # Every attempt waits for `after`: the first may be cancelled, and the second must still not start before it.
    words = ["sbatch", "--parsable", "--export=ALL", f"--job-name={job_name(run)}"]
    words += [f"--dependency={','.join(('singleton', *after))}"]
    words += [f"--exclude={','.join(exclude)}"] if exclude else []
    words += [f"--chdir={run}", f"--output={run.replace('%', '%%')}/slurm-%j.out", f"{run}/{SCRIPT}"]
    with contextlib.nullcontext() if connection.remote else sharing.rights_of(Path(run)):  # of slurm-JOB.out
        return connection.run(words, env={"SUPERPOD_RUN_DIR": run}).strip().partition(";")[0]


def queue_command(connection: Connection, cluster: Cluster, title: str, words: list[str], log: str) -> str:
    """Queue one `recipes` command as a job of one task; returns its job id.

    Raises:
        UserError: the cluster is behind SSH, its container lacks this project, or sbatch refuses.
    """
    if connection.remote:
        raise UserError(f"the files are here, but {cluster.name} is behind {connection}", "log in there first")
    if cluster.container.image:
        raise UserError(
            f"{cluster.name} runs its ranks in a container, which lacks this project",
            "leave out --cluster on a node that has NeMo, or give a profile with [software] python and no image",
        )
    options = [f"--job-name={title}", *batch_script.resource_options(cluster, 1, 1), *cluster.slurm.options]
    text = batch_script.plain(cluster, [python_of(cluster), "-P", "-m", "superpod.cli", *words])
    output = f"--output={log.replace('%', '%%')}"
    return connection.run(["sbatch", "--parsable", *options, output], stdin=text.encode()).strip().partition(";")[0]


def remember(connection: Connection, run: str, jobs: list[str]) -> None:
    """Write the ids of all queued attempts to a new run's folder, so that the one that ends the run can cancel them."""
    if not connection.remote:
        write_json(Path(run) / CHAIN, {"jobs": jobs})
        return
    text = f'{{"jobs": [{", ".join(jobs)}]}}\n'
    # With the run's rights, whatever the login's umask is.
    script = 'cat >"$0" && chmod --reference="$1" -- "$0"'
    connection.run(["sh", "-c", script, f"{run}/{CHAIN}", f"{run}/run.json"], stdin=text.encode())


def note(run: RunFolder, jobs: list[str]) -> None:
    """Add the ids of queued attempts to those in the run folder."""
    write_json(run.path / CHAIN, {"jobs": [*chained_jobs(run), *jobs]})
