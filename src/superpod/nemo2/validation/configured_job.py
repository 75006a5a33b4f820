"""What a configuration itself says of its run: precision, task, adapters, model. No recipe's name is asked.

For overrides, edited files and NeMo's own recipes: `of_configuration` makes the planner's job from any of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.nemo2.validation.numbers import kind_of
from superpod.nemo2.validation.reading import Reader, name_of
from superpod.planner import hardware
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options, PlannedJob, Task

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.registry import Model

FP8_RECIPES = {"delayed": "fp8ds", "tensorwise": "fp8cs", "blockwise": "fp8bw", "mxfp8": "mxfp8"}
"""fp8_recipe -> the planner's precision."""


def precision_of(partial: run.Partial) -> str:
    """The precision that the plugin really sets, of `hardware.PRECISIONS`; `fp8` = a recipe that is not known."""
    r = Reader(partial)
    if r["trainer.plugins.fp4"]:
        return "nvfp4"
    if r["trainer.plugins.fp8"]:
        return FP8_RECIPES.get(str(r["trainer.plugins.fp8_recipe"]), "fp8")
    word = r["trainer.plugins.precision"] if r.precision_plugin is not None else r["trainer.precision"]
    return kind_of(word)


def task_of(partial: run.Partial) -> str:
    """pretrain, sft, lora or dora: by the function that is called, and the adapters that it is given."""
    if name_of(partial) == "pretrain":
        return "pretrain"
    peft = name_of(getattr(partial, "peft", None))
    return "sft" if not peft else "dora" if peft == "DoRA" else "lora"


def planned_task(partial: run.Partial) -> Task:
    """`task_of` in the planner's words, which has one for all adapters."""
    task = task_of(partial)
    return "pretrain" if task == "pretrain" else "sft" if task == "sft" else "lora"


def adapters(partial: run.Partial, options: Options) -> Options:
    """The options with the adapters that the configuration has; unchanged without any."""
    r = Reader(partial)
    names = r["peft.target_modules"]
    if not isinstance(names, list | tuple) or not names:
        return options
    layers = tuple(dict.fromkeys(str(name).rpartition(".")[2] for name in names))
    dim, dropout = r["peft.dim"], r["peft.dropout"]
    return replace(
        options,
        lora_targets=layers if all(name.isidentifier() for name in layers) else options.lora_targets,
        lora_rank=dim if isinstance(dim, int) and dim > 0 else options.lora_rank,
        lora_dropout=float(dropout) if isinstance(dropout, int | float) and 0 <= dropout < 1 else 0.0,
    )


def shape_of(config: run.Config) -> ModelShape:
    """The planner's shape of a model configuration: ours of the same class, with everything that it sets otherwise.

    Raises:
        UserError: no model here is of that class, or its sizes contradict each other.
    """
    import fiddle as fdl

    from superpod.nemo2.validation import configured_shape

    target = fdl.get_callable(config)
    bases: tuple[Any, ...] = target.__mro__ if isinstance(target, type) else (target,)
    candidates = next((ours for base in bases if (ours := _by_class().get(base))), ())
    if not candidates:
        raise UserError(
            f"the planner has no model of NeMo's {target.__name__}, so that its memory is not known",
            "describe it in shapes/*.toml: docs/extending.md",
        )
    near = min(candidates, key=lambda model: abs(model.shape.layers - (config.num_layers or 0)))
    return configured_shape.changed(near.shape, near.make().config, config)


@cache
def _by_class() -> dict[Any, tuple[Model, ...]]:
    """NeMo's configuration class -> models that are made of it."""
    import fiddle as fdl

    from superpod.collection.registry import models

    known: dict[Any, tuple[Model, ...]] = {}
    for model in models().values():
        target = fdl.get_callable(model.make().config)
        known[target] = (*known.get(target, ()), model)
    return known


def of_configuration(partial: run.Partial, gpu: str) -> PlannedJob:
    """The run that any configuration describes, on nodes of such GPUs.

    Raises:
        UserError: no such GPU, a model that the planner does not know, or sizes that contradict each other.
    """
    from superpod.nemo2 import planned_job
    from superpod.nemo2.build.layout import layout_of

    facts = hardware.builtin()
    node = facts.node(gpu)
    precision, layout, model = precision_of(partial), layout_of(partial), shape_of(partial.model.config)
    base = planned_job.decided(task_of(partial), precision, layout.sharding, model)
    options = planned_job.options_of(partial, replace(base, overlap_grads=_overlaps_grads(partial)))
    planned = PlannedJob(
        model=model,
        node=node,
        fabric=facts.fabric_of(node),
        gpus=partial.trainer.devices * partial.trainer.num_nodes,
        seq=partial.data.seq_length,
        precision=precision,
        layout=layout,
        task=planned_task(partial),
        options=options,
    )
    return planned_job.with_attention(planned)


def _overlaps_grads(partial: run.Partial) -> bool:
    return bool(Reader(partial)["trainer.strategy.ddp.overlap_grad_reduce"])
