"""Why there is no recipe of a name that could be one: what Transformer Engine's kernels refuse at any layout.

`recipes show` and its like take it where a name is not found; docs/planner.md lists the models and GPUs.
"""

from __future__ import annotations

from superpod.errors import UserError
from superpod.planner import hardware, legality
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.recipes import registry
from superpod.recipes.planned_job import decided, with_attention

ALONE = ("attention_backend", "fp8_weights", "precision")
"""Rules that no layout keeps, if the simplest one breaks them."""


def refuse(name: str) -> None:
    """Do nothing, unless `name` is that of a model's task on a GPU in a precision that cannot run in any layout.

    Raises:
        UserError: with the rule, and the recipes of the same task that there are.
    """
    for m in registry.models().values():
        suffix = name.removeprefix(f"{m.name}_")
        if suffix == name:
            continue
        try:
            job = _simplest(m, suffix)
        except UserError:  # another model's name, of which this one's is the beginning
            continue
        for broken in legality.violations(job):
            if broken.rule in ALONE:
                raise UserError(f"there is no {name}: {broken.message}", _others(m.name, job) or broken.fix)


def _simplest(m: registry.Model, suffix: str) -> PlannedJob:
    """A run of that name on one node, without any parallelism but data's."""
    facts = registry.recipe_facts(suffix, "")
    task, precision = facts["task"], facts["precision"]
    shape, node = registry.shape_for(m, task), hardware.node(facts["gpu"])
    simplest = PlannedJob(
        model=shape,
        node=node,
        fabric=hardware.builtin().fabric_of(node),
        gpus=node.gpus,
        seq=registry.sequence(m, task, int(facts.get("context_k") or 0)),
        precision=precision,
        layout=Layout(gbs=node.gpus),
        task="lora" if task in registry.ADAPTERS else "sft" if task == "sft" else "pretrain",
        options=decided(task, precision, "zero1", shape),
    )
    return with_attention(simplest)


def _others(model: str, job: PlannedJob) -> str:
    """Recipes of the same model and task that there are, two at most."""
    task = f"{model}_{job.task}_"
    known = [name for name in registry.recipes() if name.startswith(task)]
    near = [name for name in known if f"_{job.node.gpu.name}_" in name] or [n for n in known if n.endswith("bf16")]
    return f"{' or '.join(near[:2])} runs" if near else ""
