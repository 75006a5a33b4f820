"""Named patches: what a rehearsal changes in torch, Megatron and NeMo, and why."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The order they are applied in: torch first, because Megatron reads torch.cuda while it is imported.
MODULES = ("torch_cuda", "megatron", "attention", "optimizer", "layers", "moe", "settings", "nemo", "adapters")


@dataclass(frozen=True)
class Patch:
    """One named change to somebody else's code, with the reason it is needed without a GPU."""

    name: str
    target: str
    reason: str
    apply: Callable[[], None]


_patches: dict[str, Patch] = {}
_decided: set[str] = set()  # applied or left out; a later install() changes neither


def patch(name: str, *, target: str, reason: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the decorated function as the patch ``name`` of ``target``; it runs once, in ``install``."""

    def register(apply: Callable[[], None]) -> Callable[[], None]:
        if name in _patches and _patches[name].apply.__module__ != apply.__module__:
            raise ValueError(f"two patches are called {name!r}")
        _patches[name] = Patch(name, target, reason, apply)
        return apply

    return register


def patches() -> tuple[Patch, ...]:
    """Every patch, in the order of application. Needs neither torch nor NeMo."""
    modules = [importlib.import_module(f"{__package__}.{name}").__name__ for name in MODULES]
    return tuple(sorted(_patches.values(), key=lambda each: modules.index(each.apply.__module__)))


def install(*, without: frozenset[str] = frozenset()) -> None:
    """Apply every patch once, except those named in ``without`` (for tests), which stay left out.

    Works before and after NeMo is imported, and does nothing on a machine with a GPU: there the real
    kernels must run, and a patched ``torch.cuda`` would hide them.

    Raises:
        ValueError: ``without`` names no patch.
    """
    known = patches()
    if unknown := without - {p.name for p in known}:
        raise ValueError(f"no patch is called {', '.join(sorted(unknown))}; the names are in docs/rehearsal.md")
    import torch

    if torch.cuda.is_available():
        return
    for each in known:
        if each.name not in without and each.name not in _decided:
            each.apply()
        _decided.add(each.name)


def replace(owner: Any, **new: Any) -> None:
    """Set attributes of a module or class that it has already.

    Raises:
        AttributeError: this version of the library no longer has the name, so the patch would change nothing.
    """
    for name, value in new.items():
        getattr(owner, name)
        setattr(owner, name, value)


def define(owner: Any, **new: Any) -> None:
    """Set attributes of a module, whether or not it has them: names that exist only beside Transformer Engine."""
    for name, value in new.items():
        setattr(owner, name, value)


def rebind(owner: Any, name: str, new: Any) -> None:
    """Set ``owner.name`` to ``new``, also in every module that has already done ``from owner import name``.

    In a torchrun child, nemo_run imports NeMo before it imports our entry point, so the copies exist.
    """
    old = getattr(owner, name)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("megatron", "nemo"):
            for key in [key for key, value in vars(module).items() if value is old]:
                setattr(module, key, new)
    setattr(owner, name, new)
