"""Find the recipes that Megatron-Bridge ships. Imports Megatron-Bridge."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from superpod.bridge import facts, import_bridge  # noqa: F401 - import_bridge adds stand-ins for missing packages


def find_recipes(folder: str) -> dict[str, Callable[[], Any]]:
    """Return name -> function of the recipes in a package of Megatron-Bridge, `recipes` or `perf_recipes`."""
    package = importlib.import_module(f"{facts.PACKAGE}.{folder}")
    found: dict[str, Callable[[], Any]] = {}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        members = vars(importlib.import_module(module.name))
        found |= {name: value for name, value in members.items() if _is_recipe(name, value, package.__name__)}
    return dict(sorted(found.items()))


def _is_recipe(name: str, value: object, package: str) -> bool:
    """Return whether `value` is a function of the package that returns a `ConfigContainer` without arguments."""
    if name.startswith("_") or not name.endswith("_config") or "gpu_" not in name:
        return False
    if not inspect.isfunction(value) or not value.__module__.startswith(f"{package}."):
        return False
    parameters = inspect.signature(value).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
