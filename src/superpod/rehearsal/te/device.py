"""A GPU of a generation that is not here: what Transformer Engine, Megatron and NeMo ask of it."""

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
"""Of flash-attn in those images; Transformer Engine 2.9 takes 2.1.1 to 2.8.1, on Blackwell from 2.7.3 on."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as CUDA describes it."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    """Bytes."""
    multicast: bool
    """Whether NVLink switches copy for it (CUDA Multicast): from Hopper on."""
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048


GENERATIONS = {
    "sm80": Gpu("A100", 8, 0, 108, 80 << 30, multicast=False),
    "sm90": Gpu("H100", 9, 0, 132, 80 << 30, multicast=True),
    "sm100": Gpu("B200", 10, 0, 148, 180 << 30, multicast=True),
    "sm103": Gpu("B300", 10, 3, 148, 270 << 30, multicast=True),
}
"""The GPU that stands for each generation."""

_current = [GENERATIONS["sm90"]]


def current() -> Gpu:
    """The GPU that this process pretends to have."""
    return _current[-1]


@contextlib.contextmanager
def generation(name: str) -> Iterator[Gpu]:
    """Pretend to have a GPU of a generation.

    Raises:
        UserError: no such generation.
    """
    if name not in GENERATIONS:
        raise UserError(f"no GPU generation is called {name!r}", f"known: {', '.join(GENERATIONS)}")
    _current.append(GENERATIONS[name])
    _forget()
    try:
        yield current()
    finally:
        _current.pop()
        _forget()


def _forget() -> None:
    """Clear what Transformer Engine and Megatron remember of the last GPU: their caches, and TE's global state."""
    for cached in _caches(len(sys.modules)):
        cached.cache_clear()
    base: Any
    if base := sys.modules.get("transformer_engine.pytorch.module.base"):
        base.destroy_ub()
        base._cublas_workspace = None
        base._multi_stream_cublas_workspace = []
        base._dummy_wgrads = {}
    if graphs := sys.modules.get("megatron.core.transformer.cuda_graphs"):
        graphs._CudagraphGlobalRecord.cudagraph_record = []  # they hold a model
        graphs.CudaGraphManager.global_mempool = graphs.CudaGraphManager.fwd_mempools = None
    if quantization := sys.modules.get("transformer_engine.pytorch.quantization"):
        quantization.FP8GlobalStateManager.reset()
        for name in ("fp8_available", "mxfp8_available", "fp8_block_scaling_available", "nvfp4_available"):
            setattr(quantization.FP8GlobalStateManager, name, None)


@functools.lru_cache(maxsize=1)
def _caches(_modules: int) -> list[functools._lru_cache_wrapper[object]]:
    """The remembering functions of Transformer Engine, while no further module is imported."""
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("transformer_engine")]
    values = [value for module in loaded for value in vars(module).values()]
    return [value for value in values if isinstance(value, functools._lru_cache_wrapper)]
