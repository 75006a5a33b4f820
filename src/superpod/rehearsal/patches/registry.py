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
    """A change of torch, Megatron or NeMo that is needed without a GPU."""

    name: str
    target: str
    """The functions and classes that it changes."""
    reason: str
    apply: Callable[[], None]


_patches: dict[str, Patch] = {}
_decided: set[str] = set()  # applied or excluded; a later install() changes neither


def patch(name: str, *, target: str, reason: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a decorator that registers a function as the patch ``name``, which ``install`` applies once.

    ``target`` (the functions and classes that it changes) and ``reason`` are for docs/rehearsal.md.
    """

    def register(apply: Callable[[], None]) -> Callable[[], None]:
        if name in _patches and _patches[name].apply.__module__ != apply.__module__:
            raise ValueError(f"there are two patches named {name!r}")
        _patches[name] = Patch(name, target, reason, apply)
        return apply

    return register


def patches() -> tuple[Patch, ...]:
    """Return all patches in the order of application. Imports neither torch nor NeMo."""
    modules = [importlib.import_module(f"{__package__}.{name}").__name__ for name in MODULES]
    return tuple(sorted(_patches.values(), key=lambda registered: modules.index(registered.apply.__module__)))


def install(*, without: frozenset[str] = frozenset()) -> None:
    """Apply every patch once in this process, before or after NeMo is imported.

    Does nothing on a machine with a GPU, where the real kernels must run.

    Args:
        without: names of patches that neither this nor a later call applies, for tests.

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
    """Replace existing attributes of a module or class.

    Raises:
        AttributeError: the attribute does not exist in this version of the library: the patch would have no effect.
    """
    for name, value in new.items():
        getattr(owner, name)
        setattr(owner, name, value)


def define(owner: ModuleType, **new: object) -> None:
    """Set attributes that a module may lack, because it defines them only if Transformer Engine is installed."""
    for name, value in new.items():
        setattr(owner, name, value)


def rebind(owner: ModuleType, name: str, replacement: object) -> None:
    """Set ``owner.name`` to ``replacement``, and also the copies in modules that executed ``from owner import name``.

    Such copies exist because nemo_run imports NeMo before ``rehearsal.entry`` in a torchrun child process.
    """
    old_attribute = getattr(owner, name)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("megatron", "nemo"):
            for key in [key for key, value in vars(module).items() if value is old_attribute]:
                setattr(module, key, replacement)
    setattr(owner, name, replacement)
