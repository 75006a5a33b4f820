"""From a recipe's name and a cluster to a script, and from a script to attempts in the queue."""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.node import payload
from superpod.node.files import read_json, write_json
from superpod.node.guard import CHAIN
from superpod.node.run_folder import RunFolder
from superpod.slurm import batch_script, environment

if TYPE_CHECKING:
    from superpod.lifecycle.resolve import ResolvedRun
    from superpod.slurm.connection import Connection
    from superpod.slurm.profiles import Cluster

SCRIPT = "job.sbatch"


@dataclass(frozen=True)
class Submission:
    """A resolved run on its way to a cluster: where, and how long an attempt may take."""

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
        """Where run folders are made, on the cluster."""
        return self.runs or self.cluster.folders.runs


def script(submission: Submission, *, name: str = "") -> str:
    """The sbatch script of a resolved run. Pure.

    Raises:
        UserError: a value that cannot be written into it.
    """
    run, cluster = submission.run, submission.cluster
    return batch_script.render(
        batch_script.BatchJob(
            recipe=submission.recipe,
            cluster=cluster,
            nodes=run.nodes,
            gpus=run.gpus_per_node,
            runs=submission.folder,
            variables=tuple(environment.variables(cluster, run.layout, run.job.precision)),
            recipe_file=run.source,
            recipe_lines=tuple(run.lines),
            runtime=payload.runtime(),
            python=python_of(cluster),
            facts=facts(submission),
            name=name,
            time=submission.time,
        )
    )


def python_of(cluster: Cluster) -> str:
    """The ranks' Python: the profile's; where it names none and there is no container, the one that runs this."""
    return cluster.software.python or ("python" if cluster.container.image else sys.executable)


def facts(submission: Submission) -> dict[str, Any]:
    """What run.json keeps of a run on Slurm."""
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
        "save_every": run.save_every,
        "checkpoint_bytes": run.checkpoint_bytes,
        "step_time_s": run.step_time_s,
        **({"rehearsal": True} if cluster.declared_only else {}),
    }


def new_run(submission: Submission, connection: Connection) -> str:
    """Make the run folder where the nodes will look for it, with the script in it; returns its path there.

    Raises:
        UserError: it cannot be written.
    """
    if not connection.remote:
        return str(_create(Path(submission.folder), submission).path)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _create(Path(scratch), submission)
        place = f"{submission.recipe}/{folder.path.name}"
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(folder.path, arcname=place)
        connection.run(["mkdir", "-p", submission.folder])
        connection.run(["tar", "-xz", "-C", submission.folder], stdin=packed.getvalue())
        return f"{submission.folder}/{place}"


def _create(runs: Path, submission: Submission) -> RunFolder:
    run = submission.run
    folder = RunFolder.create(runs, submission.recipe, facts=facts(submission), recipe_lines=run.lines)
    folder.write_plan(run.plan)
    text = script(submission, name=job_name(str(folder.path)))
    (folder.path / SCRIPT).write_text(text, encoding="utf-8")
    return folder


def job_name(run: str) -> str:
    """The name of every job of a run: Slurm's `singleton` lets one of a name run at a time."""
    path = Path(run)
    return f"{path.parent.name}.{path.name}"


def queue(connection: Connection, run: str, attempts: int, exclude: Sequence[str] = ()) -> list[str]:
    """Put so many attempts of a run into the queue, each waiting for those before it; returns their job ids.

    `exclude` are nodes that were found bad.

    Raises:
        UserError: sbatch refuses, in its own words.
    """
    words = ["sbatch", "--parsable", f"--job-name={job_name(run)}", "--dependency=singleton", f"--chdir={run}"]
    words += [f"--output={run.replace('%', '%%')}/slurm-%j.out", f"{run}/{SCRIPT}"]
    words[2:2] = [f"--exclude={','.join(exclude)}"] if exclude else []
    jobs: list[str] = []
    for _ in range(attempts):
        try:
            answer = connection.run(words, env={"SUPERPOD_RUN_DIR": run})
        except UserError:
            if jobs:
                break  # a limit on queued jobs: the first attempts stand, `recipes status` adds the others later
            raise
        jobs.append(answer.strip().partition(";")[0])
    return jobs


def alone(connection: Connection, cluster: Cluster, title: str, words: list[str], log: str) -> str:
    """Queue one command of `recipes` as a job of one task; returns its job id.

    Raises:
        UserError: the cluster is not here, its ranks have not got this project, or sbatch refuses.
    """
    if connection.remote:
        raise UserError(f"the files are here, and {cluster.name} is behind {connection}", "log in there, and ask again")
    if cluster.container.image:
        raise UserError(
            f"{cluster.name} runs its ranks in a container, which has not got this project",
            "leave out --cluster on a node that has NeMo, or give a profile with [software] python and no image",
        )
    options = [f"--job-name={title}", *batch_script.asked(cluster, 1, 1), *cluster.slurm.options]
    text = batch_script.plain(cluster, [python_of(cluster), "-m", "superpod.cli", *words])
    output = f"--output={log.replace('%', '%%')}"
    return connection.run(["sbatch", "--parsable", *options, output], stdin=text.encode()).strip().partition(";")[0]


def remember(connection: Connection, run: str, jobs: list[str]) -> None:
    """Keep the ids of queued attempts in the run folder, so that an attempt that ends the run can take them back."""
    if not connection.remote:
        note(RunFolder(Path(run)), jobs)
        return
    text = f'{{"jobs": [{", ".join(jobs)}]}}\n'
    connection.run(["sh", "-c", 'cat >"$0"', f"{run}/{CHAIN}"], stdin=text.encode())


def note(run: RunFolder, jobs: list[str]) -> None:
    """Keep the ids of queued attempts in the run folder."""
    known = [str(j) for j in (read_json(run.path / CHAIN) or {}).get("jobs", [])]
    write_json(run.path / CHAIN, {"jobs": [*known, *jobs]})
