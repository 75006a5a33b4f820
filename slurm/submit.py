"""From a recipe's name and a cluster to a script, and from a script to attempts in the queue."""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.launchers.local import Job
from superpod.node import payload
from superpod.node.files import read_json, write_json
from superpod.node.guard import CHAIN
from superpod.node.run_folder import RunFolder
from superpod.slurm import batch_script, environment

if TYPE_CHECKING:
    from superpod.lifecycle.exported import Exported
    from superpod.slurm.connection import Connection
    from superpod.slurm.profiles import Cluster

SCRIPT = "job.sbatch"


@dataclass(frozen=True)
class Wanted:
    """What a user asks for: a recipe as changed, where, and how long an attempt may take."""

    job: Job
    cluster: Cluster
    runs: str = ""
    """the folder for runs; "" = the profile's"""
    time: str = ""
    """the limit of an attempt; "" = the profile's"""
    facts: dict = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Where run folders are made, on the cluster."""
        return self.runs or self.cluster.folders.runs


def script(wanted: Wanted, exported: Exported, *, name: str = "") -> str:
    """The sbatch script of a recipe that was exported. Pure.

    Raises:
        UserError: a value that cannot be written into it.
    """
    from superpod.recipes.registry import find

    recipe = find(wanted.job.recipe)
    layout = recipe.layout(exported.nodes if exported.nodes in recipe.nodes else None)
    return batch_script.render(
        batch_script.BatchJob(
            recipe=wanted.job.recipe,
            cluster=wanted.cluster,
            nodes=exported.nodes,
            gpus=exported.gpus,
            runs=wanted.folder,
            variables=tuple(environment.variables(wanted.cluster, layout, recipe.precision)),
            recipe_file=exported.source,
            runtime=payload.runtime(),
            python=python_of(wanted.cluster),
            facts=facts(wanted, exported),
            name=name,
            time=wanted.time,
        )
    )


def python_of(cluster: Cluster) -> str:
    """The ranks' Python: the profile's; where it names none and there is no container, the one that runs this."""
    return cluster.software.python or ("python" if cluster.container.image else sys.executable)


def facts(wanted: Wanted, exported: Exported) -> dict:
    """What run.json keeps of a job for Slurm."""
    return {
        **wanted.job.facts(),
        **exported.facts,
        "cluster": wanted.cluster.name,
        "nodes": exported.nodes,
        "gpus_per_node": exported.gpus,
        "max_steps": exported.max_steps,
        "attempts": wanted.cluster.chain.attempts,
        "stalled_s": wanted.cluster.chain.stalled_s,
        "save_every": exported.save_every,
        "checkpoint_bytes": int(exported.plan["layouts"][0]["checkpoint_bytes"]),
        "step_time_s": exported.plan["layouts"][0]["step_time_s"],
        **({"rehearsal": True} if wanted.cluster.declared_only else {}),
        **wanted.facts,
    }


def absolute(path: Path | None) -> Path | None:
    """A path that means the same on every node."""
    return path.absolute() if path else None


def new_run(wanted: Wanted, exported: Exported, login: Connection) -> str:
    """Make the run folder where the nodes will look for it, with the script in it; returns its path there.

    Raises:
        UserError: it cannot be written.
    """
    known = facts(wanted, exported)
    if not login.remote:
        run = RunFolder.create(Path(wanted.folder), wanted.job.recipe, facts=known, recipe_lines=exported.lines)
        _fill(run, wanted, exported)
        return str(run.path)
    with tempfile.TemporaryDirectory() as scratch:
        run = RunFolder.create(Path(scratch), wanted.job.recipe, facts=known, recipe_lines=exported.lines)
        _fill(run, wanted, exported)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(run.path, arcname=f"{wanted.job.recipe}/{run.path.name}")
        login.run(["mkdir", "-p", wanted.folder])
        login.run(["tar", "-xz", "-C", wanted.folder], stdin=packed.getvalue())
        return f"{wanted.folder}/{wanted.job.recipe}/{run.path.name}"


def _fill(run: RunFolder, wanted: Wanted, exported: Exported) -> None:
    run.write_plan(exported.plan)
    text = script(wanted, exported, name=job_name(str(run.path)))
    (run.path / SCRIPT).write_text(text, encoding="utf-8")


def job_name(run: str) -> str:
    """The name of every job of a run: Slurm's `singleton` lets one of a name run at a time."""
    path = Path(run)
    return f"{path.parent.name}.{path.name}"


def queue(login: Connection, run: str, attempts: int, exclude: Sequence[str] = ()) -> list[str]:
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
            said = login.run(words, env={"SUPERPOD_RUN_DIR": run})
        except UserError:
            if jobs:
                break  # a limit on queued jobs: the first attempts stand, `recipes status` adds the others later
            raise
        jobs.append(said.strip().partition(";")[0])
    return jobs


def alone(login: Connection, cluster: Cluster, title: str, words: list[str], log: str) -> str:
    """Queue one command of `recipes` as a job of one task; returns its job id.

    Raises:
        UserError: the cluster is not here, its ranks have not got this project, or sbatch refuses.
    """
    if login.remote:
        raise UserError(f"the files are here, and {cluster.name} is behind {login}", "log in there, and ask again")
    if cluster.container.image:
        raise UserError(
            f"{cluster.name} runs its ranks in a container, which has not got this project",
            "leave out --cluster on a node that has NeMo, or give a profile with [software] python and no image",
        )
    asked = [f"--job-name={title}", *batch_script.asked(cluster, 1, 1), *cluster.slurm.options]
    script = batch_script.plain(cluster, [python_of(cluster), "-m", "superpod.cli", *words])
    output = f"--output={log.replace('%', '%%')}"
    return login.run(["sbatch", "--parsable", *asked, output], stdin=script.encode()).strip().partition(";")[0]


def remember(login: Connection, run: str, jobs: list[str]) -> None:
    """Keep the ids of queued attempts in the run folder, so that an attempt that ends the run can take them back."""
    if not login.remote:
        note(RunFolder(Path(run)), jobs)
        return
    text = f'{{"jobs": [{", ".join(jobs)}]}}\n'
    login.run(["sh", "-c", 'cat >"$0"', f"{run}/{CHAIN}"], stdin=text.encode())


def note(run: RunFolder, jobs: list[str]) -> None:
    """Keep the ids of queued attempts in the run folder."""
    known = [str(j) for j in (read_json(run.path / CHAIN) or {}).get("jobs", [])]
    write_json(run.path / CHAIN, {"jobs": [*known, *jobs]})
