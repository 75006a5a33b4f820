"""Stand-in for `transformer_engine_torch`, the compiled part of Transformer Engine: shapes and refusals, no numbers.

A function that is not here stands for a kernel that no build calls: it says its name when it is called.
"""

from __future__ import annotations

import importlib.machinery
import types
from collections.abc import Callable
from typing import Any

from superpod.rehearsal.te import device, enumerations, kernels, userbuffers

NAME = "transformer_engine_torch"


class AbsentKernelError(NotImplementedError):
    """A kernel was called for which there is no stand-in."""


class Extension(types.ModuleType):
    """The module; names are looked up as Transformer Engine's Python imports them."""

    def __init__(self) -> None:
        super().__init__(NAME, __doc__)
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
        self.__dict__.update(enumerations.ALL)
        self.__dict__.update({name: getattr(userbuffers, name) for name in userbuffers.__dict__ if "Comm" in name})
        self.__dict__.update(kernels.KERNELS)
        self.FP8TensorMeta = FP8TensorMeta
        for function in (device_supports_multicast, ubuf_built_with_mpi, get_stream_priority_range, get_cudnn_version):
            setattr(self, function.__name__, function)
        for function in (get_cublasLt_version, get_num_cublas_streams, get_fused_attn_backend):
            setattr(self, function.__name__, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: object, **__: object) -> Any:
            raise AbsentKernelError(f"{NAME}.{name} has no stand-in: a build on a CPU cannot call it")

        absent.__name__ = name
        setattr(self, name, absent)
        return absent


class FP8TensorMeta:
    """Scales of a layer's tensors."""

    scale: object
    scale_inv: object
    amax_history: object


def device_supports_multicast(*_: object) -> bool:
    """Whether NVLink switches copy for the GPU."""
    return device.current().multicast


def ubuf_built_with_mpi() -> bool:
    """NVIDIA's images build Transformer Engine without NVTE_UB_WITH_MPI."""
    return False


def get_stream_priority_range(*_: object) -> tuple[int, int]:
    """Lowest and highest priority of CUDA streams, as NVIDIA's data-centre GPUs have them."""
    return 0, -5


def get_cudnn_version() -> int:
    """As cuDNN's major * 10000 + minor * 100 + patch."""
    return device.CUDNN


def get_cublasLt_version() -> int:
    """As cuBLASLt's major * 10000 + minor * 100 + patch."""
    return device.CUBLAS_LT


def get_num_cublas_streams() -> int:
    """Streams of a grouped GEMM (common/util/multi_stream.h)."""
    return 4


def get_fused_attn_backend(*arguments: Any) -> Any:
    """The fused attention kernel of cuDNN, by `superpod.rehearsal.te.attention`."""
    from superpod.rehearsal.te import attention

    return attention.fused_kernel(*arguments)
