"""A recipe at a size that it does not declare: its layout is planned, its batch, learning rate and steps kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from superpod.collection.recipe_job import decided, settled, with_parameters
from superpod.collection.recipe_job import job as job_of
from superpod.collection.registry import Recipe
from superpod.errors import UserError
from superpod.planner import plans
from superpod.planner.planned_job import PlannedJob
from superpod.planner.search import Space, search

MOST_NODES = 8192
LrRule = Literal["sqrt", "linear"]
RULES = {
    "sqrt": "square root of the batch: Adam's noise falls with it (arXiv:2205.10287)",
    "linear": "as the batch: SGD's rule (arXiv:1706.02677), bolder",
}


@dataclass(frozen=True)
class Tuned:
    """A recipe at another size."""

    job: PlannedJob
    """The run, with its layout."""
    nodes: int
    step_time_s: float
    lr: float
    min_lr: float
    warmup_steps: int
    max_steps: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole training."""
        return self.job.tokens * self.max_steps

    @property
    def days(self) -> float:
        """Days that the whole training takes, without restarts."""
        return self.step_time_s * self.max_steps / 86_400


def tune(recipe: Recipe, nodes: int, *, gbs: int | None = None, lr_rule: LrRule = "sqrt") -> Tuned:
    """Plan `recipe` for `nodes` nodes, with a global batch of `gbs` samples (default: its own).

    The tokens of warm-up and training stay; the learning rate follows the batch by `lr_rule`.

    Raises:
        UserError: when no layout is legal and fits; the hint has the nearest sizes that work.
    """
    if not 1 <= nodes <= MOST_NODES:
        raise UserError(f"--nodes is {nodes:,}; it is 1 to {MOST_NODES:,}")
    own = job_of(recipe)
    batch = own.layout.gbs if gbs is None else gbs
    if batch < 1:
        raise UserError(f"--gbs is {batch}; it is 1 or more")
    job = best(recipe, nodes, batch)
    if job is None:
        raise UserError(*refusal(recipe, nodes, batch))
    growth = batch / own.layout.gbs
    scale = math.sqrt(growth) if lr_rule == "sqrt" else growth
    schedule = recipe.schedule
    return Tuned(
        job=job,
        nodes=nodes,
        step_time_s=plans.seconds(job),
        lr=schedule.lr * scale,
        min_lr=schedule.min_lr * scale,
        warmup_steps=max(round(schedule.warmup_steps / growth), 1),
        max_steps=max(round(schedule.max_steps / growth), 1),
    )


def best(recipe: Recipe, nodes: int, gbs: int) -> PlannedJob | None:
    """The recipe at so many nodes in the planner's fastest layout, with what is decided of it; None = none fits."""
    own = job_of(recipe)
    options = decided(recipe.task, recipe.precision, own.layout.sharding, recipe.shape)
    run = own.replace(gpus=nodes * recipe.gpus_per_node, options=options)
    run = run.replace(layout=type(own.layout)(gbs=gbs, sharding=own.layout.sharding))
    fastest = [settled(job) for kind in with_parameters(run) if (job := _fastest(kind))]
    return min(fastest, key=plans.seconds, default=None)


def _fastest(run: PlannedJob) -> PlannedJob | None:
    """The run in the fastest layout that fits; None = none does."""
    try:
        candidates = search(run, Space(sharding=(run.layout.sharding,), tp=(1, 2, 4, 8)))
    except UserError:
        return None
    return candidates.job_at(int(candidates.ranked[0])) if len(candidates.ranked) else None


def _near(sizes: range) -> list[int]:
    """The next few sizes, then only powers of two, because each search takes a second."""
    return [*sizes[:4], *sorted((n for n in sizes[4:] if n & (n - 1) == 0), reverse=sizes.step < 0)]


def refusal(recipe: Recipe, nodes: int, gbs: int) -> tuple[str, str]:
    """The message, and as the next move the nearest sizes at which the recipe can run."""
    below = next((n for n in _near(range(nodes - 1, max(nodes // 2, 0), -1)) if best(recipe, n, gbs)), None)
    above = next((n for n in _near(range(nodes + 1, 2 * nodes + 9)) if best(recipe, n, gbs)), None)
    size = f"{nodes} node{'s' * (nodes > 1)} of {recipe.gpus_per_node} GPUs"
    near = " or ".join(f"--nodes {n}" for n in (below, above) if n)
    return (
        f"no legal layout of {recipe.name} fits {size} at a global batch of {gbs:,} samples of {recipe.seq:,} tokens",
        near or f"it is laid out for {', '.join(map(str, recipe.nodes))} nodes; another --gbs may divide better",
    )
