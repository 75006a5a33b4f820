"""The configuration of a recipe as Megatron's, NeMo's and TE's constructors read it, and its digest.

Two sizes of recipes whose digests are equal have one model: what is built for one is built for both. So the digest
takes the resolved objects themselves, every field of them, and not a choice of fields that seem to matter.
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
"""What JSON can say."""

NOT_SETTINGS = ("store", "trainer", "restore_config", "lightning_module", "model", "mcore_config")
"""Attributes of a strategy that hold the run's own objects; the model's configuration is in the key by itself."""
CHECKPOINTS = ("ckpt_", "save_ckpt", "load_", "async_save", "parallel_save", "parallel_load", "log_", "progress_")
"""Attributes of the strategy about checkpoints and logs start so."""
BY_NAME = ("Timers",)
"""Classes whose objects only measure: their name is all that a key has of them."""
SAY_ALL = ("torch", "datetime", "pathlib", "fractions")
"""Modules whose values are all in their text: a dtype, a device, a length of time, a path."""


def resolved(recipe: Recipe, nodes: int, partial: Partial) -> Plain:
    """Everything that a constructor of the model on each pipeline rank can read, but the data-parallel size.

    Runs NeMo's strategy, precision plugin and callbacks on the recipe, in Megatron's grid of ranks at its real size.
    Then the schedule of the last pipeline rank, at the recipe's own number of micro-batches: no part of a model.

    Raises:
        Exception: whatever Megatron or NeMo refuses the configuration with.
    """
    import fiddle as fdl

    from superpod.rehearsal.proof import meta_build, schedule
    from superpod.rehearsal.te import build

    layout, world = recipe.layout(nodes), nodes * recipe.gpus_per_node
    variables = {v.name: v.value for v in environment.variables(job(recipe, nodes))}
    with build.connected(partial, world - 1, world, generation(recipe), variables) as (strategy, model, callbacks):
        schedule.run(model.config, strategy.ddp_config, schedule.Batch.from_data(partial.data))
        return {
            "model": _name(type(model)),
            "config": plain(model.config),
            "optimizer": plain(model.optim.config),
            "transform": plain([getattr(model, name, None) for name in ("model_transform", "model_context_managers")]),
            "strategy": _settings(strategy),
            "callbacks": plain(callbacks),
            "peft": plain(fdl.build(partial.peft)) if getattr(partial, "peft", None) else None,
            "task": recipe.task,
            "vocabulary": meta_build.tokenizer_vocab(partial) or recipe.model.shape.vocab,
            "micro_batch": [partial.data.micro_batch_size, partial.data.seq_length],
            "stages": stages(layout),
            "one_or_several": [min(count, 2) for count in (world, world // layout.tp, world // layout.pp)],
            "generation": generation(recipe),
            "environment": variables,
        }


def digest(inputs: Plain) -> str:
    """Hash of a resolved configuration: 24 hexadecimal digits."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:24]


def generation(recipe: Recipe) -> str:
    """What kernels for the recipe's GPU are compiled for: `sm90` for an H100."""
    return f"sm{hardware.node(recipe.gpu).gpu.sm}"


def stages(layout: Layout) -> list[int]:
    """The first, a middle and the last pipeline rank."""
    return sorted({0, layout.pp // 2, layout.pp - 1})


def _settings(strategy: Any) -> Plain:
    """The strategy's own attributes; those of Lightning's base classes hold the run's objects."""
    kept = {name: value for name, value in vars(strategy).items() if _is_setting(name.lstrip("_"))}
    return {name: plain(value) for name, value in kept.items()}


def _is_setting(name: str) -> bool:
    return name not in (*NOT_SETTINGS, "io__") and not name.startswith(CHECKPOINTS)


def plain(value: Any) -> Any:
    """`value` as JSON can say it, with the class of every object.

    Raises:
        TypeError: an object that cannot be said completely, so that it cannot be part of a key either.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, (enum.Enum, type)) or type(value).__module__ in SAY_ALL:
        return f"{type(value).__qualname__}: {value}"
    if callable(value) and not dataclasses.is_dataclass(value) and not hasattr(value, "config"):
        return _function(value)
    if hasattr(value, "__dict__"):
        if type(value).__name__ in BY_NAME:
            return {"class": _name(type(value))}
        fields = {name: item for name, item in vars(value).items() if name != "__io__"}  # what it was made from
        return {"class": _name(type(value)), **{name: plain(item) for name, item in fields.items()}}
    raise TypeError(f"{type(value).__qualname__} has no plain form: {value!r}")


def _function(value: Any) -> Any:
    """A function with what its result depends on beside its arguments: closure, defaults, a partial's arguments."""
    if isinstance(value, functools.partial):
        return {"function": plain(value.func), "given": [plain(value.args), plain(value.keywords)]}
    if isinstance(value, types.MethodType):
        return {"function": _name(value.__func__), "of": _owner(value.__self__)}
    if isinstance(value, types.BuiltinFunctionType):
        return {"function": _name(value)}
    if isinstance(value, types.FunctionType):
        parts = {
            "given": [plain(cell.cell_contents) for cell in value.__closure__ or ()],
            "defaults": plain([value.__defaults__, value.__kwdefaults__]),
            "code": _code(value.__code__) if value.__name__ == "<lambda>" else None,  # lambdas of a module share a name
        }
        return {"function": _name(value)} | {key: item for key, item in parts.items() if item and item != [None, None]}
    return {"class": _name(type(value)), **{name: plain(item) for name, item in vars(value).items()}}


_owners: list[Any] = []
"""Objects of methods that are being parts."""


def _owner(value: Any) -> Any:
    """The object of a method, all of it; by its class only within itself, where it holds methods of its own."""
    if any(value is owner for owner in _owners):
        return _name(type(value))
    _owners.append(value)
    try:
        return plain(value)
    finally:
        _owners.pop()


def _code(code: types.CodeType) -> Plain:
    """What a function's code does, without the place where it stands."""
    constants = [_code(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts]
    return {"does": code.co_code.hex(), "with": [*constants, *code.co_names, *code.co_varnames]}


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
