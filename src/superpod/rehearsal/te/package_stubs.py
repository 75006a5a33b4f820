"""Stubs for packages of GPU kernels, which a build on a CPU imports but never runs."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any, cast

from superpod.rehearsal.te import package_kernels

ONLY_FOR_IMPORT = ("onnxscript",)
"""Packages that are needed only to import Transformer Engine, for its ONNX export, which training does not use."""
KERNELS = (
    *("apex", "apex.contrib", "apex.contrib.layer_norm", "apex.contrib.layer_norm.layer_norm"),
    *("apex.normalization", "apex.normalization.fused_layer_norm"),
    *("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda", "scaled_softmax_cuda"),
    *("fused_weight_gradient_mlp_cuda", "flash_attn_2_cuda", "flash_attn", "flash_attn.flash_attn_interface"),
    *("triton", "triton.language", "triton.language.core", "triton.language.standard"),
    *("deep_ep", "deep_ep.utils"),
    *("causal_conv1d", "causal_conv1d.causal_conv1d_interface", "causal_conv1d.causal_conv1d_varlen"),
    *("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"),
    *("mamba_ssm.ops.triton.selective_state_update", "mamba_ssm.ops.triton.layernorm_gated"),
    "mamba_ssm.ops.triton.ssd_combined",
)
"""Packages of kernels in NVIDIA's images. Without them, Megatron and NeMo build different layers or raise an error."""


class Anything:
    """An object whose attributes, items and call results are itself, for decorators and annotations of kernels."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> Anything:
        """Return itself."""
        return self

    def __getitem__(self, _: object) -> Anything:
        return self


class Package(types.ModuleType):
    """A module in which every name is defined."""

    def __init__(self, name: str) -> None:
        super().__init__(name, __doc__)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or Anything()


def install(names: tuple[str, ...] = KERNELS) -> None:
    """Add stubs to `sys.modules` for those of the packages `names` that are not installed."""
    for name in names:
        with contextlib.suppress(ImportError):
            __import__(name)
        if name not in sys.modules:
            sys.modules[name] = Package(name)
    for name, functions in package_kernels.FUNCTIONS.items():
        package = sys.modules.get(name)
        if isinstance(package, Package):
            vars(package).update(functions)
    gated = sys.modules.get("mamba_ssm.ops.triton.layernorm_gated")
    if isinstance(gated, Package):
        vars(gated)["RMSNorm"] = _create_gated_norm()


def _create_gated_norm() -> type:
    """Create a class like mamba-ssm's gated norm, with a weight per channel (ops/triton/layernorm_gated.py)."""
    import torch

    class RMSNorm(torch.nn.Module):
        def __init__(
            self, hidden_size: int, eps: float = 1e-5, *, device: object = None, dtype: Any = None, **_: object
        ) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=cast(Any, device), dtype=dtype))

        def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
            return x * self.weight

    return RMSNorm


@contextlib.contextmanager
def install_during_import(names: tuple[str, ...] = ONLY_FOR_IMPORT) -> Iterator[None]:
    """Install stubs for the packages `names` within the block, and remove them at its end."""
    old_modules = set(sys.modules)
    install(names)
    try:
        yield
    finally:
        for name in names:
            if name not in old_modules and isinstance(sys.modules.get(name), Package):
                del sys.modules[name]
