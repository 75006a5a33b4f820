"""From a recipe's name and a cluster to a script, and from a script to links in the queue."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.launchers import environment, payload, slurm
from superpod.launchers.local import Job

if TYPE_CHECKING:
    from superpod.launchers.cluster import Cluster
    from superpod.launchers.exported import Exported


@dataclass(frozen=True)
class Wanted:
    """What a user asks for: a recipe as changed, where, and how long a link may take."""

    job: Job
    cluster: Cluster
    runs: str = ""
    """the folder for runs; "" = the profile's"""
    time: str = ""
    """the limit of a link; "" = the profile's"""
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
    return slurm.render(
        slurm.Job(
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
        "save_every": exported.save_every,
        "checkpoint_bytes": int(exported.plan["layouts"][0]["checkpoint_bytes"]),
        "step_time_s": exported.plan["layouts"][0]["step_time_s"],
        **({"rehearsal": True} if wanted.cluster.declared_only else {}),
        **wanted.facts,
    }


def absolute(path: Path | None) -> Path | None:
    """A path that means the same on every node."""
    return path.absolute() if path else None
