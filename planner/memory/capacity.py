"""The memory that a GPU can give, and whether a run fits."""

from __future__ import annotations

from typing import Literal

import numpy as np

from superpod.planner.arrays import Array
from superpod.planner.hardware import GIB, Gpu
from superpod.planner.memory.constants import constant
from superpod.planner.planned_job import PlannedJob

Verdict = Literal["ok", "oom"]


def reserved_of(allocated: Array) -> Array:
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


def verdict_of(job: PlannedJob, needed: Array) -> Verdict:
    """`ok` when the bytes in tensors stay within the limit on every rank.

    Reserved bytes do not count: PyTorch's allocator frees unused blocks before it gives up, and expandable_segments
    avoid fragments. A plan is stricter than a verdict: `fits` compares reserved bytes.
    """
    return "ok" if bool(np.all(needed <= limit(job))) else "oom"
