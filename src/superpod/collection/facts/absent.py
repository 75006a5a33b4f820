"""Why there is no recipe of a name that could be one: what its GPU or its kernels refuse at any layout.

`recipes show` and its like take it where a name is not found; docs/planner.md lists the models and GPUs.
"""

from __future__ import annotations

from superpod.collection import declarations
from superpod.collection.recipe_job import decided, with_attention
from superpod.errors import UserError
from superpod.planner import hardware, legality
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob


def refuse(name: str) -> None:
    """Do nothing, unless `name` is that of a model's task on a GPU in a precision that cannot run in any layout.

    Raises:
        UserError: with the rule, and the recipes of the same task that there are.
    """
    for m in declarations.models().values():
        suffix = name.removeprefix(f"{m.name}_")
        if suffix == name:
            continue
        _refuse_precision(m.name, suffix)
        try:
            job = _simplest(m, suffix)
        except UserError:  # another model's name, of which this one's is the beginning
            continue
        # Recomputing shared experts would keep the second rule, and no recipe does that for one precision's sake.
        plain = [rule for rule in legality.violations(job) if rule.rule == "delayed_shared"]
        if broken := legality.layout_independent_violation(job) or next(iter(plain), None):
            raise UserError(f"there is no {name}: {broken.message}", _others(m.name, job) or broken.fix)


def _refuse_precision(model: str, suffix: str) -> None:
    """Do nothing, unless a recipe's name has a GPU, and a precision that this GPU lacks or recipes are not written for.

    Raises:
        UserError: with the precisions that the GPU has, or that recipes are written for.
    """
    match = declarations.NAME.fullmatch(suffix)
    node = hardware.builtin().nodes.get(match["gpu"]) if match else None
    if match is None or node is None or match["precision"] not in hardware.PRECISIONS:
        return
    gpu, precision = node.gpu, match["precision"]
    if precision not in gpu.precisions:
        problem = f"{gpu.name} ({gpu.generation}) has no {precision}; it has {', '.join(gpu.precisions)}"
    elif precision not in declarations.PRECISIONS:
        trained = [name for name in gpu.precisions if name in declarations.PRECISIONS]
        problem = f"no recipe is written for {precision}; those of {gpu.name} train in {', '.join(trained)}"
    else:
        return
    like = [name for name in declarations.recipes() if name.startswith(f"{model}_{suffix[: match.start('gpu')]}")]
    same_gpu = [name for name in like if f"_{match['gpu']}_" in name]
    same_precision = [name for name in like if name.endswith(f"_{precision}")]
    near = (*same_gpu[:2], *same_precision[:1])
    hint = f"{' or '.join(near)} runs" if near else f"`recipes list {match['gpu']}`"
    raise UserError(f"there is no {model}_{suffix}: {problem}", hint)


def _simplest(m: declarations.Model, suffix: str) -> PlannedJob:
    """A run of that name on one node, without any parallelism but data's."""
    facts = declarations.recipe_facts(suffix, "")
    task, precision = facts["task"], facts["precision"]
    shape, node = declarations.shape_for(m, task), hardware.node(facts["gpu"])
    simplest = PlannedJob(
        model=shape,
        node=node,
        fabric=hardware.builtin().fabric_of(node),
        gpus=node.gpus,
        seq=declarations.sequence(m, task, int(facts.get("context_k") or 0)),
        precision=precision,
        layout=Layout(gbs=node.gpus),
        task="lora" if task in declarations.ADAPTERS else "sft" if task == "sft" else "pretrain",
        options=decided(task, precision, "zero1", shape),
    )
    return with_attention(simplest)


def _others(model: str, job: PlannedJob) -> str:
    """Recipes of the same model and task that there are, two at most."""
    task = f"{model}_{job.task}_"
    known = [name for name in declarations.recipes() if name.startswith(task)]
    near = [name for name in known if f"_{job.node.gpu.name}_" in name] or [n for n in known if n.endswith("bf16")]
    return f"{' or '.join(near[:2])} runs" if near else ""
