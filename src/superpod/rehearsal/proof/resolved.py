"""Resolves the configuration that the constructors of Megatron, NeMo and TE read, and computes its digest.

Sizes with equal digests have the same model, and therefore share one build. The digest includes every field of the
resolved objects, not a selection of fields.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from superpod.collection.facts import environment
from superpod.collection.recipe_job import job
from superpod.collection.registry import Recipe
from superpod.planner import hardware
from superpod.planner.layout import Layout

if TYPE_CHECKING:
    from nemo_run import Partial

Plain = dict[str, Any]
"""A JSON object."""

TRANSFORMS = ("model_transform", "model_context_managers")
"""Attributes of NeMo's model that change the Megatron model after it is built."""
IGNORED_KEYS = ("store", "trainer", "restore_config", "lightning_module", "model", "mcore_config")
"""Attributes of a strategy that are not settings; the model configuration is a separate part of the result."""
CHECKPOINTS = ("ckpt_", "save_ckpt", "load_", "async_save", "parallel_save", "parallel_load", "log_", "progress_")
"""Name prefixes of a strategy's attributes for checkpoints and logs."""
CLASSES_BY_NAME = ("Timers",)
"""Classes that do not affect the model; the digest includes only their names."""
TEXT_MODULES = ("torch", "datetime", "pathlib", "fractions")
"""Modules whose objects are completely described by their text: data types, devices, time intervals, paths."""


def resolve(recipe: Recipe, nodes: int, partial: Partial) -> Plain:
    """Return all values that the constructors of a recipe's models can read, except the data-parallel size.

    Runs NeMo's strategy, precision plugin and callbacks in Megatron's grid of ranks at its real size. Also runs the
    schedule of the last pipeline rank with the recipe's number of micro-batches, which is not part of the result.

    Args:
        recipe: the recipe.
        nodes: number of nodes.
        partial: the recipe as built by NeMo for this number of nodes.

    Raises:
        Exception: any exception with which Megatron or NeMo rejects the configuration.
    """
    import fiddle as fdl

    from superpod.rehearsal.proof import meta_build, pipeline_schedule
    from superpod.rehearsal.te import build

    layout, world = recipe.layout(nodes), nodes * recipe.gpus_per_node
    variables = {v.name: v.value for v in environment.variables(job(recipe, nodes))}
    with build.connect(partial, world - 1, world, generation(recipe), variables) as (strategy, model, callbacks):
        pipeline_schedule.run(model.config, strategy.ddp_config, pipeline_schedule.Batch.from_data(partial.data))
        return {
            "model": _qualified_name(type(model)),
            "config": to_json(model.config),
            "optimizer": to_json(model.optim.config),
            "transform": to_json([getattr(model, name, None) for name in TRANSFORMS]),
            "strategy": _settings(strategy),
            "callbacks": to_json(callbacks),
            "peft": to_json(fdl.build(partial.peft)) if getattr(partial, "peft", None) else None,
            "task": recipe.task,
            "vocabulary": meta_build.get_tokenizer_vocab(partial) or recipe.model.shape.vocab,
            "micro_batch": [partial.data.micro_batch_size, partial.data.seq_length],
            "stages": stages(layout),
            "one_or_several": [min(count, 2) for count in (world, world // layout.tp, world // layout.pp)],
            "generation": generation(recipe),
            "environment": variables,
        }


def digest(inputs: Plain) -> str:
    """Return 24 hexadecimal digits of the SHA-256 of a resolved configuration."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:24]


def generation(recipe: Recipe) -> str:
    """Return the compute capability of the recipe's GPU, such as `sm90` for an H100."""
    return f"sm{hardware.node(recipe.gpu).gpu.sm}"


def stages(layout: Layout) -> list[int]:
    """Return the numbers of the first, a middle and the last pipeline rank of a layout."""
    return sorted({0, layout.pp // 2, layout.pp - 1})


def _settings(strategy: Any) -> Plain:
    """Return the attributes of a strategy that affect the model, as JSON."""
    settings = {}
    for name, value in vars(strategy).items():
        public_name = name.lstrip("_")
        if public_name not in (*IGNORED_KEYS, "io__") and not public_name.startswith(CHECKPOINTS):
            settings[name] = to_json(value)
    return settings


def to_json(value: Any) -> Any:
    """Convert a value to JSON, with the class and all attributes of every object.

    Raises:
        TypeError: an object cannot be represented completely, and therefore cannot be part of a digest.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_json(item) for item in value), key=repr)
    if isinstance(value, (enum.Enum, type)) or type(value).__module__ in TEXT_MODULES:
        return f"{type(value).__qualname__}: {value}"
    if callable(value) and not dataclasses.is_dataclass(value) and not hasattr(value, "config"):
        return _function_to_json(value)
    if hasattr(value, "__dict__"):
        if type(value).__name__ in CLASSES_BY_NAME:
            return {"class": _qualified_name(type(value))}
        fields = {name: item for name, item in vars(value).items() if name != "__io__"}  # its constructor's arguments
        return {"class": _qualified_name(type(value)), **{name: to_json(item) for name, item in fields.items()}}
    raise TypeError(f"{type(value).__qualname__} cannot be converted to JSON: {value!r}")


def _function_to_json(value: Any) -> Any:
    """Convert a function to JSON: its name, closure and defaults, or the arguments of a functools.partial."""
    if isinstance(value, functools.partial):
        return {"function": to_json(value.func), "given": [to_json(value.args), to_json(value.keywords)]}
    if isinstance(value, types.MethodType):
        return {"function": _qualified_name(value.__func__), "of": _owner_to_json(value.__self__)}
    if isinstance(value, types.BuiltinFunctionType):
        return {"function": _qualified_name(value)}
    if isinstance(value, types.FunctionType):
        is_lambda = value.__name__ == "<lambda>"  # all lambdas have the same name
        parts = {
            "given": [to_json(cell.cell_contents) for cell in value.__closure__ or ()],
            "defaults": to_json([value.__defaults__, value.__kwdefaults__]),
            "code": _code_to_json(value.__code__) if is_lambda else None,
        }
        used_parts = {key: item for key, item in parts.items() if item and item != [None, None]}
        return {"function": _qualified_name(value)} | used_parts
    return {"class": _qualified_name(type(value)), **{name: to_json(item) for name, item in vars(value).items()}}


_owners: list[Any] = []
"""Objects whose methods are currently being converted."""


def _owner_to_json(value: Any) -> Any:
    """Convert the object of a bound method to JSON; return only its class if it is already being converted."""
    if any(value is owner for owner in _owners):
        return _qualified_name(type(value))
    _owners.append(value)
    try:
        return to_json(value)
    finally:
        _owners.pop()


def _code_to_json(code: types.CodeType) -> Plain:
    """Convert the bytecode of a function to JSON, without its file and line numbers."""
    constants = [_code_to_json(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts]
    return {"does": code.co_code.hex(), "with": [*constants, *code.co_names, *code.co_varnames]}


def _qualified_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
