"""A recipe on a cluster with another GPU, or at another size, than it is made for: what its plan says, without NeMo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from superpod.slurm.profile_checks import Finding

if TYPE_CHECKING:
    from superpod.lifecycle.request import Request
    from superpod.planner.planned_job import PlannedJob


def of_request(request: Request, gpu: str) -> list[Finding]:
    """What speaks against a recipe on this GPU, by its plan alone; [] = nothing, or it has changes to be built."""
    from superpod.recipes import registry

    recipe = registry.find(request.recipe)
    if request.overrides:
        return []
    if recipe.gpu == gpu:
        return list(_of_size(request))
    return list(of_job(request.recipe, request.job(), gpu))


def _of_size(request: Request) -> Iterator[Finding]:
    """That a recipe at another length, batch or layout than it declares does not fit its own GPU any more."""
    from superpod.planner import predict
    from superpod.recipes.sizes import better_layout
    from superpod.recipes.sizes.sized import SizedRecipe

    recipe = request.sized()
    if not isinstance(recipe, SizedRecipe):
        return
    prediction = predict.one(request.job())
    if prediction.verdict == "oom":
        better = better_layout.of(recipe)
        yield Finding(
            f"{request.recipe} does not fit {recipe.gpu} so: {prediction.reason}",
            f"--layout auto takes {better}" if better else "more nodes, or with=full_recompute",
        )


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
