"""Check from the plan alone, without NeMo, whether a recipe runs on a GPU or a number of nodes other than its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from superpod.slurm.profiles.profile_checks import Finding

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob
    from superpod.requests.request import Request


def request_findings(request: Request, gpu: str) -> list[Finding]:
    """List why a recipe cannot run on this GPU according to its plan; [] if the request has overrides, because the
    recipe must then be built.
    """
    from superpod.collection import registry

    recipe = registry.find(request.recipe)
    if request.overrides:
        return []
    if recipe.gpu == gpu:
        return list(_memory_finding(request))
    return list(job_findings(request.recipe, request.job(), gpu))


def _memory_finding(request: Request) -> Iterator[Finding]:
    """Report a recipe that exceeds the memory of its own GPU at the requested sequence length, batch size or layout."""
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
        yield Finding(
            f"{request.recipe} on this number of nodes does not fit on {recipe.gpu}: {prediction.reason}", hint
        )


def job_findings(name: str, job: PlannedJob, gpu: str) -> Iterator[Finding]:
    """List why a planned job cannot run on another GPU: precision, layout rules, or memory."""
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
    """Return a hint on how to reduce the memory per GPU; full recomputation is not available with adapters."""
    from superpod.collection.registry import ADAPTERS

    return "more nodes" if job.task in ADAPTERS else "more nodes, or with=full_recompute"


def with_gpu(job: PlannedJob, gpu: str) -> PlannedJob:
    """Return the job on nodes with this GPU."""
    from superpod.planner import hardware

    if job.node.gpu.name == gpu:
        return job
    node = hardware.builtin().node(gpu)
    return job.replace(node=node, fabric=hardware.builtin().fabric_of(node))


def gpu_note(name: str, recipe_gpu: str, gpu: str, own_step_s: float | None, step_s: float | None) -> str:
    """Return a note with the planned step times if a recipe for GPU `recipe_gpu` runs on another GPU; else "".

    Step times in seconds; None if the planner has no estimate.
    """
    if recipe_gpu == gpu or not own_step_s or not step_s:
        return ""
    note = (
        f"this recipe is for {recipe_gpu}: planned {own_step_s:.3g} s per step on {recipe_gpu}, {step_s:.3g} s on {gpu}"
    )
    better_recipe = _recipe_for_gpu(name, recipe_gpu, gpu)
    return f"{note}; {better_recipe} is the recipe for {gpu}" if better_recipe else note


def _recipe_hint(name: str, recipe_gpu: str, gpu: str) -> str:
    """Name the recipe of the same model for another GPU, or the command that lists such recipes."""
    from superpod.collection import registry

    recipe = registry.find(name)
    return _recipe_for_gpu(name, recipe_gpu, gpu) or f"recipes list {recipe.model.name} {recipe.task} {gpu}"


def _recipe_for_gpu(name: str, recipe_gpu: str, gpu: str) -> str:
    from superpod.collection import registry

    same_recipe = name.replace(f"_{recipe_gpu}_", f"_{gpu}_")
    return same_recipe if same_recipe != name and same_recipe in registry.recipes() else ""
