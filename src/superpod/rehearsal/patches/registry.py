"""Registers patches by name (`patch`) and applies them once (`install`)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from superpod.common import cpu_threads
from superpod.rehearsal import cpu_gemm

# In the order of application: torch first, because Megatron reads torch.cuda during its import.
MODULES = (
    "torch_cuda",
    "random_state",
    "norms",
    "attention",
    "optimizer",
    "te_adam",
    "fsdp",
    "te_layers",
    "moe",
    "gpu_settings",
    "nemo",
    "adapters",
)


@dataclass(frozen=True)
class Patch:
    """A named change of torch, Megatron or NeMo, with the reason why it is needed without a GPU."""

    name: str
    target: str
    reason: str
    apply: Callable[[], None]


_patches: dict[str, Patch] = {}
_decided: set[str] = set()  # applied or excluded; a later install() changes neither


def patch(name: str, *, target: str, reason: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the decorated function as the patch ``name`` of ``target``; it runs once, in ``install``."""

    def register(apply: Callable[[], None]) -> Callable[[], None]:
        if name in _patches and _patches[name].apply.__module__ != apply.__module__:
            raise ValueError(f"there are two patches named {name!r}")
        _patches[name] = Patch(name, target, reason, apply)
        return apply

    return register


def patches() -> tuple[Patch, ...]:
    """Return every patch in the order of application. Imports neither torch nor NeMo."""
    modules = [importlib.import_module(f"{__package__}.{name}").__name__ for name in MODULES]
    return tuple(sorted(_patches.values(), key=lambda registered: modules.index(registered.apply.__module__)))


def install(*, without: frozenset[str] = frozenset()) -> None:
    """Apply every patch once, except those named in ``without`` (for tests), which later calls do not apply, either.

    Works before and after NeMo is imported. Does nothing on a machine with a GPU, where the real kernels must run.

    Raises:
        ValueError: ``without`` contains an unknown name.
    """
    all_patches = patches()
    unknown = without - {registered.name for registered in all_patches}
    if unknown:
        raise ValueError(f"unknown patches {', '.join(sorted(unknown))}; docs/rehearsal.md lists all names")
    cpu_threads.set_passive_waiting()
    import torch

    if torch.cuda.is_available():
        return
    if cpu_gemm.is_needed():
        cpu_gemm.use_float32()
    for registered in all_patches:
        if registered.name not in without and registered.name not in _decided:
            registered.apply()
        _decided.add(registered.name)


def replace(owner: ModuleType | type, **new: object) -> None:
    """Replace attributes of a module or class.

    Raises:
        AttributeError: this version of the library lacks the name, so that the patch would have no effect.
    """
    for name, value in new.items():
        getattr(owner, name)
        setattr(owner, name, value)


def define(owner: ModuleType, **new: object) -> None:
    """Set attributes that may not exist: names that a module defines only if Transformer Engine is installed."""
    for name, value in new.items():
        setattr(owner, name, value)


def rebind(owner: ModuleType, name: str, replacement: object) -> None:
    """Set ``owner.name`` to ``replacement``, also in every module that has executed ``from owner import name``.

    Such copies exist because nemo_run imports NeMo before our entry point in a torchrun child.
    """
    old_attribute = getattr(owner, name)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("megatron", "nemo"):
            for key in [key for key, value in vars(module).items() if value is old_attribute]:
                setattr(module, key, replacement)
    setattr(owner, name, replacement)
