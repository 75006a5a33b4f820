"""Published measurements of runs (`recipes/published.toml`), for comparison with a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from superpod.common import package_files

if TYPE_CHECKING:
    from superpod.collection.registry import Recipe
    from superpod.planner.planned_job import PlannedJob

TABLE = package_files.included_folder("recipes") / "published.toml"


@dataclass(frozen=True)
class Published:
    """A published throughput of a recipe, with its release and source."""

    recipe: str
    """name of the recipe with the same model, task, GPU and precision"""
    gpus: int
    tokens_per_s_per_gpu: float
    release: str
    source: str
    differs: tuple[str, ...] = ()
    """differences from the run that it is compared with"""


def find_nearest(job: PlannedJob) -> Published | None:
    """Return the published run of the same model, task and GPU that is closest in precision, sequence length and size.

    None if there is no run of that model and task on that GPU.
    """
    key = (job.model.name, job.task, job.node.gpu.name)
    rows = [(run, recipe) for run, recipe in _read_rows() if (recipe.model.name, recipe.task, recipe.gpu) == key]
    if not rows:
        return None

    def distance(row: tuple[Published, Recipe]) -> tuple[bool, float, float]:
        run, recipe = row
        sizes = abs(math.log2(run.gpus / job.gpus))
        return recipe.precision[:3] != job.precision[:3], abs(math.log2(recipe.seq / job.seq)), sizes

    run, recipe = min(rows, key=distance)
    differs = []
    if run.gpus != job.gpus:
        differs.append(f"{run.gpus} GPUs, not {job.gpus}")
    if recipe.precision != job.precision:
        differs.append(f"{recipe.precision}, not {job.precision}")
    if recipe.seq != job.seq:
        differs.append(f"seq {recipe.seq}, not seq {job.seq}")
    return replace(run, differs=tuple(differs))


@cache
def _read_rows() -> list[tuple[Published, Recipe]]:
    """Return the published runs of known recipes, each with its recipe."""
    from superpod.collection import registry
    from superpod.planner.formats.config_files import read_toml

    rows = []
    for name, runs in read_toml(TABLE).items():
        recipe = registry.recipes().get(name)
        if recipe is None:
            continue
        for one in runs:
            source = one["source"].removesuffix("@")
            run = Published(name, one["gpus"], float(one["tokens_per_s_per_gpu"]), one["release"], source)
            rows.append((run, recipe))
    return rows
