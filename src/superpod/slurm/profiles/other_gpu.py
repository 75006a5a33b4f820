"""Checks from the plan alone, without NeMo, whether a recipe can run on a different GPU or number of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from superpod.collection import registry
from superpod.slurm.profiles.profile_checks import Finding

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob
    from superpod.requests.request import Request


def request_findings(request: Request, gpu: str) -> list[Finding]:
    """Return the problems of a recipe on a GPU type according to its plan.

    With overrides, return []: the recipe must then be built before it is checked.
    """
    recipe = registry.find(request.recipe)
    if request.overrides:
        return []
    if recipe.gpu == gpu:
        return list(_memory_finding(request))
    return list(job_findings(request.recipe, request.job(), gpu))


def _memory_finding(request: Request) -> Iterator[Finding]:
    """Yield a finding if a recipe exceeds the memory of its own GPU at a requested size that it does not declare."""
    from superpod.collection.sizes import better_layout
    from superpod.collection.sizes.sized import SizedRecipe
    from superpod.planner import predict

    recipe = request.sized_recipe()
    if not isinstance(recipe, SizedRecipe):
        return
    prediction = predict.one(request.job())
    if prediction.verdict == "oom":
        better_text = better_layout.describe_better_layout(recipe)
        hint = f"--layout auto selects {better_text}" if better_text else memory_hint(request.job())
        yield Finding(f"{request.recipe} does not fit on {recipe.gpu} at the requested size: {prediction.reason}", hint)


def job_findings(name: str, job: PlannedJob, gpu: str) -> Iterator[Finding]:
    """Yield a finding for each reason why a planned job cannot run on another GPU: precision, layout rules, memory."""
    from superpod.planner import legality, predict

    own, there = job.node.gpu.name, with_gpu(job, gpu)
    precisions = there.node.gpu.precisions
    if job.precision not in precisions:
        message = f"{gpu} does not support {job.precision}, only {', '.join(precisions)}"
        yield Finding(message, _recipe_hint(name, own, gpu))
        return
    for violation in legality.violations(there):
        yield Finding(f"a recipe for {own} cannot run on {gpu}: {violation.message}", _recipe_hint(name, own, gpu))
    prediction = predict.one(there)
    if prediction.verdict == "oom":
        yield Finding(f"a recipe for {own} does not fit on {gpu}: {prediction.reason}", _recipe_hint(name, own, gpu))


def memory_hint(job: PlannedJob) -> str:
    """Return a hint for reducing the memory per GPU; it includes full recomputation, except for adapters."""
    from superpod.collection.registry import ADAPTERS

    return "use more nodes" if job.task in ADAPTERS else "use more nodes, or with=full_recompute"


def with_gpu(job: PlannedJob, gpu: str) -> PlannedJob:
    """Return a copy of a planned job on nodes with the GPU type `gpu`."""
    from superpod.planner import hardware

    if job.node.gpu.name == gpu:
        return job
    node = hardware.builtin().node(gpu)
    return job.replace(node=node, fabric=hardware.builtin().fabric_of(node))


def gpu_note(name: str, recipe_gpu: str, gpu: str, own_step_s: float | None, step_s: float | None) -> str:
    """Return a note with both planned step times if a recipe runs on a GPU other than its own; otherwise "".

    Args:
        name: name of the recipe.
        recipe_gpu: GPU type of the recipe.
        gpu: GPU type of the cluster.
        own_step_s: planned step time on `recipe_gpu` in seconds; None = unknown, so that no note is returned.
        step_s: the same on `gpu`.
    """
    if recipe_gpu == gpu or not own_step_s or not step_s:
        return ""
    note = f"the recipe is for {recipe_gpu}: planned step time {own_step_s:.3g} s there, {step_s:.3g} s on {gpu}"
    better_recipe = _recipe_for_gpu(name, recipe_gpu, gpu)
    return f"{note}; {better_recipe} is the recipe for {gpu}" if better_recipe else note


def _recipe_hint(name: str, recipe_gpu: str, gpu: str) -> str:
    """Return the name of the same recipe for GPU `gpu`, or a command that lists similar recipes."""
    recipe = registry.find(name)
    return _recipe_for_gpu(name, recipe_gpu, gpu) or f"recipes list {recipe.model.name} {recipe.task} {gpu}"


def _recipe_for_gpu(name: str, recipe_gpu: str, gpu: str) -> str:
    """Return the name of the same recipe for GPU `gpu`; "" if there is none."""
    same_recipe = name.replace(f"_{recipe_gpu}_", f"_{gpu}_")
    return same_recipe if same_recipe != name and same_recipe in registry.recipes() else ""
