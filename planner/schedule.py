"""The pipeline's timeline of one step as events, and the closed form that the vectorised model uses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def bubble(each: Array, weight: Array, vp: Array) -> Array:
    """Seconds that the slowest rank waits for the others, over a step: [...] from [..., ranks].

    Args:
        each: forward and backward seconds of one micro-batch on each (distinct) rank, all its chunks.
        weight: pipeline ranks that an entry stands for.
        vp: chunks per rank; the pipeline fills and drains once per chunk's time.

    The slowest rank works without a gap but for the first micro-batch's way to it and back, and the last one's:
    (m - 1) x slowest + sum of all; of equal ranks (p - 1)(f + b) / v (arXiv:2104.04473, section 2.2).
    """
    held = np.where(weight > 0, each, 0.0)
    return ((weight * held).sum(axis=-1) - held.max(axis=-1)) / vp
