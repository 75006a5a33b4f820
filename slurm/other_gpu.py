"""A recipe on a cluster with another GPU than it is named for: what the plan says of it, before NeMo is imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from superpod.slurm.profile_checks import Finding

if TYPE_CHECKING:
    from superpod.lifecycle.request import Request
    from superpod.planner.planned_job import PlannedJob


def of_request(request: Request, gpu: str) -> list[Finding]:
    """What speaks against a recipe on another GPU, by its plan alone; [] = nothing, or it has changes to be built."""
    from superpod.recipes import planned_job, registry

    recipe = registry.find(request.recipe)
    if recipe.gpu == gpu or request.overrides:
        return []
    return list(of_job(request.recipe, planned_job.job(recipe, request.num_nodes), gpu))


def of_job(name: str, planned: PlannedJob, gpu: str) -> Iterator[Finding]:
    """What speaks against a recipe's planned job on another GPU than its own: precision, a rule, memory."""
    from superpod.planner import hardware, legality, predict

    facts, own = hardware.builtin(), planned.node.gpu.name
    node = facts.node(gpu)
    if planned.precision not in node.gpu.precisions:
        yield Finding(
            f"{gpu} has no {planned.precision}: it has {', '.join(node.gpu.precisions)}", _instead(name, own, gpu)
        )
        return
    there = planned.replace(node=node, fabric=facts.fabric_of(node))
    for violation in legality.violations(there):
        yield Finding(f"a recipe for {own} cannot run on {gpu}: {violation.message}", _instead(name, own, gpu))
    prediction = predict.one(there)
    if prediction.verdict == "oom":
        yield Finding(f"a recipe for {own} does not fit {gpu}: {prediction.reason}", _instead(name, own, gpu))


def _instead(name: str, own: str, gpu: str) -> str:
    """The recipe of that name for another GPU, where it exists, or how to find one."""
    from superpod.recipes import registry

    recipe = registry.find(name)
    same = name.replace(f"_{own}_", f"_{gpu}_")
    if same != name and same in registry.recipes():
        return same
    return f"recipes list {recipe.model.name} {recipe.task} {gpu}"
