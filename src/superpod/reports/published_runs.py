"""Published measurements of runs (`recipes/published.toml`), for comparison with a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from superpod.common import package_files

if TYPE_CHECKING:
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
    rows = [
        row for row in _read_rows() if (row.model, row.task, row.gpu) == (job.model.name, job.task, job.node.gpu.name)
    ]
    if not rows:
        return None

    def distance(row: _PublishedRow) -> tuple[bool, float, float]:
        sizes = abs(math.log2(row.run.gpus / job.gpus))
        return row.precision[:3] != job.precision[:3], abs(math.log2(row.seq / job.seq)), sizes

    row = min(rows, key=distance)
    differs = []
    if row.run.gpus != job.gpus:
        differs.append(f"{row.run.gpus} GPUs, not {job.gpus}")
    if row.precision != job.precision:
        differs.append(f"{row.precision}, not {job.precision}")
    if row.seq != job.seq:
        differs.append(f"seq {row.seq}, not seq {job.seq}")
    return Published(**{**vars(row.run), "differs": tuple(differs)})


@dataclass(frozen=True)
class _PublishedRow:
    """A published run, with the facts of its recipe."""

    run: Published
    model: str
    task: str
    gpu: str
    precision: str
    seq: int


@cache
def _read_rows() -> list[_PublishedRow]:
    from superpod.collection import registry
    from superpod.planner.formats.config_files import read_toml

    known_recipes = registry.recipes()
    rows = []
    for name, runs in read_toml(TABLE).items():
        recipe = known_recipes.get(name)
        if recipe is None:
            continue
        for one in runs:
            source = one["source"].removesuffix("@")
            run = Published(name, one["gpus"], float(one["tokens_per_s_per_gpu"]), one["release"], source)
            rows.append(_PublishedRow(run, recipe.model.name, recipe.task, recipe.gpu, recipe.precision, recipe.seq))
    return rows
