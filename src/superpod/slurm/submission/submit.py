"""Renders the batch script of a resolved run for a cluster, creates its run folder, and queues its attempts."""

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

from superpod.collection.facts import needs
from superpod.collection.registry import find
from superpod.common import collection, package_files
from superpod.common.json_files import write_json
from superpod.errors import UserError
from superpod.planner import plans
from superpod.requests import deferred
from superpod.requests.profile_request import ProfileRequest
from superpod.requests.resolve import SOURCES
from superpod.runtime.attempts import payload, progress
from superpod.runtime.attempts.guard import chained_jobs
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import CHAIN, SCRIPT
from superpod.slurm.profiles import other_gpu, segments, sharing
from superpod.slurm.profiles.profile_values import seconds
from superpod.slurm.script import batch_script, cluster_variables

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob
    from superpod.requests.resolve import ResolvedRun
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection


@dataclass(frozen=True)
class Submission:
    """A resolved run, and the cluster, folder and time limit for it."""

    run: ResolvedRun
    cluster: Cluster
    runs: str = ""
    """folder for runs; "" = from the profile"""
    time: str = ""
    """time limit per attempt; "" = from the profile"""

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return self.run.request.recipe

    @property
    def folder(self) -> str:
        """The folder for runs on the cluster."""
        return self.runs or self.cluster.folders.runs

    @property
    def job(self) -> PlannedJob:
        """The planned job on the GPUs of the cluster, or for a rehearsal on those of the recipe."""
        if self.cluster.declared_only:
            return self.run.job
        return other_gpu.with_gpu(self.run.job, self.cluster.gpu)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The contents of plan.json: the plan of the run on the GPUs of the cluster."""
        return self.run.plan if self.job is self.run.job else plans.describe_run(self.job)

    @property
    def step_time_s(self) -> float | None:
        """The planned step time in seconds on the GPUs of the cluster; None if the planner has no estimate."""
        return self.plan["layouts"][0]["step_time_s"]

    @property
    def other_gpu_note(self) -> list[str]:
        """A note with both planned step times if the GPU of the cluster differs from that of the recipe; else []."""
        own, gpu = self.run.job.node.gpu.name, self.job.node.gpu.name
        note = other_gpu.gpu_note(self.recipe, own, gpu, self.run.step_time_s, self.step_time_s)
        return [note] if note else []


@dataclass(frozen=True)
class QueuedJobs:
    """The queued jobs of a run."""

    ids: list[str]
    wanted: int
    """number of jobs to queue"""
    rejection: str = ""
    """message of sbatch for the first job that it rejected; "" = none"""

    @property
    def shortfall(self) -> str:
        """A message if fewer jobs were queued than requested; otherwise ""."""
        if not self.rejection:
            return ""
        return f"{len(self.ids)} of {self.wanted} jobs are queued; {self.rejection}"

    def __str__(self) -> str:
        return ", ".join(self.ids)


def script(submission: Submission, *, name: str = "") -> str:
    """Return the sbatch script of a submission; `name` is the job name, "" = the name of the recipe.

    Raises:
        UserError: a value cannot be written into the script.
    """
    run, cluster = submission.run, submission.cluster
    variables = cluster_variables.variables(cluster, run.job, run.request.overrides)
    if run.request.profile:
        variables += ProfileRequest.parse(run.request.profile).variables()
    extra_files = {**collection.job_files(), **deferred.sources(run), **project_files(run, cluster)}
    return batch_script.render(
        batch_script.BatchJob(
            recipe=submission.recipe,
            cluster=cluster,
            nodes=run.nodes,
            gpus=run.gpus_per_node,
            runs=submission.folder,
            variables=tuple(variables),
            recipe_file=run.source,
            recipe_lines=tuple(run.lines),
            runtime=payload.pack_runtime(tuple(extra_files.items())),
            python=ranks_python(cluster),
            facts=facts(submission),
            name=name,
            time=submission.time,
            model=str(run.data_facts.get("finetune", {}).get("model", "")),
            segment=segments.segment(cluster, run.job, run.nodes, run.gpus_per_node),
        )
    )


def project_files(run: ResolvedRun, cluster: Cluster) -> dict[str, Path]:
    """Return the files of this project that a job contains in addition to `runtime/`, by paths in its code folder.

    Two kinds of jobs need them: fine-tuning in a container, which does not contain this project, to import and export
    the model; and a deferred run that fine-tunes or rehearses, because the partial package in the code folder hides an
    installed one.
    """
    finetunes = "finetune" in run.data_facts
    in_container = finetunes and bool(cluster.container.image)
    hides_installed = run.is_deferred and (finetunes or cluster.declared_only)
    if not in_container and not hides_installed:
        return {}
    files = {name: path for name, path in package_files.files(PACKAGE).items() if path.suffix in (".py", ".toml")}
    return {f"superpod/{name}": path for name, path in files.items() if path.stat().st_size < MAX_FILE_BYTES}


PACKAGE = (".", *SOURCES, "rehearsal", "launch")
MAX_FILE_BYTES = 200_000
"""Size in bytes from which files are left out: they are tables of published runs, which no job step reads."""


def ranks_python(cluster: Cluster) -> str:
    """Return the Python interpreter of the ranks: software.python, `python` in a container, or that of this process."""
    if cluster.software.python:
        return cluster.software.python
    return "python" if cluster.container.image else sys.executable


def facts(submission: Submission) -> dict[str, object]:
    """Return the contents of run.json for a run on Slurm."""
    run, cluster = submission.run, submission.cluster
    rehearsal = {"rehearsal": True} if cluster.declared_only else {}
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
        "needs": needs.required_versions(find(run.request.recipe).model, submission.job),
        **rehearsal,
    }


def chain_warning(submission: Submission, attempts: int) -> str:
    """Return a warning if a run cannot finish in `attempts` jobs at the planned step time; otherwise ""."""
    from superpod.slurm.preflight.preflight import START_S

    cluster, step_time_s = submission.cluster, submission.step_time_s
    if cluster.declared_only or not step_time_s:
        return ""
    limit_s = seconds(submission.time or cluster.slurm.time)
    chain = progress.Chain(attempts, limit_s, START_S + cluster.chain.save_s)
    return progress.chain_shortfall(0, submission.run.max_steps, step_time_s, chain)


def new_run(submission: Submission, connection: Connection) -> str:
    """Create a run folder with its batch script on the cluster, and return its path there.

    Raises:
        UserError: the folder cannot be written.
    """
    folders = submission.cluster.folders
    if not connection.remote:
        with sharing.umask(folders.umask):
            return str(_create(Path(submission.folder), submission, folders.group).path)
    with tempfile.TemporaryDirectory() as scratch:
        # Create the folder here, and unpack it on the cluster with a single command over SSH.
        folder = _create(Path(scratch), submission)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for entry in sorted(folder.path.iterdir()):
                archive.add(entry, arcname=entry.name, filter=sharing.with_full_permissions)
        arguments = [submission.folder, folders.umask, folders.group, submission.recipe, folder.path.name]
        return connection.run(["sh", "-c", sharing.UNPACK_RUN, "sh", *arguments], stdin=stream.getvalue()).strip()


def _create(runs: Path, submission: Submission, group: str = "") -> RunFolder:
    """Create a run folder with its batch script in `runs`; `group` is its group, "" = the default."""
    run = submission.run
    folder = RunFolder.create(runs, submission.recipe, facts=facts(submission), recipe_lines=run.lines)
    folder.write_plan(submission.plan)
    text = script(submission, name=job_name(str(folder.path)))
    (folder.path / SCRIPT).write_text(text, encoding="utf-8")
    try:
        sharing.set_group(folder.path, group)
    except UserError:
        shutil.rmtree(folder.path)
        raise
    return folder


def job_name(run: str) -> str:
    """Return the name of all jobs of the run in the folder `run`; singleton jobs of one name run one at a time."""
    path = Path(run)
    return f"{path.parent.name}.{path.name}"


def start(
    submission: Submission, connection: Connection, attempts: int, after: Sequence[str] = ()
) -> tuple[str, QueuedJobs]:
    """Create a run folder and queue `attempts` jobs with the dependencies `after`; return the folder and the jobs.

    Raises:
        UserError: the folder cannot be written, or sbatch rejects the job; the folder is removed.
    """
    run = new_run(submission, connection)
    try:
        jobs = queue(connection, run, attempts, after=after)
        record_jobs(connection, run, jobs.ids)
    except BaseException:
        discard(connection, [run])
        raise
    return run, jobs


def discard(connection: Connection, runs: Sequence[str]) -> None:
    """Cancel the jobs of new runs and remove their folders."""
    unqueue(connection, runs)
    connection.run(["rm", "-rf", "--", *runs])


def unqueue(connection: Connection, runs: Sequence[str]) -> None:
    """Cancel all jobs of runs by name, because a job may be queued even if sbatch failed before it printed the id."""
    for run in runs:
        with contextlib.suppress(UserError):
            connection.run(["scancel", f"--name={job_name(run)}"])


def queue(
    connection: Connection, run: str, attempts: int, exclude: Sequence[str] = (), after: Sequence[str] = ()
) -> QueuedJobs:
    """Queue attempts of a run; each waits for the previous ones.

    Args:
        connection: connection to the cluster.
        run: path of the run folder on the cluster.
        attempts: number of jobs.
        exclude: nodes not to use.
        after: dependencies such as `afterok:123`.

    Raises:
        UserError: sbatch rejects the first job.
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
    """Queue jobs until there are `attempts`, including those in `before`, or sbatch rejects one.

    The other arguments are those of `queue`. `recipes top-up` can queue the missing jobs later.
    """
    ids = [*before.ids]
    while len(ids) < attempts:
        try:
            ids.append(_sbatch(connection, run, exclude, after))
        except UserError as error:  # a limit on queued jobs
            return QueuedJobs(ids, attempts, str(error))
    return QueuedJobs(ids, attempts)


