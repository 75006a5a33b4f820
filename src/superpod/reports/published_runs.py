"""Runs that others measured and published, and the one nearest to a run: `recipes/published.toml`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from superpod.common import package_files

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob

TABLE = package_files.included("recipes") / "published.toml"


@dataclass(frozen=True)
class Published:
    """A measured run of others."""

    recipe: str
    """the recipe of ours that it is a run of: model, task, GPU and precision"""
    gpus: int
    tokens_per_s_per_gpu: float
    release: str
    source: str
    differs: tuple[str, ...] = ()
    """in what it differs from the run that it is nearest to"""


def find_nearest(job: PlannedJob) -> Published | None:
    """The published run of the same model, task and GPU that is nearest: in precision, sequence, then size.

    None where there is none of that model and task on that GPU: a run on another one tells little.
    """
    rows = [row for row in _rows() if (row.model, row.task, row.gpu) == (job.model.name, job.task, job.node.gpu.name)]
    if not rows:
        return None

    def distance(row: _Row) -> tuple[bool, float, float]:
        sizes = abs(math.log2(row.run.gpus / job.gpus))
        return row.precision[:3] != job.precision[:3], abs(math.log2(row.seq / job.seq)), sizes

    row = min(rows, key=distance)
    pairs = (
        (f"{row.run.gpus} GPUs", f"{job.gpus}"),
        (row.precision, job.precision),
        (f"seq {row.seq}", f"seq {job.seq}"),
    )
    differs = tuple(f"{theirs}, not {ours}" for theirs, ours in pairs if theirs.removesuffix(" GPUs") != ours)
    return Published(**{**vars(row.run), "differs": differs})


@dataclass(frozen=True)
class _Row:
    """A published run, and what its recipe's name says."""

    run: Published
    model: str
    task: str
    gpu: str
    precision: str
    seq: int


@cache
def _rows() -> list[_Row]:
    from superpod.collection import registry
    from superpod.planner.formats.files import read_toml

    known = registry.recipes()
    rows = []
    for name, runs in read_toml(TABLE).items():
        if (recipe := known.get(name)) is None:
            continue
        for one in runs:
            run = Published(
                name, one["gpus"], float(one["tokens_per_s_per_gpu"]), one["release"], one["source"].removesuffix("@")
            )
            rows.append(_Row(run, recipe.model.name, recipe.task, recipe.gpu, recipe.precision, recipe.seq))
    return rows
