"""Compares the parameter counts of built models with those of the planner."""

from __future__ import annotations

from superpod.collection.registry import ADAPTERS, Recipe
from superpod.errors import UserError
from superpod.planner import columns, models
from superpod.planner.memory.lora import adapters
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal.proof.resolved import stages

Counts = list[list[int]]
"""For each pipeline rank that was built, the parameters of each model chunk."""
Planned = list[int] | str
"""The planner's parameter count of each pipeline rank that is built ([] if they are not exact), or an error message."""
APPROXIMATE_TOLERANCE = 0.02
"""Allowed relative difference for models that are planned approximately (`ModelShape.approximate`). The bias
of T5's output layer is 0.01 %, Hyena's filters are 0.02 %, the dense layer of BERT's head is 0.6 %, and E5's pooler,
which each of 4 tensor-parallel ranks holds completely, is 1.2 %. For other models, the counts must be equal."""


class Counter:
    """Caches the planner's parameter counts, which thousands of sizes share."""

    def __init__(self) -> None:
        self._planned: dict[object, Planned] = {}

    def count(self, recipe: Recipe, job: PlannedJob) -> Planned:
        """Return the planner's parameter counts for a job of a recipe."""
        key = (recipe.model.name, recipe.task, job.split, job.layout.replace(gbs=1), job.gpus)
        if key not in self._planned:
            self._planned[key] = _count(recipe.task, job)
        return self._planned[key]

    def find_difference(self, recipe: Recipe, job: PlannedJob, built: Counts) -> str | None:
        """Return an error if the planner's counts differ from the parameters of the built model, or None."""
        planned = self.count(recipe, job)
        if isinstance(planned, str):
            return planned
        if not planned:
            return None
        for stage, real, counted in zip(stages(job.layout), map(sum, built), planned, strict=True):
            if is_different(job.model, real, counted):
                return f"pipeline rank {stage} has {real:,} parameters, but the planner counts {counted:,}"
        return None


def is_different(model: models.ModelShape, real: int, count: int) -> bool:
    """Return whether the planner's parameter count of a rank differs from the real one by more than the tolerance."""
    return abs(count - real) > tolerance(model) * real


def tolerance(model: models.ModelShape) -> float:
    """Return the allowed relative difference between the planner's and the real parameter count of a rank."""
    return APPROXIMATE_TOLERANCE if model.approximate else 0.0


def planned_counts(task: str, job: PlannedJob) -> list[int]:
    """Return the planner's parameters of the first, a middle and the last pipeline rank; [] if they are not exact."""
    counts = _count(task, job)
    return [] if isinstance(counts, str) else counts


def _count(task: str, job: PlannedJob) -> Planned:
    """Return the planner's parameters of each pipeline rank that is built, or an error; [] if they are not exact."""
    if task in ADAPTERS and not _counts_adapters_exactly(task, job.model):
        return []
    adapters = _count_adapters(job) if task in ADAPTERS else [0] * job.layout.pp
    try:
        return [
            sum(chunk.total for chunk in job.model.chunk_parameters(job.split, stage)) + adapters[stage]
            for stage in stages(job.layout)
        ]
    except UserError as refused:
        return str(refused)


def _counts_adapters_exactly(task: str, model: models.ModelShape) -> bool:
    """Return whether the planner counts the parameters of adapters exactly.

    It averages over the projections of latent attention and over layers of different widths, and omits DoRA's
    magnitude per output.
    """
    return task == "lora" and not (model.kv_lora or model.runs)


def _count_adapters(job: PlannedJob) -> list[int]:
    """Return the parameters of the LoRA adapters on each pipeline rank."""
    per_stage = adapters(MemoryUnits(job, columns.from_job(job))).dense
    return [round(float(count)) for count in per_stage.reshape(-1)]