def _sbatch(connection: Connection, run: str, exclude: Sequence[str], after: Sequence[str]) -> str:
    """Queue one job of a run and return its id. Raises UserError if sbatch rejects it."""
    command = ["sbatch", "--parsable", "--export=ALL", f"--job-name={job_name(run)}"]
    # All attempts have the dependencies in `after`, not only the first, which may be cancelled.
    command.append(f"--dependency={','.join(('singleton', *after))}")
    if exclude:
        command.append(f"--exclude={','.join(exclude)}")
    command += [f"--chdir={run}", f"--output={run.replace('%', '%%')}/slurm-%j.out", f"{run}/{SCRIPT}"]
    # slurm-JOB.out must have the permissions of the run folder.
    permissions = contextlib.nullcontext() if connection.remote else sharing.inherit_permissions(Path(run))
    with permissions:
        return connection.run(command, env={"SUPERPOD_RUN_DIR": run}).strip().partition(";")[0]


def queue_command(connection: Connection, cluster: Cluster, title: str, arguments: list[str], log: str) -> str:
    """Queue a `recipes` command as a job with one task, and return the job id.

    Args:
        connection: connection to the cluster.
        cluster: profile of the cluster.
        title: job name.
        arguments: command line after `recipes`.
        log: file for the output of the job.

    Raises:
        UserError: the cluster is behind SSH, its ranks run in a container, or sbatch rejects the job.
    """
    if connection.remote:
        raise UserError(
            f"the files are on this machine, but {cluster.name} is behind SSH ({connection})",
            "run the command on the cluster's login node",
        )
    if cluster.container.image:
        raise UserError(
            f"{cluster.name} runs its ranks in a container, which does not contain this project",
            "leave out --cluster on a node with NeMo, or use a profile with software.python and without an image",
        )
    options = [f"--job-name={title}", *batch_script.resource_options(cluster, 1, 1), *cluster.slurm.options]
    text = batch_script.render_command(cluster, [ranks_python(cluster), "-P", "-m", "superpod.cli", *arguments])
    output = f"--output={log.replace('%', '%%')}"
    return connection.run(["sbatch", "--parsable", *options, output], stdin=text.encode()).strip().partition(";")[0]


def record_jobs(connection: Connection, run: str, jobs: list[str]) -> None:
    """Write the ids of all queued jobs to a run folder, so that the attempt that ends the run can cancel them."""
    if not connection.remote:
        write_json(Path(run) / CHAIN, {"jobs": jobs})
        return
    text = f'{{"jobs": [{", ".join(jobs)}]}}\n'
    # The file must have the permissions of run.json, whatever the umask on the login node.
    script = 'cat >"$0" && chmod --reference="$1" -- "$0"'
    connection.run(["sh", "-c", script, f"{run}/{CHAIN}", f"{run}/run.json"], stdin=text.encode())


def append_jobs(run: RunFolder, jobs: list[str]) -> None:
    """Append the ids of queued jobs to those in the run folder."""
    write_json(run.path / CHAIN, {"jobs": [*chained_jobs(run), *jobs]})
