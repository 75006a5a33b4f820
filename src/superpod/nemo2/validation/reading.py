"""Reads a configuration by path: `trainer.max_steps`, `optim.config.lr`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from superpod.collection.facts.override_fields import path_of

if TYPE_CHECKING:
    import nemo_run as run

PLUGIN = "trainer.plugins"


@dataclass(frozen=True)
class Reader:
    """A built configuration, and the overrides that made it."""

    partial: run.Partial
    overrides: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> Any:
        """The value at a dotted path; None where the configuration has no such field, or leaves it unset."""
        node: Any = self.partial
        if path.startswith(PLUGIN):
            node, path = self.precision_plugin, path.removeprefix(PLUGIN).removeprefix(".")
        for name in path.split(".") if path else []:
            node = _field(node, name)
        return node

    @property
    def precision_plugin(self) -> Any:
        """The configuration of NeMo's precision plugin, alone or in a list; None where there is none."""
        return precision_plugin(self.partial)

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return (self["trainer.devices"] or 1) * (self["trainer.num_nodes"] or 1)

    @property
    def gpus_per_replica(self) -> int:
        """tp x pp x cp: GPUs that hold one copy of the model."""
        tp, pp, cp = (
            self[f"trainer.strategy.{kind}_parallel_size"] or 1
            for kind in ("tensor_model", "pipeline_model", "context")
        )
        return tp * pp * cp

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model."""
        return self.gpus // self.gpus_per_replica

    def overridden(self, *paths: str) -> bool:
        """Whether an override sets one of these fields, a part that holds it, or a field of it."""
        return any(is_overridden(self.overrides, path) for path in paths)


def is_overridden(overrides: Sequence[str], path: str) -> bool:
    """Whether one of these overrides sets a field, a part that holds it, or a field of it."""
    keys = [path_of(text) for text in overrides]
    return any(f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in keys)


def precision_plugin(partial: run.Partial) -> Any:
    """As `Reader.precision_plugin`, of a partial."""
    plugins = _field(_field(partial, "trainer"), "plugins")
    for plugin in plugins if isinstance(plugins, list | tuple) else [plugins]:
        if "Precision" in name_of(plugin):
            return plugin
    return None


def _field(node: Any, name: str) -> Any:
    """A field of a configuration: as set, or its plain default."""
    try:
        return getattr(node, name, None)
    except ValueError:  # fiddle, of a field with a default factory
        return None


def name_of(node: Any) -> str:
    """The class or function that a configuration calls; of an object, its class; "" for None."""
    if node is None:
        return ""
    import fiddle as fdl

    return fdl.get_callable(node).__name__ if isinstance(node, fdl.Buildable) else type(node).__name__
