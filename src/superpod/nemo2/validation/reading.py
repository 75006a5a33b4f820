"""Read the fields of a configuration by path, such as `trainer.max_steps` or `optim.config.lr`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from superpod.collection.facts.override_fields import path_of

if TYPE_CHECKING:
    import nemo_run as run

PLUGIN = "trainer.plugins"
"""Path of the precision plugin, which may also be in a list there."""


@dataclass(frozen=True)
class Reader:
    """Reads the fields of a built configuration, `partial`, to which `overrides` have been applied."""

    partial: run.Partial
    overrides: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> Any:
        """Return the value at a dotted path; None if the field does not exist or is unset."""
        node: Any = self.partial
        if path.startswith(PLUGIN):
            node, path = self.precision_plugin, path.removeprefix(PLUGIN).removeprefix(".")
        for name in path.split(".") if path else []:
            node = _field(node, name)
        return node

    @property
    def precision_plugin(self) -> Any:
        """The configuration of NeMo's precision plugin; None if there is none."""
        plugins = _field(_field(self.partial, "trainer"), "plugins")
        plugins = plugins if isinstance(plugins, list | tuple) else [plugins]
        return next((plugin for plugin in plugins if "Precision" in class_name(plugin)), None)

    @property
    def gpus(self) -> int:
        """Number of GPUs of the run."""
        return (self["trainer.devices"] or 1) * (self["trainer.num_nodes"] or 1)

    @property
    def gpus_per_replica(self) -> int:
        """Number of GPUs of one model replica: tp x pp x cp."""
        tp, pp, cp = (
            self[f"trainer.strategy.{kind}_parallel_size"] or 1
            for kind in ("tensor_model", "pipeline_model", "context")
        )
        return tp * pp * cp

    @property
    def data_parallel_size(self) -> int:
        """Number of model replicas."""
        return self.gpus // self.gpus_per_replica

    def is_overridden(self, *paths: str) -> bool:
        """Return whether an override sets one of the fields `paths`, a part that contains it, or a field inside it."""
        return any(is_overridden(self.overrides, path) for path in paths)


def is_overridden(overrides: Sequence[str], path: str) -> bool:
    """Return whether an override sets the field `path`, a part that contains it, or a field inside it."""
    keys = [path_of(text) for text in overrides]
    return any(f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in keys)


def _field(node: Any, name: str) -> Any:
    """Return the value of a field, or its default; None if it does not exist, or its default has a factory."""
    try:
        return getattr(node, name, None)
    except ValueError:  # raised by fiddle for a default factory
        return None


def class_name(node: Any) -> str:
    """Return the name of a configuration's class or function, or of another object's class; "" for None."""
    if node is None:
        return ""
    import fiddle as fdl

    return fdl.get_callable(node).__name__ if isinstance(node, fdl.Buildable) else type(node).__name__
