"""Computes the coordinates of GPUs in the rank grids of Megatron-Core's `parallel_state`.

The coordinate of a global rank in a dimension is rank // stride % size. Megatron orders the dimensions of dense layers
as tp, cp, dp, pp and of experts as etp, ep, edp, pp, the first varying fastest (megatron-core 0.15.3,
parallel_state.py, `RankGenerator` with order tp-cp-ep-dp-pp). Slurm fills nodes in order, so that the node of a rank is
rank // GPUs per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from superpod.planner.arrays import Column
from superpod.planner.planned_job import PlannedJob


class Dimension(NamedTuple):
    """A dimension of a grid of ranks."""

    stride: int
    """Difference between the global ranks of neighbors in this dimension."""
    size: int

    def coordinate(self, rank: Column | int) -> Column:
        """Return the coordinate of each global rank in this dimension."""
        return np.asarray(rank) // self.stride % self.size


Grid = dict[str, Dimension]
"""{name such as `tp`: dimension}."""

DENSE, EXPERTS = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
"""Dimensions of the two grids, the fastest varying first."""


def make_grid(sizes: dict[str, int], names: tuple[str, ...]) -> Grid:
    """Return the grid of the dimensions `names`, the fastest varying first, with the sizes in `sizes`."""
    grid, stride = Grid(), 1
    for name in names:
        grid[name] = Dimension(stride, sizes[name])
        stride *= sizes[name]
    return grid


def rank_grid(job: PlannedJob) -> Grid:
    """Return all dimensions of the grids of dense layers and, for a MoE, of experts.

    Raises:
        UserError: the number of GPUs is not a multiple of TP x PP x CP.
    """
    layout = job.layout
    grid = make_grid({"tp": layout.tp, "cp": layout.cp, "dp": job.dp, "pp": layout.pp}, DENSE)
    if job.model.is_moe:
        etp = layout.tp if layout.etp is None else layout.etp
        edp = layout.tp * layout.cp * job.dp // (etp * layout.ep)
        grid |= make_grid({"etp": etp, "ep": layout.ep, "edp": edp, "pp": layout.pp}, EXPERTS)
    return grid


def groups(grid: Grid, names: tuple[str, ...], over: tuple[str, ...]) -> list[list[int]]:
    """Return the process groups over the dimensions `over`: ranks with equal other coordinates, in ascending order.

    `names` are all dimensions of the grid, the fastest varying first.
    """

    def offsets(dimensions: Sequence[str]) -> list[int]:
        """Return the ranks at all coordinates in these dimensions, the last one varying fastest, and 0 in others."""
        steps = [range(0, grid[name].size * grid[name].stride, grid[name].stride) for name in dimensions]
        return [sum(step) for step in product(*steps)]

    fixed_names = [name for name in reversed(names) if name not in over]
    return [sorted(first + offset for offset in offsets(over)) for first in offsets(fixed_names)]
