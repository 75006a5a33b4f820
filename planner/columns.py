"""`Columns`: many layouts at once. `memory.py` and `steptime.py` are written over these columns, once for one and many.

A column is a numpy array, and all columns of a table have one shape: `[ranks]` for the pipeline ranks of a single
layout, `[layouts, ranks]` in a search, where a rank may stand for several that hold the same (`weight`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from superpod.planner.job import Job
from superpod.planner.layout import CHOICES, MODULES

Column: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """The fields of `Layout` as arrays of equal shape, and what one pipeline rank holds."""

    tp: Column
    pp: Column
    vp: Column
    """1 = not interleaved."""
    cp: Column
    ep: Column
    etp: Column
    """Never None: Megatron's default is filled in."""
    dp: Column
    sp: Column
    """0 or 1."""
    mbs: Column
    micro_batches: Column
    recompute: Column
    """0 none, 1 selective, 2 full."""
    recompute_block: Column
    """1 = the block method, 0 = uniform."""
    recompute_layers: Column
    modules: Column
    """Bit i = `MODULES[i]` is recomputed; 0 unless selective."""
    sharding: Column
    """ZeRO stage: 0 none, 1 to 3."""
    rank: Column
    """Pipeline rank, 0 to pp - 1."""
    weight: Column
    """Pipeline ranks that this entry stands for; over the last axis they add up to pp."""
    blocks: Mapping[str, Column]
    """Blocks of each kind (`attention`, `mla`, `mamba`, `delta`, `mlp`, `moe`) on this rank, its chunks together."""
    layers: Column
    """Transformer layers on this rank."""

    @property
    def first(self) -> NDArray[np.bool_]:
        """Whether the rank holds the embedding."""
        return self.rank == 0

    @property
    def last(self) -> NDArray[np.bool_]:
        """Whether the rank holds the head and the loss."""
        return self.rank == self.pp - 1

    @property
    def edp(self) -> Column:
        """Data-parallel size of the expert grid: tp x cp x dp / (ep x etp)."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def recomputes(self, module: str) -> NDArray[np.bool_]:
        """Where selective recomputation takes a module of `layout.MODULES`."""
        return (self.modules >> MODULES.index(module)) & 1 == 1


def of(job: Job) -> Columns:
    """The pipeline ranks of one job, in order: columns of shape [pp].

    Raises:
        UserError: when the layout does not divide the world or the model.
    """
    layout = job.layout
    pp = layout.pp
    chunks = job.split.chunk_layers(job.model.layers)
    kinds = sorted({block for blocks in job.model.blocks for block in blocks})
    held = [
        Counter(b for r in chunks[rank::pp] for blocks in job.model.blocks[r.start : r.stop] for b in blocks)
        for rank in range(pp)
    ]
    selective = layout.recompute == "selective"

    def same(value: int) -> Column:
        return np.full(pp, value, dtype=np.int64)

    return Columns(
        tp=same(layout.tp),
        pp=same(pp),
        vp=same(layout.vp or 1),
        cp=same(layout.cp),
        ep=same(layout.ep),
        etp=same(layout.etp or layout.tp),
        dp=same(job.dp),
        sp=same(layout.sp),
        mbs=same(layout.mbs),
        micro_batches=same(job.micro_batches),
        recompute=same(CHOICES["recompute"].index(layout.recompute)),
        recompute_block=same(layout.recompute_method == "block"),
        recompute_layers=same(layout.recompute_layers),
        modules=same(sum(1 << MODULES.index(m) for m in layout.recompute_modules) if selective else 0),
        sharding=same(CHOICES["sharding"].index(layout.sharding)),
        rank=np.arange(pp),
        weight=same(1),
        blocks={kind: np.array([each[kind] for each in held]) for kind in kinds},
        layers=np.array([sum(len(r) for r in chunks[rank::pp]) for rank in range(pp)]),
    )
