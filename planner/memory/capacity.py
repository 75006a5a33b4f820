"""The memory that a GPU can give, and whether a run fits."""

from __future__ import annotations

from typing import Literal

import numpy as np

from superpod.planner.arrays import Array
from superpod.planner.hardware import GIB
from superpod.planner.memory.constants import constant
from superpod.planner.planned_job import PlannedJob

Verdict = Literal["ok", "oom"]


def reserved_of(allocated: Array) -> Array:
    """Bytes that PyTorch's allocator reserves for so many allocated ones: the median ratio of 344 B200 ranks."""
    return allocated * constant("allocator", "reserved_over_allocated")


def limit(job: PlannedJob) -> float:
    """Bytes that PyTorch may reserve: what it sees, less CUDA and NCCL, less a margin; or the run's own cap."""
    if job.options.memory_cap is not None:
        return job.options.memory_cap * GIB
    context = constant("allocator", "context_gib") * GIB
    return (job.node.gpu.hbm_usable_bytes - context) * (1 - constant("allocator", "margin"))


def verdict_of(job: PlannedJob, needed: Array) -> Verdict:
    """`ok` when the bytes in tensors stay within the limit on every rank.

    Reserved bytes do not count: PyTorch's allocator frees unused blocks before it gives up, and expandable_segments
    avoid fragments. A plan is stricter than a verdict: `fits` compares reserved bytes.
    """
    return "ok" if bool(np.all(needed <= limit(job))) else "oom"
