"""Makes Megatron-Bridge importable on a machine without a GPU: import this module before `megatron.bridge`.

Megatron-Bridge imports packages that need CUDA without a guard: Transformer Engine (peft/lora_layers.py:20),
NVIDIA Resiliency Extension (training/pretrain.py:19), and others. Stand-ins replace those that are missing. They are
sufficient to build and validate a `ConfigContainer`, not to run a layer. Requires torch and Megatron-Bridge's
environment (Python 3.12), not NeMo.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import sys
import types
from collections.abc import Sequence
from typing import Any

STAND_INS = {
    "transformer_engine": "2.16.0",
    "transformer_engine_torch": "2.16.0",
    "nvidia_resiliency_ext": "0.6.0",
    "mamba_ssm": "2.3.0",
    "causal_conv1d": "1.5.3",
    "flashinfer": "0.6.8",
    "fla": "0.4.0",
    "deep_ep": "1.2.1",
    "fast_hadamard_transform": "1.1.0",
    "nvdlfw_inspect": "0.2.1",
    "mlflow": "3.16.0",
}
"""Package -> version that its stand-in reports: the minimum that Megatron-Bridge 0.6.2 requires."""

PARAMETERS = {"FusedAdam": ("master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad")}
"""Class -> parameters that Megatron-Core looks up (optimizer_config.py:453)."""


def _stand_in_class(name: str) -> type:
    """Return a class that can be subclassed and registered like a layer. Its attributes are such classes too."""
    import torch

    class Meta(type):
        def __getattr__(cls, attribute: str) -> type:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return _stand_in_class(attribute)

    def init(self: torch.nn.Module, *_args: Any, **_options: Any) -> None:
        torch.nn.Module.__init__(self)

    stand_in = Meta(name, (torch.nn.Module,), {"__init__": init})
    if name in PARAMETERS:
        parameters = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in PARAMETERS[name]]
        setattr(stand_in, "__signature__", inspect.Signature(parameters))  # noqa: B010
    return stand_in


class _StandIn(types.ModuleType):
    """A module of a missing package: each of its attributes is a class without behavior."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in_class(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the missing packages."""

    def __init__(self, missing: Sequence[str]) -> None:
        self.missing = missing

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        del path, target
        if fullname.partition(".")[0] in self.missing:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        package = module.__name__.partition(".")[0]
        module.__path__ = []
        setattr(module, "__version__", STAND_INS[package])  # noqa: B010


def install() -> None:
    """Add stand-ins for the packages that are not installed."""
    missing = [name for name in STAND_INS if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
    real_version = importlib.metadata.version

    def version(name: str) -> str:
        package = name.replace("-", "_")
        return STAND_INS[package] if package in missing else real_version(name)

    importlib.metadata.version = version


install()
