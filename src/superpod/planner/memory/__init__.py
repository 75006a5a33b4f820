"""Memory of a run per pipeline rank and category, computed from columns, for one layout or for a million.

>>> from superpod.planner import columns, memory
>>> owners = memory.by_owner(job, columns.from_job(job))  # doctest: +SKIP
>>> memory.fit(job)  # doctest: +SKIP
'fits'
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from superpod.planner import columns
from superpod.planner.arrays import Array
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


@dataclass(frozen=True)
class Peak:
    """Bytes of each rank at its moment of peak memory; arrays have the shape of `Columns.rank`."""

    owners: dict[str, Array]
    """Category -> bytes: parameters, gradients, optimizer, fp8_copies, activations, logits, transient (gradients of
    activations, and recomputed activations), wgrad_dummies, buffers."""
    set_aside: Array | float
    """Unused bytes in the memory pool of CUDA graphs."""

    @cached_property
    def allocated(self) -> Array:
        """Bytes in tensors, as in `torch.cuda.max_memory_allocated`: the sum over all categories."""
        return sum(self.owners.values())  # type: ignore[return-value]

    @cached_property
    def needed(self) -> Array:
        """Bytes in tensors and in the pools of CUDA graphs."""
        return self.allocated + self.set_aside

    @cached_property
    def reserved(self) -> Array:
        """Bytes that PyTorch's allocator reserves."""
        return reserved_bytes(self.allocated) + self.set_aside


def peak(job: PlannedJob, c: Columns) -> Peak:
    """Return the peak memory of each pipeline rank of `c`; the layout and number of GPUs of `job` are ignored."""
    shape = np.broadcast_shapes(c.rank.shape, c.tp.shape)
    moment = _peak.peak_moment(MemoryUnits(job, c))
    owners = {o: np.broadcast_to(np.asarray(size, dtype=np.float64), shape) for o, size in moment.owners.items()}
    if (factor := corrections.memory_factor(job.node.gpu.calibrated_as)) != 1:  # a user's own calibration
        owners = {owner: size * factor for owner, size in owners.items()}
    return Peak(owners, moment.set_aside)


def by_owner(job: PlannedJob, c: Columns) -> dict[str, Array]:
    """Return category -> bytes of each pipeline rank at its peak; see `Peak.owners`."""
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
