"""Substitute for `transformer_engine_torch`, the compiled part of Transformer Engine: shapes and errors, no values.

Functions that are not defined here are kernels that no build calls; they raise an error when they are called.
"""

from __future__ import annotations

import importlib.machinery
import types
from collections.abc import Callable
from typing import Any

from superpod.rehearsal.te import device
from superpod.rehearsal.te.compiled import attention_backends, enumerations, kernels, userbuffers

NAME = "transformer_engine_torch"


class AbsentKernelError(NotImplementedError):
    """A kernel without a substitute was called."""


class Extension(types.ModuleType):
    """A module that replaces `transformer_engine_torch`."""

    def __init__(self) -> None:
        super().__init__(NAME, __doc__)
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
        self.__dict__.update(enumerations.ALL)
        self.__dict__.update({name: getattr(userbuffers, name) for name in userbuffers.__dict__ if "Comm" in name})
        self.__dict__.update(kernels.KERNELS)
        self.FP8TensorMeta = FP8TensorMeta
        self.get_fused_attn_backend = attention_backends.select_fused_backend
        for function in (device_supports_multicast, ubuf_built_with_mpi, get_stream_priority_range):
            setattr(self, function.__name__, function)
        for function in (get_cudnn_version, get_cublasLt_version, get_num_cublas_streams):
            setattr(self, function.__name__, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: object, **__: object) -> Any:
            raise AbsentKernelError(f"{NAME}.{name} has no substitute: a build on a CPU cannot call it")

        absent.__name__ = name
        setattr(self, name, absent)
        return absent


class FP8TensorMeta:
    """The FP8 scales of a layer's tensors, as attributes that Transformer Engine sets."""

    scale: object
    scale_inv: object
    amax_history: object


def device_supports_multicast(*_: object) -> bool:
    """Return whether the simulated GPU supports CUDA Multicast."""
    return device.current_gpu().multicast


def ubuf_built_with_mpi() -> bool:
    """Return False, because NVIDIA's images build Transformer Engine without NVTE_UB_WITH_MPI."""
    return False


def get_stream_priority_range(*_: object) -> tuple[int, int]:
    """Return the lowest and highest priority of CUDA streams on NVIDIA's data-center GPUs."""
    return 0, -5


def get_cudnn_version() -> int:
    """Return the version of cuDNN as major * 10000 + minor * 100 + patch."""
    return device.CUDNN


def get_cublasLt_version() -> int:
    """Return the version of cuBLASLt as major * 10000 + minor * 100 + patch."""
    return device.CUBLAS_LT


def get_num_cublas_streams() -> int:
    """Return the number of streams of a grouped GEMM (common/util/multi_stream.h)."""
    return 4
