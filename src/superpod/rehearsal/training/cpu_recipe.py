"""Converts a recipe to a rehearsal on CPUs without shrinking it, and lists all changed settings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from superpod.nemo2.validation.reading import class_name
from superpod.rehearsal.errors import RehearsalError

if TYPE_CHECKING:
    from nemo_run import Config, Partial


@dataclass(frozen=True)
class Change:
    """A setting of a recipe that the rehearsal changes from ``old`` to ``new``.

    ``path`` is a dotted path in the recipe; ``""`` is the recipe itself.
    """

    path: str
    old: Any
    new: Any
    reason: str


_PRECISION_AWARE = "optim.config.use_precision_aware_optimizer"
_NO_TE = "needs Transformer Engine's Python package, which scripts/install.sh installs"

# (path, value in a rehearsal, reason); applied if the recipe has a different value at this path.
_CPU_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("trainer.accelerator", "cpu", "no GPU"),
    ("trainer.num_nodes", 1, "one machine"),
    ("trainer.strategy.process_group_backend", "gloo", "NCCL needs GPUs"),
    ("trainer.strategy.ckpt_async_save", False, "asynchronous saving copies from GPU memory in a separate process"),
    ("trainer.strategy.nccl_communicator_config_path", None, "NCCL needs GPUs"),
    ("trainer.strategy.use_sharp", False, "SHARP reduces in the InfiniBand switches"),
    ("trainer.strategy.ddp.nccl_ub", False, "NCCL needs GPUs"),
    ("trainer.plugins.fp8", None, "FP8 needs tensor cores"),
    ("trainer.plugins.fp8_params", False, "FP8 needs tensor cores"),
    ("trainer.plugins.fp8_param_gather", False, "FP8 needs tensor cores"),
    ("data.pin_memory", False, "pins memory for a GPU"),
    ("data.num_workers", 0, "the ranks of a rehearsal share few cores"),
    ("data.persistent_workers", False, "no workers"),
)

# Class names, because some of them cannot be imported without a GPU.
_GPU_CALLBACKS = {
    "NsysCallback": "controls the CUDA profiler",
    "MemoryProfileCallback": "records GPU memory",
    "DeepEPCallback": "DeepEP is a CUDA library",
    "StragglerDetectionCallback": "times CUDA kernels",
}


def rehearse(recipe: Partial, *, devices: int) -> tuple[Partial, list[Change]]:
    """Return a copy of ``recipe`` that trains on ``devices`` CPU processes, and the settings that differ.

    Imports NeMo and, on a machine without a GPU, patches it in this process.

    Args:
        recipe: a ``run.Partial`` of ``llm.pretrain``, ``finetune``, ``distill`` or ``prune``; not modified.
        devices: number of processes on this machine, a multiple of the recipe's TP x PP x CP.

    Raises:
        RehearsalError: the recipe calls a different function, or ``devices`` is not a multiple of its TP x PP x CP.
    """
    import fiddle as fdl

    from superpod.rehearsal import entry

    rehearsal_recipe = copy.deepcopy(recipe)
    function = class_name(recipe)
    entries = {"pretrain": entry.pretrain, "finetune": entry.finetune, "distill": entry.distill, "prune": entry.prune}
    if function not in entries:
        names = ", ".join(f"llm.{name}" for name in entries)
        raise RehearsalError(f"only {names} can be rehearsed, but the recipe calls {function}")
    strategy = getattr(getattr(recipe, "trainer", None), "strategy", None)
    parallel_sizes: object = strategy
    if strategy is None:  # llm.prune creates its own trainer
        sizes = {"tensor_model_parallel_size": recipe.tp_size, "pipeline_model_parallel_size": recipe.pp_size}
        parallel_sizes = SimpleNamespace(**sizes)
    _check_devices(parallel_sizes, devices)
    fdl.update_callable(rehearsal_recipe, entries[function])
    changes = [Change("", f"llm.{function}", f"{entry.__name__}.{function}", "installs the patches")]
    local = (("devices", devices, "processes of this machine"), ("num_nodes", 1, "one machine"))
    if strategy is not None:
        local = (("trainer.devices", devices, "processes of this machine"),)
    for path, value, reason in (*local, *_CPU_SETTINGS, *_optimizer_settings(recipe)):
        changes += _set(rehearsal_recipe, path, value, reason)
    return rehearsal_recipe, changes + _remove_gpu_callbacks(getattr(rehearsal_recipe, "trainer", None))


def _optimizer_settings(recipe: Partial) -> Iterator[tuple[str, Any, str]]:
    """Yield (path, value, reason) for the optimizer if Transformer Engine's Adam is required but not installed."""
    import torch

    from superpod.rehearsal.te import source

    config = getattr(getattr(recipe, "optim", None), "config", None)
    if source.is_installed() or getattr(config, "optimizer_cpu_offload", False):  # CPU offloading uses torch's Adam
        return
    yield _PRECISION_AWARE, False, _NO_TE
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        yield f"optim.config.{name}", torch.float32, _NO_TE


def _set(recipe: Partial, path: str, value: Any, reason: str) -> Iterator[Change]:
    """Set the field at ``path`` if it exists and has a different value; yield the changes."""
    parents, _, name = path.rpartition(".")
    for parent, node in _find_configurations(recipe, parents):
        old_value = getattr(node, name, None)
        is_unchanged = old_value == value or (old_value is None and value is False)
        if _accepts(node, name) and not is_unchanged:
            setattr(node, name, value)
            yield Change(f"{parent}.{name}".lstrip("."), old_value, value, reason)


def _find_configurations(recipe: Partial, path: str) -> list[tuple[str, object]]:
    """Return (path, object) at a dotted path; for a list such as trainer.plugins, one pair per element."""
    node: object = recipe
    for name in filter(None, path.split(".")):
        node = getattr(node, name, None)
    if isinstance(node, list):
        return [(f"{path}[{i}]", element) for i, element in enumerate(node)]
    return [(path, node)]


def _accepts(node: object, name: str) -> bool:
    """Return whether the class or function that a configuration calls accepts the argument ``name``."""
    import fiddle as fdl

    from superpod.nemo2.signatures import find_parameter

    if not isinstance(node, fdl.Buildable):
        return False
    # MegatronStrategy passes this one to Lightning's strategy in **kwargs (nemo/lightning/pytorch/strategies).
    return name == "process_group_backend" or find_parameter(fdl.get_callable(node), name) is not None


def _remove_gpu_callbacks(trainer: Config | None) -> list[Change]:
    """Remove the callbacks that need a GPU from a trainer; return them as changes."""
    kept, changes = [], []
    for i, callback in enumerate(getattr(trainer, "callbacks", None) or []):
        name = class_name(callback)
        if name in _GPU_CALLBACKS:
            changes.append(Change(f"trainer.callbacks[{i}]", name, None, _GPU_CALLBACKS[name]))
        else:
            kept.append(callback)
    if changes and trainer is not None:
        trainer.callbacks = kept
    return changes


def _check_devices(strategy: object, devices: int) -> None:
    """Raise RehearsalError unless ``devices`` is a positive multiple of the strategy's TP x PP x CP."""
    tp, pp, cp = (
        getattr(strategy, f"{kind}_size", None) or 1
        for kind in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    )
    unit = tp * pp * cp
    if devices < 1 or devices % unit:
        raise RehearsalError(
            f"devices must be a multiple of tp {tp} x pp {pp} x cp {cp} = {unit} processes, but devices is {devices}",
            hint=f"try devices={unit * max(1, round(devices / unit))}",
        )
