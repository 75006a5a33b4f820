"""Memory of a run, per pipeline rank and by owner: arithmetic over columns, for one layout and for a million alike.

>>> from superpod.planner import columns, memory
>>> owners = memory.by_owner(job, columns.of(job))  # doctest: +SKIP
>>> memory.verdict(job)  # doctest: +SKIP
'ok'
"""

from __future__ import annotations

import numpy as np

from superpod.planner import columns
from superpod.planner.columns import Columns
from superpod.planner.job import Job
from superpod.planner.memory import peak as _peak
from superpod.planner.memory.capacity import Verdict, limit, reserved_of, verdict_of
from superpod.planner.memory.fixed import Inference, checkpoint_bytes, inference
from superpod.planner.memory.units import Array, Units

__all__ = [
    "Inference",
    "Verdict",
    "allocated",
    "by_owner",
    "checkpoint_bytes",
    "fits",
    "inference",
    "limit",
    "peak",
    "reserved",
    "verdict",
]


def by_owner(job: Job, c: Columns) -> dict[str, Array]:
    """Bytes at the peak of each pipeline rank by owner; their sum is `torch.cuda.max_memory_allocated`.

    Args:
        job: the run; its layout and number of GPUs are not read.
        c: the layouts and ranks.

    Returns:
        Owner to float64 bytes of the shape of `c.rank`: parameters, gradients, optimizer, fp8_copies, activations,
        logits, transient (gradients of activations and what recomputation brings back), wgrad_dummies, buffers.
    """
    shape = np.broadcast_shapes(c.rank.shape, c.tp.shape)
    owners = _peak.by_owner(Units(job, c))
    return {owner: np.broadcast_to(np.asarray(size, dtype=np.float64), shape) for owner, size in owners.items()}


def allocated(job: Job, c: Columns) -> Array:
    """Peak bytes in tensors on each rank."""
    return np.add.reduce(list(by_owner(job, c).values()))


def reserved(job: Job, c: Columns) -> Array:
    """Peak bytes that PyTorch's allocator holds on each rank."""
    return reserved_of(allocated(job, c))


def peak(job: Job, c: Columns) -> tuple[Array, Array]:
    """(allocated, reserved) on each rank, bytes."""
    size = allocated(job, c)
    return size, reserved_of(size)


def fits(job: Job, c: Columns) -> Array:
    """Whether each layout fits: all its ranks' reserved bytes are within `limit`. The last axis is gone."""
    return np.all(reserved(job, c) <= limit(job), axis=-1)


def verdict(job: Job) -> Verdict:
    """`ok` or `oom` of one run: whether the tensors of its fullest rank are within `limit` (`capacity.verdict_of`)."""
    return verdict_of(job, allocated(job, columns.of(job)))
