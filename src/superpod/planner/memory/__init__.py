"""Memory of a run per pipeline rank and category, computed from columns, for one layout or for a million.

>>> from superpod.planner import columns, memory
>>> owners = memory.by_owner(job, columns.from_job(job))  # doctest: +SKIP
>>> memory.fit(job)  # doctest: +SKIP
'fits'
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from superpod.planner import columns
from superpod.planner.arrays import Array, Flags
from superpod.planner.calibration import corrections
from superpod.planner.columns import Columns
from superpod.planner.memory import lora
from superpod.planner.memory import peak as _peak
from superpod.planner.memory.capacity import FIT, FITS, TIGHT, TOO_LARGE, Fit, classify, limit, reserved_bytes, usable
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.planned_job import PlannedJob

__all__ = [
    "FIT",
    "FITS",
    "TIGHT",
    "TOO_LARGE",
    "Fit",
    "Peak",
    "allocated",
    "by_owner",
    "checkpoint_bytes",
    "classify",
    "fit",
    "limit",
    "peak",
    "reserved",
    "usable",
]


class Highest(NamedTuple):
    """Bytes on the rank with the highest peak of each layout, as in `Peak`."""

    allocated: Array
    needed: Array
    reserved: Array


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak of each rank."""

    parts: dict[str, Array]
    """Category -> bytes, as `owners`; arrays broadcast to `shape`."""
    set_aside: Array | float
    """Unused bytes in the memory pool of CUDA graphs."""
    shape: tuple[int, ...]
    """`Columns.shape`"""

    @cached_property
    def owners(self) -> dict[str, Array]:
        """Category -> bytes: parameters, gradients, optimizer, fp8_copies, activations, logits, transient (gradients
        of activations, and recomputed activations), wgrad_dummies, buffers."""
        return {owner: np.broadcast_to(size, self.shape) for owner, size in self.parts.items()}

    @cached_property
    def allocated(self) -> Array:
        """Bytes in tensors, as in `torch.cuda.max_memory_allocated`: the sum over all categories."""
        return np.broadcast_to(sum(self.parts.values()), self.shape)

    @cached_property
    def needed(self) -> Array:
        """Bytes in tensors and in the pools of CUDA graphs."""
        return self.allocated + self.set_aside

    @cached_property
    def reserved(self) -> Array:
        """Bytes that PyTorch's allocator reserves."""
        return reserved_bytes(self.allocated) + self.set_aside

    def highest(self, held: Flags) -> Highest:
        """Return the highest peaks over the ranks; entries that are not `held` only pad the table."""
        allocated = np.where(held, self.allocated, 0).max(axis=-1)
        if not np.any(self.set_aside):
            return Highest(allocated, allocated, reserved_bytes(allocated))
        needed, reserved = (np.where(held, part, 0).max(axis=-1) for part in (self.needed, self.reserved))
        return Highest(allocated, needed, reserved)


def peak(job: PlannedJob, c: Columns) -> Peak:
    """Return the peak memory of each pipeline rank.

    Args:
        job: the run; its layout and number of GPUs are not used.
        c: the layouts and ranks.
    """
    moment = _peak.peak_moment(MemoryUnits(job, c))
    parts = {owner: np.asarray(size, dtype=np.float64) for owner, size in moment.owners.items()}
    if (factor := corrections.memory_factor(job.node.gpu.calibrated_as)) != 1:  # a user's own calibration
        parts = {owner: size * factor for owner, size in parts.items()}
    return Peak(parts, moment.set_aside, c.shape)


def by_owner(job: PlannedJob, c: Columns) -> dict[str, Array]:
    """Return {category: bytes of each pipeline rank} at the peak of each rank; see `Peak.owners`."""
    return peak(job, c).owners


def allocated(job: PlannedJob, c: Columns) -> Array:
    """Return the peak bytes in tensors on each rank."""
    return peak(job, c).allocated


def reserved(job: PlannedJob, c: Columns) -> Array:
    """Return the peak bytes that PyTorch's allocator reserves on each rank."""
    return peak(job, c).reserved


def fit(job: PlannedJob) -> Fit:
    """Return whether one run fits in memory: `fits`, `tight` or `too_large` (`capacity.classify`)."""
    at = peak(job, columns.from_job(job))
    return FIT[int(classify(job, at.needed.max(), at.reserved.max()))]


def checkpoint_bytes(job: PlannedJob) -> int:
    """Return the bytes of a distributed checkpoint: 14 per parameter for BF16 weights, fp32 master weights and moments.

    fp32 training saves 12 bytes per parameter. LoRA saves only the adapters.
    """
    bytes_per_parameter = 12 if job.precision in ("fp32", "tf32") else 14
    if job.task == "lora":
        adapters = lora.adapters(MemoryUnits(job, columns.from_job(job)))
        return int(bytes_per_parameter * adapters.dense.sum() * job.layout.tp)
    return bytes_per_parameter * job.model.parameters().total
