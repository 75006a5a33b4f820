"""Steps between two checkpoints of a recipe, from the step time that the planner expects."""

from __future__ import annotations

from superpod.collection.recipe_job import job
from superpod.collection.registry import Recipe
from superpod.planner import predict
from superpod.planner.planned_job import PlannedJob

LOST_AT_MOST_S = 30 * 60
"""Seconds of training that a crash may cost. A save delays training by a second or two, a crash repeats the steps
since the last one; at the few failures a day of thousands of GPUs (arXiv:2407.21783, section 3.3.4), half an hour
keeps the sum of both small."""

CADENCES = (10, 20, 50, 100, 200, 500, 1000)
"""Steps between checkpoints, to choose from: round numbers that divide a thousand."""


def save_every(recipe: Recipe, num_nodes: int | None = None) -> int:
    """Steps between checkpoints of a recipe at a size (default: its smallest).

    A declared size has them in its layout file, so that a recipe does not move when the planner learns better; one that
    is planned on the spot takes what the planner expects of it.
    """
    size = recipe.nodes[0] if num_nodes is None else num_nodes
    return recipe.saves[size] if size in recipe.saves else planned(job(recipe, size))


def planned(run: PlannedJob) -> int:
    """Steps between checkpoints of a run, by the planner's step time."""
    return cadence(predict.one(run).step_time_s)


def cadence(step_time_s: float | None) -> int:
    """Steps between checkpoints for a predicted step time in seconds; None = unknown, taken as 20 s."""
    fitting = [steps for steps in CADENCES if steps * (step_time_s or 20) <= LOST_AT_MOST_S]
    return max(fitting, default=CADENCES[0])
