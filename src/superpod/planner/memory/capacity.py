"""Compute the usable memory of a GPU, and decide whether a run fits."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from superpod.planner.arrays import Array
from superpod.planner.hardware import GIB, Gpu
from superpod.planner.memory.constants import constant
from superpod.planner.planned_job import PlannedJob


def reserved_bytes(allocated: Array) -> Array:
    """Return the bytes that PyTorch's allocator reserves: `allocated` x the median ratio measured on 344 B200s."""
    return allocated * constant("allocator", "reserved_over_allocated")


def usable(gpu: Gpu) -> float:
    """Return the bytes that PyTorch can reserve on a GPU: its memory minus CUDA and NCCL contexts and a margin."""
    context = constant("allocator", "context_gib") * GIB
    return (gpu.hbm_usable_bytes - context) * (1 - constant("allocator", "margin"))


def limit(job: PlannedJob) -> float:
    """Return the bytes that a run may reserve: its memory cap, else the usable memory of its GPU."""
    cap = job.options.memory_cap
    return usable(job.node.gpu) if cap is None else cap * GIB


FITS, TIGHT, TOO_LARGE = range(3)
"""Codes that `classify` returns."""
Fit = Literal["fits", "tight", "does not fit"]
FIT: tuple[Fit, ...] = get_args(Fit)
"""Names of the codes, in the same order."""
MARGIN = 0.005
"""Fraction of the limit that must remain free for a layout to fit: the accuracy of the memory model."""


def classify(job: PlannedJob, needed: Array, reserved: Array) -> NDArray[np.int64]:
    """Return FITS, TIGHT or TOO_LARGE for each layout; the only place where this is decided.

    Args:
        job: the run, whose GPU or memory cap determines the limit.
        needed: bytes in tensors and in the pools of CUDA graphs of each layout, on its rank with the highest peak.
        reserved: bytes that PyTorch's allocator reserves for these.

    A layout fits if its reserved bytes are below the limit by at least `MARGIN`. It is tight if only its tensors are
    within the limit: it may run, because the allocator releases cached blocks before it fails, and expandable_segments
    reduces fragmentation. It does not fit if its tensors exceed the limit. A memory cap limits the reserved bytes.
    """
    maximum = limit(job)
    too_large = needed > maximum if job.options.memory_cap is None else reserved > maximum
    return np.where(too_large, TOO_LARGE, np.where(reserved > maximum * (1 - MARGIN), TIGHT, FITS))
