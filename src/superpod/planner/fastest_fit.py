"""Find the fastest layout of a job that fits on its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superpod.errors import UserError
from superpod.planner.hardware import GIB
from superpod.planner.hardware.precisions import auto_precisions
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.planner.search import Space, search

SPACE = Space(mbs=(1, 2))
"""The layouts to search; larger micro-batches need more memory and are rarely much faster."""


@dataclass(frozen=True)
class Fit:
    """The result of `find_fit`."""

    layout: Layout | None
    """The fastest layout that fits, else the fastest tight one; None if no layout fits."""
    tokens_per_s_per_gpu: float = 0.0
    short_gib: float = 0.0
    """GiB by which the smallest layout exceeds the memory limit; 0 if a layout fits."""
    tight: bool = False
    """Whether the layout is tight (`memory.capacity.classify`)."""
    refused: str = ""
    """Message of the rule that every layout violates; "" if some layout is legal."""
    precision: str = ""
    """The precision of the layout; "" if `layout` is None."""


def find_fit(job: PlannedJob, *, auto: bool = False) -> Fit:
    """Search the fastest layout of a job that fits, in the job's precision or, with `auto`, in the fastest precision.

    Of `job.layout`, only gbs is used. Takes about 10 ms per precision for one node.
    """
    if not auto:
        return _find_fit(job)
    fits = [_find_fit(job.replace(precision=name)) for name in auto_precisions(job.node.gpu)]
    return min(fits, key=lambda fit: (-fit.tokens_per_s_per_gpu, bool(fit.refused), fit.short_gib))


def _find_fit(job: PlannedJob) -> Fit:
    try:
        result = search(job, SPACE)
    except UserError as refused:
        return Fit(None, refused=str(refused))
    if not len(result.ranked):
        return Fit(None, short_gib=float((np.min(result.reserved) - result.cap) / GIB))
    first = int(result.ranked[0])
    rate = job.tokens / float(result.seconds[first]) / job.gpus
    return Fit(result.layout(first), rate, tight=bool(result.tight[first]), precision=job.precision)
