"""What a GPU can give, and whether a run fits."""

from __future__ import annotations

from typing import Literal

import numpy as np

from superpod.planner.job import Job
from superpod.planner.memory.constants import GIB, constant
from superpod.planner.memory.units import Array

Verdict = Literal["ok", "oom"]


def reserved_of(allocated: Array) -> Array:
    """Bytes that PyTorch's allocator holds for so many allocated ones: the median ratio of 344 B200 ranks."""
    return allocated * constant("allocator", "reserved_over_allocated")


def limit(job: Job) -> float:
    """Bytes that PyTorch may reserve: what it sees, less CUDA and NCCL, less a margin."""
    context = constant("allocator", "context_gib") * GIB
    return (job.node.gpu.hbm_usable_bytes - context) * (1 - constant("allocator", "margin"))


def verdict_of(job: Job, reserved: Array) -> Verdict:
    """`ok` when every rank's reserved bytes stay within the limit."""
    return "ok" if bool(np.all(reserved <= limit(job))) else "oom"
