"""Which GPU holds which coordinate: the grids of Megatron-Core's `parallel_state`, as strides.

A global rank's coordinate in a dimension is rank // stride % size. Megatron orders dense layers as tp, cp, dp, pp and
experts as etp, ep, edp, pp, the first changing fastest (megatron-core 0.15.3, parallel_state.py, `RankGenerator` with
order tp-cp-ep-dp-pp). Slurm fills one node after the other, so rank // GPUs of a node is the node.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from superpod.planner.arrays import Column
from superpod.planner.planned_job import PlannedJob


class Dimension(NamedTuple):
    """One dimension of a grid of ranks."""

    stride: int
    size: int

    def of(self, rank: Column | int) -> Column:
        """The coordinate of each global rank."""
        return np.asarray(rank) // self.stride % self.size


Grid = dict[str, Dimension]

DENSE, EXPERTS = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
"""Dimensions of the two grids, the fastest first."""


def grid(sizes: dict[str, int], names: tuple[str, ...]) -> Grid:
    """Strides of the dimensions `names`, the fastest first."""
    grid, stride = Grid(), 1
    for name in names:
        grid[name] = Dimension(stride, sizes[name])
        stride *= sizes[name]
    return grid


def of(job: PlannedJob) -> Grid:
    """Every dimension of a run, of dense layers and of experts. Raises UserError where the layout does not divide."""
    x = job.layout
    etp = x.tp if x.etp is None else x.etp
    dense = {"tp": x.tp, "cp": x.cp, "dp": job.dp, "pp": x.pp}
    experts = {"etp": etp, "ep": x.ep, "edp": x.tp * x.cp * job.dp // (etp * x.ep), "pp": x.pp}
    return grid(dense, DENSE) | (grid(experts, EXPERTS) if job.model.is_moe else {})


def groups(grid: Grid, names: tuple[str, ...], over: tuple[str, ...]) -> list[list[int]]:
    """Ranks that differ in the dimensions `over` only: the process groups of `over`, each in ascending order."""
    fixed = [name for name in names if name not in over]
    return [
        sorted(
            sum(at[name] * grid[name].stride for name in names)
            for moved in product(*(range(grid[name].size) for name in over))
            for at in [dict(zip(fixed, place, strict=True)) | dict(zip(over, moved, strict=True))]
        )
        for place in product(*(range(grid[name].size) for name in reversed(fixed)))
        for place in [place[::-1]]
    ]
