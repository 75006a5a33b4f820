"""Simulates the properties of a GPU that Transformer Engine, Megatron and NeMo query, for any generation."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from superpod.errors import UserError
from superpod.planner.kernels.attention import CUDNN as CUDNN

CUDA = "12.9"
CUBLAS_LT = 120905
FLASH_ATTENTION = "2.7.4.post1"
"""Version of flash-attn; Transformer Engine 2.9 supports 2.1.1 to 2.8.1, on Blackwell from 2.7.3 on."""


class UnknownGenerationError(UserError):
    """There is no simulated GPU of this generation."""


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU, with the field names of torch.cuda.get_device_properties."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    """Bytes."""
    multicast: bool
    """Whether NVLink switches support CUDA Multicast: from Hopper on."""
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048


GENERATIONS = {
    "sm80": Gpu("A100", 8, 0, 108, 80 << 30, multicast=False),
    "sm90": Gpu("H100", 9, 0, 132, 80 << 30, multicast=True),
    "sm100": Gpu("B200", 10, 0, 148, 180 << 30, multicast=True),
    "sm103": Gpu("B300", 10, 3, 148, 270 << 30, multicast=True),
}
"""The GPU that represents each generation."""

_current = [GENERATIONS["sm90"]]
"""The simulated GPUs of the entered blocks; the last one is active."""


def current_gpu() -> Gpu:
    """Return the GPU that is simulated in the current block, by default an H100."""
    return _current[-1]


@contextlib.contextmanager
def generation(name: str) -> Iterator[Gpu]:
    """Simulate a GPU of a generation, such as `sm90`, within the block, and yield it.

    Raises:
        UnknownGenerationError: the generation is not one of `GENERATIONS`.
    """
    if name not in GENERATIONS:
        raise UnknownGenerationError(f"no GPU of generation {name!r} is simulated", f"use {', '.join(GENERATIONS)}")
    _current.append(GENERATIONS[name])
    _clear_caches()
    try:
        yield current_gpu()
    finally:
        _current.pop()
        _clear_caches()


def _clear_caches() -> None:
    """Clear the caches and global state of Transformer Engine and Megatron that depend on the GPU."""
    for cached in _find_cached_functions(len(sys.modules)):
        cached.cache_clear()
    base: Any = sys.modules.get("transformer_engine.pytorch.module.base")
    if base:
        base.destroy_ub()
        base._cublas_workspace = None
        base._multi_stream_cublas_workspace = []
        base._dummy_wgrads = {}
    graphs = sys.modules.get("megatron.core.transformer.cuda_graphs")
    if graphs:
        graphs._CudagraphGlobalRecord.cudagraph_record = []  # they refer to a model
        graphs.CudaGraphManager.global_mempool = graphs.CudaGraphManager.fwd_mempools = None
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization:
        quantization.FP8GlobalStateManager.reset()
        for name in ("fp8_available", "mxfp8_available", "fp8_block_scaling_available", "nvfp4_available"):
            setattr(quantization.FP8GlobalStateManager, name, None)


@functools.lru_cache(maxsize=1)
def _find_cached_functions(_modules: int) -> list[functools._lru_cache_wrapper[object]]:
    """Return the lru_cache functions of Transformer Engine; the argument is the number of imported modules."""
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("transformer_engine")]
    values = [value for module in loaded for value in vars(module).values()]
    return [value for value in values if isinstance(value, functools._lru_cache_wrapper)]
