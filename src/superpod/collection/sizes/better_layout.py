"""Find a faster layout for a recipe with the planner."""

from __future__ import annotations

from dataclasses import replace

from superpod.collection import recipe_job
from superpod.collection.registry import Recipe
from superpod.collection.sizes import sized
from superpod.planner import explain, predict

MIN_GAIN = 0.03
"""Minimum relative reduction of the step time. Smaller ones are below the planner's error."""


def describe_better_layout(recipe: Recipe, num_nodes: int | None = None) -> str:
    """Return a text on the fastest layout, such as `TP2 CP2 SP, mbs 1: 12.1 s per step, 14% less`.

    "" unless it is faster by at least `MIN_GAIN`, or the layout of the recipe is illegal or does not fit.
    """
    nodes = recipe.nodes[0] if num_nodes is None else num_nodes
    best = sized.best_layout(recipe, nodes)
    if best is None or best == recipe.layout(nodes):
        return ""
    prediction = predict.one(recipe_job.job(recipe, nodes))
    better_prediction = predict.one(recipe_job.job(replace(recipe, layouts={nodes: best}), nodes))
    if better_prediction.verdict != "ok" or better_prediction.step_time_s is None:
        return ""
    description = f"{explain.title(best)}: {better_prediction.step_time_s:.3g} s per step"
    if prediction.verdict != "ok" or prediction.step_time_s is None:
        return f"{description}, and it fits"
    saved_fraction = 1 - better_prediction.step_time_s / prediction.step_time_s
    return f"{description}, {saved_fraction:.0%} less" if saved_fraction >= MIN_GAIN else ""
