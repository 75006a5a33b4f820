"""Plan recipes for numbers of nodes that they do not declare."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from superpod.collection.recipe_job import default_options, parameter_variants, resolve_parameters
from superpod.collection.recipe_job import job as recipe_job
from superpod.collection.registry import Recipe
from superpod.errors import UserError, counted
from superpod.planner import plans
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.planner.search import Space, search

MAX_NODES = 8192
LrRule = Literal["sqrt", "linear"]
LR_RULES = {
    "sqrt": "proportional to the square root of the batch size, for Adam (arXiv:2205.10287)",
    "linear": "proportional to the batch size, for SGD (arXiv:1706.02677); more aggressive",
}


@dataclass(frozen=True)
class TunedRecipe:
    """Layout, learning rate and steps of a recipe for another number of nodes."""

    job: PlannedJob
    """The job with the planned layout."""
    nodes: int
    step_time_s: float
    lr: float
    min_lr: float
    warmup_steps: int
    max_steps: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the training."""
        return self.job.tokens * self.max_steps

    @property
    def days(self) -> float:
        """Duration of the training in days, without restarts."""
        return self.step_time_s * self.max_steps / 86_400


def tune(recipe: Recipe, nodes: int, *, gbs: int | None = None, lr_rule: LrRule = "sqrt") -> TunedRecipe:
    """Return a recipe planned for `nodes` nodes and a global batch of `gbs` samples (default: that of the recipe).

    The tokens of warm-up and training stay the same. `lr_rule` scales the learning rate with the batch size.

    Raises:
        UserError: no legal layout fits; the hint has the nearest sizes that work.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise UserError(f"--nodes is {nodes:,}; it must be between 1 and {MAX_NODES:,}")
    declared_job = recipe_job(recipe)
    batch = declared_job.layout.gbs if gbs is None else gbs
    if batch < 1:
        raise UserError(f"--gbs is {batch}; it must be at least 1")
    job = plan_job(recipe, nodes, batch)
    growth = batch / declared_job.layout.gbs
    scale = math.sqrt(growth) if lr_rule == "sqrt" else growth
    schedule = recipe.schedule
    return TunedRecipe(
        job=job,
        nodes=nodes,
        step_time_s=plans.seconds(job),
        lr=schedule.lr * scale,
        min_lr=schedule.min_lr * scale,
        warmup_steps=max(round(schedule.warmup_steps / growth), 1),
        max_steps=max(round(schedule.max_steps / growth), 1),
    )


def plan_job(recipe: Recipe, nodes: int, gbs: int) -> PlannedJob:
    """Return the result of `best_job`. Raises UserError, with the nearest sizes that work, if no layout fits."""
    job = best_job(recipe, nodes, gbs)
    if job is None:
        raise UserError(*explain_no_layout(recipe, nodes, gbs))
    return job


def best_job(recipe: Recipe, nodes: int, gbs: int) -> PlannedJob | None:
    """Return the recipe's job on `nodes` nodes with the planner's fastest layout; None if no layout fits."""
    declared_job = recipe_job(recipe)
    sharding = declared_job.layout.sharding
    job = declared_job.replace(
        gpus=nodes * recipe.gpus_per_node,
        options=default_options(recipe.task, recipe.precision, sharding, recipe.shape),
        layout=Layout(gbs=gbs, sharding=sharding),
    )
    candidates = [_find_fastest(variant) for variant in parameter_variants(job)]
    resolved_jobs = [resolve_parameters(candidate) for candidate in candidates if candidate]
    return min(resolved_jobs, key=plans.seconds, default=None)


def _find_fastest(run: PlannedJob) -> PlannedJob | None:
    """Return the job with the fastest layout that fits, or None."""
    try:
        candidates = search(run, Space(sharding=(run.layout.sharding,), tp=(1, 2, 4, 8)))
    except UserError:
        return None
    return candidates.job_at(int(candidates.ranked[0])) if len(candidates.ranked) else None


def _list_sizes_to_try(sizes: range) -> list[int]:
    """Return the first four sizes, and of the others the powers of two, because each search takes a second."""
    return [*sizes[:4], *sorted((n for n in sizes[4:] if n & (n - 1) == 0), reverse=sizes.step < 0)]


def explain_no_layout(recipe: Recipe, nodes: int, gbs: int) -> tuple[str, str]:
    """Return (message, hint) for a size without a legal layout; the hint has the nearest sizes that work."""
    smaller = _list_sizes_to_try(range(nodes - 1, max(nodes // 2, 0), -1))
    larger = _list_sizes_to_try(range(nodes + 1, 2 * nodes + 9))
    smaller_size = next((n for n in smaller if best_job(recipe, n, gbs)), None)
    larger_size = next((n for n in larger if best_job(recipe, n, gbs)), None)
    hint = " or ".join(f"--nodes {n}" for n in (smaller_size, larger_size) if n)
    if not hint:
        declared_sizes = ", ".join(map(str, recipe.nodes))
        hint = f"the recipe declares layouts for {declared_sizes} nodes; another --gbs may have more divisors"
    message = (
        f"no legal layout of {recipe.name} fits {counted(nodes, 'node')} of {recipe.gpus_per_node} GPUs with a global "
        f"batch of {gbs:,} samples of {recipe.seq:,} tokens"
    )
    return message, hint
