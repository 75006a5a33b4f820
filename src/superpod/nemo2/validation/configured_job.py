"""Read the planner's `PlannedJob` from a built configuration: precision, task, adapters, model and layout.

`job_from_partial` takes unset values from the recipe. `job_from_configuration` needs no recipe; it is for edited files
and NeMo's own recipes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from superpod.collection.recipe_job import default_options, job, set_unfused_attention
from superpod.errors import UserError
from superpod.nemo2.validation import configured_shape
from superpod.nemo2.validation.number_formats import number_format
from superpod.nemo2.validation.reading import Reader, class_name
from superpod.planner import hardware
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options, PlannedJob, Task

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.registry import Model, Recipe

FP8_RECIPES = {"delayed": "fp8ds", "tensorwise": "fp8cs", "blockwise": "fp8bw", "mxfp8": "mxfp8"}
"""NeMo's fp8_recipe -> the planner's precision."""


def read_precision(partial: run.Partial) -> str:
    """Return the precision of a configuration: one of `hardware.PRECISIONS`, or `fp8` for an unknown FP8 recipe."""
    reader = Reader(partial)
    if reader["trainer.plugins.fp4"]:
        return "nvfp4"
    if reader["trainer.plugins.fp8"]:
        return FP8_RECIPES.get(str(reader["trainer.plugins.fp8_recipe"]), "fp8")
    has_plugin = reader.precision_plugin is not None
    return number_format(reader["trainer.plugins.precision" if has_plugin else "trainer.precision"])


def read_task(partial: run.Partial) -> str:
    """Return the task of a configuration, pretrain, sft, lora or dora, from its NeMo function and adapters."""
    if class_name(partial) == "pretrain":
        return "pretrain"
    adapters = class_name(getattr(partial, "peft", None))
    if not adapters:
        return "sft"
    return "dora" if adapters == "DoRA" else "lora"


def read_planned_task(partial: run.Partial) -> Task:
    """Return the planner's task for a configuration; it is "lora" for all adapters."""
    task = read_task(partial)
    if task == "pretrain" or task == "sft":
        return task
    return "lora"


def add_adapters(partial: run.Partial, options: Options) -> Options:
    """Return the planner's options with the adapters of a configuration; unchanged if it has none."""
    reader = Reader(partial)
    names = reader["peft.target_modules"]
    if not isinstance(names, list | tuple) or not names:
        return options
    layers = tuple(dict.fromkeys(str(name).rpartition(".")[2] for name in names))
    dim, dropout = reader["peft.dim"], reader["peft.dropout"]
    return replace(
        options,
        lora_targets=layers if all(name.isidentifier() for name in layers) else options.lora_targets,
        lora_rank=dim if isinstance(dim, int) and dim > 0 else options.lora_rank,
        lora_dropout=float(dropout) if isinstance(dropout, int | float) and 0 <= dropout < 1 else 0.0,
    )


def read_shape(config: run.Config) -> ModelShape:
    """Return the planner's shape of a model configuration: that of a known model of its class, with changed fields.

    Raises:
        UserError: no known model has this class, or sizes conflict with each other.
    """
    import fiddle as fdl

    target = fdl.get_callable(config)
    bases: tuple[Any, ...] = target.__mro__ if isinstance(target, type) else (target,)
    models_by_class = _models_by_class()
    candidates = next((models_by_class[base] for base in bases if base in models_by_class), ())
    if not candidates:
        raise UserError(
            f"the planner has no model of NeMo's class {target.__name__}, so it cannot predict its memory",
            "describe the model in shapes/*.toml: see docs/extending.md",
        )
    closest = min(candidates, key=lambda model: abs(model.shape.layers - (config.num_layers or 0)))
    return configured_shape.apply_changes(closest.shape, closest.make().config, config)


@cache
def _models_by_class() -> dict[Any, tuple[Model, ...]]:
    """Return {NeMo configuration class: registered models of this class}."""
    import fiddle as fdl

    from superpod.collection.registry import models

    known: dict[Any, tuple[Model, ...]] = {}
    for model in models().values():
        target = fdl.get_callable(model.make().config)
        known[target] = (*known.get(target, ()), model)
    return known


def _read_fields(partial: run.Partial) -> dict[str, Any]:
    """Return the fields of the planner's job that need neither the recipe nor the planner's model and node."""
    from superpod.nemo2.build.layout import read_layout

    return {
        "gpus": partial.trainer.devices * partial.trainer.num_nodes,
        "seq": partial.data.seq_length,
        "precision": read_precision(partial),
        "layout": read_layout(partial),
        "task": read_planned_task(partial),
    }


