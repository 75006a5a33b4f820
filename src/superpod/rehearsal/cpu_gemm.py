"""BF16 GEMMs on CPUs without AVX-512.

On them, PyTorch's loop for BF16 takes 54 times as long as an FP32 GEMM (1024 x 512 x 1024 on an AMD EPYC with AVX2:
987 and 18 ms), so that a step of the quickstart took 12 s. A GEMM in FP32 gives the same result: BF16 inputs are exact
in FP32, both accumulate in FP32, and the result is rounded once.
"""

from __future__ import annotations

import platform
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_library: Any = None
"""The library of overriding kernels, which stay registered as long as this object exists."""


def is_needed() -> bool:
    """Return whether this CPU lacks a fast BF16 GEMM."""
    import torch

    return platform.machine() == "x86_64" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def use_float32() -> None:
    """Compute all following BF16 GEMMs of this process in FP32."""
    global _library
    if _library is not None:
        return
    import torch

    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that its own kernels are overridden
        for name, kernel in (("mm", _mm), ("bmm", _bmm), ("addmm", _addmm), ("baddbmm", _baddbmm)):
            _library.impl(name, kernel, "CPU", allow_override=True)


# A kernel cannot call the operator that it overrides, but the variants with `out` are separate operators.


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch

    a32, b32, dtype = _widen(a, b)
    product = a32.new_empty((a.shape[0], b.shape[1]))
    torch.ops.aten.mm.out(a32, b32, out=product)
    return product.to(dtype)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch

    a32, b32, dtype = _widen(a, b)
    product = a32.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    torch.ops.aten.bmm.out(a32, b32, out=product)
    return product.to(dtype)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    import torch

    a32, b32, dtype = _widen(a, b)
    product = a32.new_empty((a.shape[0], b.shape[1]))
    torch.ops.aten.addmm.out(bias.to(a32.dtype), a32, b32, beta=beta, alpha=alpha, out=product)
    return product.to(dtype)


def _baddbmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    import torch

    a32, b32, dtype = _widen(a, b)
    product = a32.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    torch.ops.aten.baddbmm.out(bias.to(a32.dtype), a32, b32, beta=beta, alpha=alpha, out=product)
    return product.to(dtype)


def _widen(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return the operands, converted to FP32 if both are BF16, and the data type of their product."""
    import torch

    if a.dtype is torch.bfloat16 and b.dtype is torch.bfloat16:
        return a.float(), b.float(), a.dtype
    return a, b, a.dtype
