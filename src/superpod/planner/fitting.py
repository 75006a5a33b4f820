"""Whether a job has any layout that fits its GPUs, and how fast the best one is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superpod.errors import UserError
from superpod.planner.hardware import GIB
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.planner.search import Space, search

SPACE = Space(mbs=(1, 2))
"""Larger micro-batches take more memory, and seldom much less time."""


@dataclass(frozen=True)
class Fit:
    """The answer for one job."""

    layout: Layout | None
    """The fastest that fits, or else is tight; None where none is."""
    tokens_per_s_per_gpu: float = 0.0
    short_gib: float = 0.0
    """What the smallest layout lacks on its fullest rank, GiB; 0 where one fits."""
    tight: bool = False
    """It may run, with next to no room or without fragmentation only (`memory.capacity.classify`)."""
    refused: str = ""
    """The rule that no layout keeps, or ""."""


def find_fit(job: PlannedJob) -> Fit:
    """The best layout of a job, if any; of `job.layout` only the global batch counts. Takes about 10 ms on one node."""
    try:
        result = search(job, SPACE)
    except UserError as refused:
        return Fit(None, refused=str(refused))
    if not len(result.ranked):
        return Fit(None, short_gib=float((np.min(result.reserved) - result.cap) / GIB))
    first = int(result.ranked[0])
    rate = job.tokens / float(result.seconds[first]) / job.gpus
    return Fit(result.layout(first), rate, tight=bool(result.tight[first]))
