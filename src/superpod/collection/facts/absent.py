"""Explain why no recipe exists for a valid name: no layout works on that GPU or with its kernels.

Used if a name is not found; docs/planner.md lists the models and GPUs concerned.
"""

from __future__ import annotations

from typing import cast

from superpod.collection import declarations
from superpod.collection.recipe_job import default_options, set_unfused_attention
from superpod.errors import UserError
from superpod.planner import hardware, legality
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob, Task


def refuse_absent_recipe(name: str) -> None:
    """Raise UserError if the model, task, GPU and precision in a recipe name cannot run in any layout.

    The message has the violated rule, the hint existing recipes for the same task. Other names are ignored.
    """
    for m in declarations.models().values():
        suffix = name.removeprefix(f"{m.name}_")
        if suffix == name:
            continue
        _refuse_precision(m.name, suffix)
        try:
            job = _build_simplest_job(m, suffix)
        except UserError:  # the name belongs to a model whose name begins with this model's name
            continue
        # Recomputing shared experts would satisfy delayed_shared, but recipes do not do that for one precision.
        delayed_shared = [rule for rule in legality.violations(job) if rule.rule == "delayed_shared"]
        violation = legality.layout_independent_violation(job) or next(iter(delayed_shared), None)
        if violation:
            raise UserError(f"there is no {name}: {violation.message}", _suggest(m.name, job) or violation.fix)


def _refuse_precision(model: str, suffix: str) -> None:
    """Raise UserError for a known precision that the GPU does not support, or for which there are no recipes."""
    match = declarations.NAME.fullmatch(suffix)
    node = hardware.builtin().nodes.get(match["gpu"]) if match else None
    if match is None or node is None or match["precision"] not in hardware.PRECISIONS:
        return
    gpu, precision = node.gpu, match["precision"]
    if precision not in gpu.precisions:
        problem = f"{gpu.name} ({gpu.generation}) does not support {precision}, only {', '.join(gpu.precisions)}"
    elif precision not in declarations.PRECISIONS:
        available_precisions = [name for name in gpu.precisions if name in declarations.PRECISIONS]
        problem = f"there are no recipes for {precision}; those for {gpu.name} use {', '.join(available_precisions)}"
    else:
        return
    same_task = [name for name in declarations.recipes() if name.startswith(f"{model}_{suffix[: match.start('gpu')]}")]
    same_gpu = [name for name in same_task if f"_{match['gpu']}_" in name]
    same_precision = [name for name in same_task if name.endswith(f"_{precision}")]
    closest = (*same_gpu[:2], *same_precision[:1])
    hint = f"use {' or '.join(closest)}" if closest else f"see `recipes list {match['gpu']}`"
    raise UserError(f"there is no {model}_{suffix}: {problem}", hint)


def _build_simplest_job(m: declarations.Model, suffix: str) -> PlannedJob:
    """Return the planner's job for model `m` and the rest of a recipe name, on one node with data parallelism only."""
    facts = declarations.recipe_facts(suffix, "")
    task, precision = facts["task"], facts["precision"]
    shape, node = declarations.shape_for(m, task), hardware.node(facts["gpu"])
    planned_task: Task = "lora" if task in declarations.ADAPTERS else cast("Task", task)
    job = PlannedJob(
        model=shape,
        node=node,
        fabric=hardware.builtin().fabric_of(node),
        gpus=node.gpus,
        seq=declarations.sequence(m, task, int(facts.get("context_k") or 0)),
        precision=precision,
        layout=Layout(gbs=node.gpus),
        task=planned_task,
        options=default_options(task, precision, "zero1", shape),
    )
    return set_unfused_attention(job)


def _suggest(model: str, job: PlannedJob) -> str:
    """Return a hint with at most two existing recipes for the same model and task, or ""."""
    same_task = [name for name in declarations.recipes() if name.startswith(f"{model}_{job.task}_")]
    closest = [name for name in same_task if f"_{job.node.gpu.name}_" in name]
    if not closest:
        closest = [name for name in same_task if name.endswith("bf16")]
    return f"use {' or '.join(closest[:2])}" if closest else ""
