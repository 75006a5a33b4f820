"""Import modules by their old names, which users' scripts and checkpoints (context/io.json) contain."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NEW_NAMES = {
    "launchers": "launch",
    "launchers.script": "launch.script",
    "lifecycle": "requests",
    "lifecycle.report": "reports.report",
    "lifecycle.request": "requests.request",
    "lifecycle.resolve": "requests.resolve",
    "node": "runtime",
    "node.callback": "runtime.rank.callback",
    "node.profiled": "runtime.rank.profiled",
    "node.run_folder": "runtime.runs.run_folder",
    "node.stopping": "runtime.rank.stopping",
    "planner.huggingface": "planner.formats.hf_shape",
    "recipes.data": "data",
    "recipes.data.module": "nemo2.data_module",
    "recipes.hf_model": "weights.families.hf_model",
    "recipes.overrides": "nemo2.overrides",
    "recipes.planned_job": "nemo2.validation.configured_job",
    "recipes.registry": "collection.registry",
}
"""Old module name -> new module name, both relative to `superpod`."""


class OldNames(MetaPathFinder, Loader):
    """An import hook for the modules in `NEW_NAMES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in `NEW_NAMES`; None for other modules."""
        package, _, name = fullname.partition(".")
        if package != "superpod" or name not in NEW_NAMES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Replace `module`, which the import system created empty, by the module with the new name, with a warning."""
        old_name = module.__name__
        new_name = f"superpod.{NEW_NAMES[old_name.removeprefix('superpod.')]}"
        warnings.warn(f"{old_name} is now {new_name}", DeprecationWarning, stacklevel=2)
        sys.modules[old_name] = importlib.import_module(new_name)


def install() -> None:
    """Register the import hook before all others; otherwise, another finder would load a package's modules twice."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())
