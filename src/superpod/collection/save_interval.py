"""Choose the number of steps between two checkpoints from the predicted step time."""

from __future__ import annotations

from superpod.collection.recipe_job import job
from superpod.collection.registry import Recipe
from superpod.planner import predict
from superpod.planner.planned_job import PlannedJob

MAX_LOST_S = 30 * 60
"""Maximum training time in seconds that a crash may cost. A save delays training by one or two seconds; after a crash,
the steps since the last save are repeated. At a few failures per day on thousands of GPUs (arXiv:2407.21783, section
3.3.4), an interval of half an hour keeps the sum of both small."""

INTERVALS = (10, 20, 50, 100, 200, 500, 1000)
"""Allowed steps between checkpoints: round numbers that divide 1,000."""


def save_every(recipe: Recipe, num_nodes: int | None = None) -> int:
    """Return the steps between two checkpoints of a recipe on `num_nodes` nodes (default: the smallest declared size).

    For declared sizes, they are in the layout file, so that a recipe does not change with the planner. For other sizes,
    they are computed from the predicted step time.
    """
    size = recipe.nodes[0] if num_nodes is None else num_nodes
    return recipe.saves[size] if size in recipe.saves else plan_interval(job(recipe, size))


def plan_interval(run: PlannedJob) -> int:
    """Return the steps between two checkpoints for the predicted step time of a job."""
    return choose_interval(predict.one(run).step_time_s)


def choose_interval(step_time_s: float | None) -> int:
    """Return the steps between two checkpoints for a step time in seconds (None: 20 s)."""
    short_enough = [steps for steps in INTERVALS if steps * (step_time_s or 20) <= MAX_LOST_S]
    return max(short_enough, default=INTERVALS[0])
