"""Compares the parameters of built models with the planner's."""

from __future__ import annotations

from superpod.collection.registry import ADAPTERS, Recipe
from superpod.errors import UserError
from superpod.planner import columns, models
from superpod.planner.memory.lora import adapters
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal.proof.resolved import stages

Counts = list[list[int]]
"""Of each pipeline rank that was built, the parameters of each of its chunks."""
Planned = list[int] | str
"""What the planner counts of each pipeline rank that is built, [] where not exactly, or why it cannot."""
MOST_OF_APPROXIMATE = 0.02
"""Share by which a pipeline rank of a model that is planned approximately (`ModelShape.approximate`) may differ: T5's
bias of the head is 0.01 %, Hyena's filters 0.02 %, the dense layer of BERT's head 0.6 %, E5's pooler, whole on each of
4 ranks of tensor parallelism, 1.2 %. Others may not differ."""


class Counter:
    """Remembers what the planner counts: thousands of sizes share it."""

    def __init__(self) -> None:
        self._planned: dict[object, Planned] = {}

    def counted(self, recipe: Recipe, job: PlannedJob) -> Planned:
        """What the planner counts of a recipe."""
        if recipe.task in ADAPTERS and not _adapters_known(recipe.task, job.model):
            return []
        key = (recipe.model.name, recipe.task, job.split, job.layout.replace(gbs=1), job.gpus)
        if key not in self._planned:
            self._planned[key] = _planned(recipe.task, job)
        return self._planned[key]

    def difference(self, recipe: Recipe, job: PlannedJob, built: Counts) -> str:
        """The pipeline rank for which the planner counts other parameters than its model has; "" if there is none."""
        planned = self.counted(recipe, job)
        if isinstance(planned, str):
            return planned
        if not planned:
            return ""
        for stage, real, counted in zip(stages(job.layout), map(sum, built), planned, strict=True):
            if differ(job.model, real, counted):
                return f"pipeline rank {stage} holds {real:,} parameters, and the planner counts {counted:,}"
        return ""


def differ(model: models.ModelShape, real: int, counted: int) -> bool:
    """Whether a built rank has other parameters than the planner counts."""
    return abs(counted - real) > tolerance(model) * real


def tolerance(model: models.ModelShape) -> float:
    """Share of its parameters by which a built rank may differ."""
    return MOST_OF_APPROXIMATE if model.approximate else 0.0


def planned(task: str, job: PlannedJob) -> list[int]:
    """What the planner counts of the first, a middle and the last pipeline rank; [] where it does not count exactly."""
    if task in ADAPTERS and not _adapters_known(task, job.model):
        return []
    counted = _planned(task, job)
    return [] if isinstance(counted, str) else counted


def _planned(task: str, job: PlannedJob) -> Planned:
    """What the planner counts of each pipeline rank, or why it cannot."""
    extra = _adapters(job) if task in ADAPTERS else [0] * job.layout.pp
    try:
        return [
            sum(chunk.total for chunk in job.model.chunk_parameters(job.split, stage)) + extra[stage]
            for stage in stages(job.layout)
        ]
    except UserError as refused:
        return str(refused)


def _adapters_known(task: str, model: models.ModelShape) -> bool:
    """Whether the planner counts the adapters of this recipe exactly.

    It averages over latent attention's projections and over layers of different widths, and it leaves out DoRA's
    magnitude per output.
    """
    return task == "lora" and not (model.kv_lora or model.runs)


def _adapters(job: PlannedJob) -> list[int]:
    """Parameters of the LoRA adapters on each pipeline rank."""
    per_stage = adapters(MemoryUnits(job, columns.from_job(job))).dense
    return [round(float(count)) for count in per_stage.reshape(-1)]
