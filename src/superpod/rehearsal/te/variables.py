"""The caller's environment is not the ranks': what Transformer Engine, Megatron and NeMo read of it is left out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

PREFIXES = ("NVTE_", "UB_", "NCCL_", "TORCH_NCCL_", "NVSHMEM_", "MCORE_", "MAMBA_", "CUBLAS_", "CUDNN_", "SLURM_")
NAMES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables of a run that change which layers are built, or whether they are refused: a build has its own."""


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Within it the process has none of these variables; what is set within it is undone at the end."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name in NAMES or name.startswith(PREFIXES)]:
            del os.environ[name]
        yield
