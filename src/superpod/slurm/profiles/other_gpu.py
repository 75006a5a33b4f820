"""A recipe on a cluster with another GPU, or at another size, than it is made for: what its plan says, without NeMo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from superpod.slurm.profiles.profile_checks import Finding

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob
    from superpod.requests.request import Request


def request_findings(request: Request, gpu: str) -> list[Finding]:
    """What speaks against a recipe on this GPU, by its plan alone; [] = nothing, or it has changes to be built."""
    from superpod.collection import registry

    recipe = registry.find(request.recipe)
    if request.overrides:
        return []
    if recipe.gpu == gpu:
        return list(_memory_finding(request))
    return list(job_findings(request.recipe, request.job(), gpu))


def _memory_finding(request: Request) -> Iterator[Finding]:
    """That a recipe at another length, batch or layout than it declares does not fit its own GPU any more."""
    from superpod.collection.sizes import better_layout
    from superpod.collection.sizes.sized import SizedRecipe
    from superpod.planner import predict

    recipe = request.sized()
    if not isinstance(recipe, SizedRecipe):
        return
    prediction = predict.one(request.job())
    if prediction.verdict == "oom":
        better = better_layout.of(recipe)
        yield Finding(
            f"{request.recipe} does not fit {recipe.gpu} so: {prediction.reason}",
            f"--layout auto takes {better}" if better else memory_hint(request.job()),
        )


def job_findings(name: str, planned: PlannedJob, gpu: str) -> Iterator[Finding]:
    """What speaks against a recipe's planned job on another GPU than its own: precision, a rule, memory."""
    from superpod.planner import legality, predict

    own, there = planned.node.gpu.name, with_gpu(planned, gpu)
    precisions = there.node.gpu.precisions
    if planned.precision not in precisions:
        yield Finding(f"{gpu} has no {planned.precision}: it has {', '.join(precisions)}", _recipe_hint(name, own, gpu))
        return
    for violation in legality.violations(there):
        yield Finding(f"a recipe for {own} cannot run on {gpu}: {violation.message}", _recipe_hint(name, own, gpu))
    prediction = predict.one(there)
    if prediction.verdict == "oom":
        yield Finding(f"a recipe for {own} does not fit {gpu}: {prediction.reason}", _recipe_hint(name, own, gpu))


def memory_hint(planned: PlannedJob) -> str:
    """What leaves a run more memory; adapters cannot have full recomputation."""
    from superpod.collection.registry import ADAPTERS

    return "more nodes" if planned.task in ADAPTERS else "more nodes, or with=full_recompute"


def with_gpu(planned: PlannedJob, gpu: str) -> PlannedJob:
    """The job on nodes with this GPU, whatever GPU its recipe is for."""
    from superpod.planner import hardware

    if planned.node.gpu.name == gpu:
        return planned
    node = hardware.builtin().node(gpu)
    return planned.replace(node=node, fabric=hardware.builtin().fabric_of(node))


def gpu_note(name: str, own: str, gpu: str, own_step_s: float | None, step_s: float | None) -> str:
    """That a recipe for GPU `own` runs on another one, with the seconds of a step planned on both; "" elsewhere.

    None = the planner has no figure.
    """
    if own == gpu or not own_step_s or not step_s:
        return ""
    better = _same_recipe(name, own, gpu)
    made = f": {better} is made for it" if better else ""
    return f"planned for {own}, {own_step_s:.3g} s a step; on {gpu} {step_s:.3g} s{made}"


def _recipe_hint(name: str, own: str, gpu: str) -> str:
    """The recipe of that name for another GPU, where it exists, or how to find one."""
    from superpod.collection import registry

    recipe = registry.find(name)
    return _same_recipe(name, own, gpu) or f"recipes list {recipe.model.name} {recipe.task} {gpu}"


def _same_recipe(name: str, own: str, gpu: str) -> str:
    from superpod.collection import registry

    same = name.replace(f"_{own}_", f"_{gpu}_")
    return same if same != name and same in registry.recipes() else ""
