"""The memory that a GPU can give, and whether a run fits."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from superpod.planner.arrays import Array
from superpod.planner.hardware import GIB, Gpu
from superpod.planner.memory.constants import constant
from superpod.planner.planned_job import PlannedJob


def reserved_bytes(allocated: Array) -> Array:
    """Bytes that PyTorch's allocator reserves for so many allocated ones: the median ratio of 344 B200 ranks."""
    return allocated * constant("allocator", "reserved_over_allocated")


def usable(gpu: Gpu) -> float:
    """Bytes that PyTorch may reserve on a GPU: what it sees, less CUDA and NCCL, less a margin."""
    context = constant("allocator", "context_gib") * GIB
    return (gpu.hbm_usable_bytes - context) * (1 - constant("allocator", "margin"))


def limit(job: PlannedJob) -> float:
    """Bytes that a run may reserve: its own cap, or what its GPU has."""
    cap = job.options.memory_cap
    return usable(job.node.gpu) if cap is None else cap * GIB


FITS, TIGHT, TOO_LARGE = range(3)
"""What memory says of a layout, as `classify` codes it for arrays of layouts."""
Fit = Literal["fits", "tight", "does not fit"]
FIT: tuple[Fit, ...] = get_args(Fit)
"""The same for people, by code."""
MARGIN = 0.005
"""Share of the limit below which room counts as none: the model of memory errs by more."""


def classify(job: PlannedJob, needed: Array, reserved: Array) -> NDArray[np.int64]:
    """FITS, TIGHT or TOO_LARGE of each layout; the only place where that is decided.

    Args:
        job: the run, whose GPU or memory cap gives the limit.
        needed: bytes in tensors and in the pools of CUDA graphs, on the fullest rank of each layout.
        reserved: bytes that PyTorch's allocator holds for them.

    A layout fits where the allocator's bytes are within the limit with `MARGIN` to spare. It is tight where only the
    tensors are: it may run, as the allocator frees unused blocks before it gives up, and expandable_segments avoids
    fragments. It does not fit where the tensors alone exceed the limit. A memory cap of the user's is a limit of
    reserved bytes, and is never exceeded.
    """
    most = limit(job)
    too_large = needed > most if job.options.memory_cap is None else reserved > most
    return np.where(too_large, TOO_LARGE, np.where(reserved > most * (1 - MARGIN), TIGHT, FITS))
