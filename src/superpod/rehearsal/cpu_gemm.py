"""BF16 GEMMs on CPUs without AVX-512.

On them, PyTorch's loop for BF16 takes 54 times as long as an FP32 GEMM (1024 x 512 x 1024 on an AMD EPYC with AVX2:
987 and 18 ms), so that a step of the quickstart took 12 s. A GEMM in FP32 gives the same result: BF16 inputs are exact
in FP32, both accumulate in FP32, and the result is rounded once.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
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
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            # A kernel cannot call the operator that it overrides, but the variant with `out` is a separate operator.
            kernel = _create_kernel(getattr(torch.ops.aten, name).out)
            _library.impl(name, kernel, "CPU", allow_override=True)


def _create_kernel(operator: Any) -> Callable[..., torch.Tensor]:
    """Create a function that calls a GEMM operator, with BF16 operands converted to FP32.

    The function's arguments are a bias, for operators with one, and matrices [..., m, k] and [..., k, n].
    """
    import torch

    def multiply(*operands: torch.Tensor, **factors: float) -> torch.Tensor:
        *bias, a, b = operands
        dtype = a.dtype
        if dtype is torch.bfloat16 and b.dtype is torch.bfloat16:
            a, b = a.float(), b.float()
        product = a.new_empty((*a.shape[:-1], b.shape[-1]))
        operator(*(tensor.to(a.dtype) for tensor in bias), a, b, **factors, out=product)
        return product.to(dtype)

    return multiply
