"""A configuration as the planner's `PlannedJob`: what it says of precision, task, adapters, model and layout.

`of_partial` takes what the configuration leaves open from its recipe; `of_configuration` needs no recipe, for edited
files and NeMo's own recipes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from superpod.collection.recipe_job import decided, job, with_attention
from superpod.errors import UserError
from superpod.nemo2.validation import configured_shape
from superpod.nemo2.validation.numbers import kind_of
from superpod.nemo2.validation.reading import Reader, name_of
from superpod.planner import hardware
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options, PlannedJob, Task

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.registry import Model, Recipe

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
    from superpod.nemo2.build.layout import layout_of

    facts = hardware.builtin()
    node = facts.node(gpu)
    precision, layout, model = precision_of(partial), layout_of(partial), shape_of(partial.model.config)
    base = decided(task_of(partial), precision, layout.sharding, model)
    options = options_of(partial, replace(base, overlap_grads=_overlaps_grads(partial)))
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
    return with_attention(planned)


def _overlaps_grads(partial: run.Partial) -> bool:
    return bool(Reader(partial)["trainer.strategy.ddp.overlap_grad_reduce"])


def of_partial(partial: run.Partial, recipe: Recipe) -> PlannedJob:
    """The run that a built recipe describes, overrides included.

    Raises:
        UserError: when its model's sizes contradict each other.
    """
    from superpod.nemo2.build.layout import layout_of

    base = job(recipe)
    precision, task = precision_of(partial), task_of(partial)
    model = configured_shape.changed(base.model, recipe.model.make().config, partial.model.config)
    layout = layout_of(partial)
    planned = base.replace(
        model=model,
        gpus=partial.trainer.devices * partial.trainer.num_nodes,
        seq=partial.data.seq_length,
        layout=layout,
        precision=precision,
        task=planned_task(partial),
        options=options_of(partial, decided(task, precision, layout.sharding, model)),
    )
    return with_attention(planned)


def options_of(partial: run.Partial, base: Options) -> Options:
    """What a configuration says of the planner's options; `base` where it says nothing."""
    r = Reader(partial)
    config, plugin = partial.model.config, r.precision_plugin
    fused = bool(r["model.config.cross_entropy_loss_fusion"])
    gathers = getattr(plugin, "fp8_param_gather", base.fp8_params) or getattr(plugin, "fp8_params", False)
    eight = precision_of(partial) not in ("bf16", "fp16", "fp32")
    callbacks = partial.trainer.callbacks or []
    offload = r["optim.config.optimizer_offload_fraction"] if r["optim.config.optimizer_cpu_offload"] else 0.0
    return replace(
        adapters(partial, base),
        grads="bf16" if r["trainer.plugins.grad_reduce_in_fp32"] is False else "fp32",  # it overwrites that of ddp
        fp8_params=bool(gathers) and eight,
        **_overlaps_of(partial, base),
        offload=float(offload or 0),
        optimizer_instances=r["trainer.strategy.num_distributed_optimizer_instances"] or 1,
        moments="bf16" if "bfloat16" in str(r["optim.config.exp_avg_dtype"]) else "fp32",
        fused_loss=fused,
        loss_impl=(r["model.config.cross_entropy_fusion_impl"] or "native") if fused else "native",
        deepep=bool(r["model.config.moe_enable_deepep"]) or any("DeepEP" in _class_of(c) for c in callbacks),
        cp_comm=_cp_comm(config),
        cuda_graphs=records_graphs(config),
        deterministic=bool(r["model.config.deterministic_mode"]),
        hidden_dropout=float(r["model.config.hidden_dropout"] or 0),
        attention_dropout=float(r["model.config.attention_dropout"] or 0),
    )


def _class_of(config: run.Config) -> str:
    import fiddle as fdl

    return getattr(fdl.get_callable(config), "__name__", "") if isinstance(config, fdl.Buildable) else ""


def _cp_comm(config: run.Config) -> Literal["p2p", "a2a", "all_gather"]:
    """How context parallelism passes keys and values; Megatron's default is a ring."""
    given = getattr(config, "cp_comm_type", None)
    kinds = given if isinstance(given, list) else [given]
    if "all_gather" in kinds:
        return "all_gather"
    return "a2a" if "a2a" in kinds else "p2p"


def records_graphs(config: run.Config) -> bool:
    """Whether CUDA graphs are recorded: three fields of Megatron-Core 0.15.3 say so (transformer_config.py)."""
    implementation = getattr(config, "cuda_graph_impl", "none")
    recorded = getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False)
    return bool(recorded) or implementation not in (None, "none")


def _overlaps_of(partial: run.Partial, base: Options) -> dict[str, bool]:
    """What NeMo's callback overlaps on GPUs; it has the last word on parameters and tensor parallelism."""
    strategy = partial.trainer.strategy
    callback = next((c for c in partial.trainer.callbacks or [] if hasattr(c, "tp_comm_overlap")), None)
    if callback is None:
        return {
            "overlap_params": bool(Reader(partial)["trainer.strategy.ddp.overlap_param_gather"]),
            "overlap_tp": False,
        }
    within = strategy.tensor_model_parallel_size > 1 and strategy.sequence_parallel
    return {
        "overlap_params": callback.overlap_param_gather is not False,
        "overlap_tp": bool(callback.tp_comm_overlap) if within else base.overlap_tp,
    }
