"""Removes environment variables of the caller that Transformer Engine, Megatron and NeMo would read."""

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
"""Variables that affect which layers are built, or whether they are supported; a build sets its own."""


@contextlib.contextmanager
def unset_run_variables() -> Iterator[None]:
    """Unset the variables in `NAMES` and `PREFIXES` within the block, and restore the environment at its end."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name in NAMES or name.startswith(PREFIXES)]:
            del os.environ[name]
        yield
