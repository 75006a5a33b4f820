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
    """Return whether this machine's CPU lacks AVX-512, and with it a fast BF16 GEMM."""
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

    return _multiply(torch.ops.aten.mm.out, (), a, b)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch

    return _multiply(torch.ops.aten.bmm.out, (), a, b)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **factors: float) -> torch.Tensor:
    import torch

    return _multiply(torch.ops.aten.addmm.out, (bias,), a, b, **factors)


def _baddbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **factors: float) -> torch.Tensor:
    import torch

    return _multiply(torch.ops.aten.baddbmm.out, (bias,), a, b, **factors)


def _multiply(
    operator: Any, bias: tuple[torch.Tensor, ...], a: torch.Tensor, b: torch.Tensor, **factors: float
) -> torch.Tensor:
    """Call a GEMM operator with the operands [..., m, k] and [..., k, n]; BF16 operands are multiplied in FP32.

    `factors` are the arguments `beta` and `alpha` of the operators with a bias.
    """
    import torch

    dtype = a.dtype
    if dtype is torch.bfloat16 and b.dtype is torch.bfloat16:
        a, b = a.float(), b.float()
    product = a.new_empty((*a.shape[:-1], b.shape[-1]))
    operator(*(tensor.to(a.dtype) for tensor in bias), a, b, **factors, out=product)
    return product.to(dtype)