def job_from_configuration(partial: run.Partial, gpu: str) -> PlannedJob:
    """Return the planner's job for any configuration, on nodes with the GPU `gpu`.

    Raises:
        UserError: the GPU or the model is unknown, or sizes conflict with each other.
    """
    facts = hardware.builtin()
    node = facts.node(gpu)
    fields, model = _read_fields(partial), read_shape(partial.model.config)
    base = default_options(read_task(partial), fields["precision"], fields["layout"].sharding, model)
    base = replace(base, overlap_grads=bool(Reader(partial)["trainer.strategy.ddp.overlap_grad_reduce"]))
    options = read_options(partial, base)
    return set_unfused_attention(
        PlannedJob(model=model, node=node, fabric=facts.fabric_of(node), options=options, **fields)
    )


def job_from_partial(partial: run.Partial, recipe: Recipe) -> PlannedJob:
    """Return the planner's job for a built recipe, overrides included.

    Raises:
        UserError: sizes of the model conflict with each other.
    """
    planned, fields = job(recipe), _read_fields(partial)
    model = configured_shape.apply_changes(planned.model, recipe.model.make().config, partial.model.config)
    base = default_options(read_task(partial), fields["precision"], fields["layout"].sharding, model)
    return set_unfused_attention(planned.replace(model=model, options=read_options(partial, base), **fields))


of_partial = job_from_partial
"""The name in earlier versions."""


def read_options(partial: run.Partial, base: Options) -> Options:
    """Return the planner's options for a configuration; options that it does not determine are those of `base`."""
    reader = Reader(partial)
    config, plugin = partial.model.config, reader.precision_plugin
    fused = bool(reader["model.config.cross_entropy_loss_fusion"])
    gathers = getattr(plugin, "fp8_param_gather", base.fp8_params) or getattr(plugin, "fp8_params", False)
    is_fp8 = read_precision(partial) not in ("bf16", "fp16", "fp32")
    callbacks = partial.trainer.callbacks or []
    offload = reader["optim.config.optimizer_offload_fraction"] if reader["optim.config.optimizer_cpu_offload"] else 0.0
    return replace(
        add_adapters(partial, base),
        # The plugin's grad_reduce_in_fp32 overwrites the field of the strategy's ddp.
        grads="bf16" if reader["trainer.plugins.grad_reduce_in_fp32"] is False else "fp32",
        fp8_params=bool(gathers) and is_fp8,
        **_read_overlaps(partial, base),
        offload=float(offload or 0),
        optimizer_instances=reader["trainer.strategy.num_distributed_optimizer_instances"] or 1,
        moments="bf16" if "bfloat16" in str(reader["optim.config.exp_avg_dtype"]) else "fp32",
        fused_loss=fused,
        loss_impl=(reader["model.config.cross_entropy_fusion_impl"] or "native") if fused else "native",
        permute_fusion=bool(reader["model.config.moe_permute_fusion"]),
        deepep=bool(reader["model.config.moe_enable_deepep"]) or any("DeepEP" in class_name(c) for c in callbacks),
        cp_comm=_read_cp_comm(config),
        cuda_graphs=records_graphs(config),
        deterministic=bool(reader["model.config.deterministic_mode"]),
        hidden_dropout=float(reader["model.config.hidden_dropout"] or 0),
        attention_dropout=float(reader["model.config.attention_dropout"] or 0),
    )


def _read_cp_comm(config: run.Config) -> Literal["p2p", "a2a", "all_gather"]:
    """Return the communication type of context parallelism; Megatron's default is p2p, a ring."""
    cp_comm_type = getattr(config, "cp_comm_type", None)
    kinds = cp_comm_type if isinstance(cp_comm_type, list) else [cp_comm_type]
    if "all_gather" in kinds:
        return "all_gather"
    return "a2a" if "a2a" in kinds else "p2p"


def records_graphs(config: run.Config) -> bool:
    """Return whether a model records CUDA graphs, for which Megatron-Core 0.15.3 has three fields."""
    implementation = getattr(config, "cuda_graph_impl", "none")
    has_cuda_graph = getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False)
    return bool(has_cuda_graph) or implementation not in (None, "none")


def _read_overlaps(partial: run.Partial, base: Options) -> dict[str, bool]:
    """Return the planner's options for communication overlap. NeMo's callback takes precedence over the strategy."""
    strategy = partial.trainer.strategy
    callback = next((c for c in partial.trainer.callbacks or [] if hasattr(c, "tp_comm_overlap")), None)
    if callback is None:
        overlap_params = bool(Reader(partial)["trainer.strategy.ddp.overlap_param_gather"])
        return {"overlap_params": overlap_params, "overlap_tp": False}
    communicates = strategy.tensor_model_parallel_size > 1 and strategy.sequence_parallel
    return {
        "overlap_params": callback.overlap_param_gather is not False,
        "overlap_tp": bool(callback.tp_comm_overlap) if communicates else base.overlap_tp,
    }
