"""`Columns`: the fields of one or many layouts as arrays, from which `memory/` and `steptime.py` compute.

A column is a numpy array, and all columns of a table broadcast to one shape: `[ranks]` for the pipeline ranks of a
single layout (`from_job`), `[layouts, ranks]` for many (`Stages`). In `Stages`, one entry may represent several
identical ranks (`weight`), and columns that do not depend on the rank have shape `[layouts, 1]`. A search combines each
layout with several kinds of sharding and recomputation; these have own axes, `[shardings, recomputations, layouts,
ranks]`, so that what does not depend on them is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from superpod.planner.arrays import Array, Column, Flags
from superpod.planner.layout import RECOMPUTES, SHARDINGS, Layout
from superpod.planner.models import ModelShape, Split
from superpod.planner.planned_job import PlannedJob
from superpod.planner.rules.rules import bits


@dataclass(frozen=True)
class Columns:
    """The fields of `Layout` as arrays of one shape, and the blocks and layers of each pipeline rank."""

    tp: Column
    pp: Column
    vp: Column
    """1 = not interleaved."""
    cp: Column
    ep: Column
    etp: Column
    """tp, Megatron's default, if the layout does not set it."""
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
    """Bit i = `rules.MODULES[i]` is recomputed; 0 unless selective."""
    sharding: Column
    """ZeRO stage: 0 none, 1 to 3."""
    rank: Column
    """Pipeline rank, 0 to pp - 1."""
    weight: Column
    """Number of identical pipeline ranks that this entry represents; the sum over the last axis is pp."""
    blocks: Mapping[str, Column | Array]
    """Number of blocks by kind (`attention`, `mla`, `mamba`, `delta`, `mlp`, `moe`) over all chunks of this rank; MLPs
    of different widths are weighted by width (`ModelShape.count_blocks`)."""
    layers: Column
    """Transformer layers on this rank."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape to which all columns broadcast."""
        return np.broadcast_shapes(*(np.shape(column) for name, column in vars(self).items() if name != "blocks"))

    @property
    def first(self) -> Flags:
        """Whether the rank holds the embedding."""
        return self.rank == 0

    @property
    def last(self) -> Flags:
        """Whether the rank holds the output layer and the loss."""
        return self.rank == self.pp - 1

    @property
    def edp(self) -> Column:
        """Expert data-parallel size: tp x cp x dp / (ep x etp)."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def recomputes(self, module: str) -> Flags:
        """Return whether selective recomputation includes a module of `layout.MODULES`."""
        return (self.modules & bits([module])) != 0


def from_job(job: PlannedJob) -> Columns:
    """Return the pipeline ranks of one job in order, as columns of shape [pp].

    Raises:
        UserError: the world size is not divisible by tp x pp x cp, or the layers by the number of chunks.
    """
    pp = job.layout.pp
    chunks = job.split.chunk_layers(job.model.layers)
    blocks_by_rank = [_count_blocks(job.model, chunks[rank::pp]) for rank in range(pp)]
    kinds = sorted({block for layer in job.model.blocks for block in layer})
    layout_fields = fields([job.layout], [job.dp * job.layout.model_parallel])
    same: dict[str, Any] = {
        name: np.full(pp, column[0])
        for name, column in layout_fields.items()
        if name not in ("gbs", "embedding_as_layer", "loss_as_layer")
    }
    return Columns(
        **same,
        rank=np.arange(pp),
        weight=np.ones(pp, dtype=np.int64),
        blocks={kind: np.array([rank_blocks.get(kind, 0) for rank_blocks in blocks_by_rank]) for kind in kinds},
        layers=np.array([sum(map(len, chunks[rank::pp])) for rank in range(pp)]),
    )


def fields(layouts: Sequence[Layout], gpus: Sequence[int], gbs: Sequence[int] | None = None) -> dict[str, Column]:
    """Return the fields of layouts as columns of shape [layouts], including dp and micro_batches.

    `gpus` is the world size of each layout; `gbs`, if given, replaces the global batch size of each. Divisions round
    down; `legality` checks divisibility.
    """
    known: dict[int, tuple[int, ...]] = {}  # tables repeat layouts, and reading the dataclass is slow
    rows = [known.get(id(x)) or known.setdefault(id(x), _to_integers(x)) for x in layouts]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(_OWN))
    columns = dict(zip(_OWN, table.T, strict=True))
    columns["gbs"] = np.array([x.gbs for x in layouts] if gbs is None else gbs, dtype=np.int64)
    unit = columns["tp"] * columns["pp"] * columns["cp"]
    columns["dp"] = np.maximum(1, np.array(gpus, dtype=np.int64) // np.maximum(1, unit))
    columns["micro_batches"] = columns["gbs"] // np.maximum(1, columns["mbs"] * columns["dp"])
    return {name: columns[name] for name in NUMBERS}


NUMBERS = (
    *("tp", "pp", "vp", "cp", "ep", "etp", "sp", "mbs", "gbs", "dp", "micro_batches"),
    *("embedding_as_layer", "loss_as_layer"),
    *("recompute", "recompute_block", "recompute_layers", "modules", "sharding"),
)
"""Columns that `fields` returns."""
_OWN = tuple(name for name in NUMBERS if name not in ("gbs", "dp", "micro_batches"))


def _to_integers(x: Layout) -> tuple[int, ...]:
    """Return a layout's fields as integers, in the order of `_OWN`."""
    return (
        *(x.tp, x.pp, x.vp or 1, x.cp, x.ep, x.etp or x.tp, int(x.sp), x.mbs),
        *(int(x.embedding_as_layer), int(x.loss_as_layer)),
        *(RECOMPUTES.index(x.recompute), int(x.recompute_method == "block"), x.recompute_layers),
        *(x.modules, SHARDINGS.index(x.sharding)),
    )


class Stages:
    """The distinct pipeline ranks of several partitions of the layers, computed once for all layouts."""

    def __init__(self, model: ModelShape, splits: Sequence[Split]) -> None:
        ranks_by_split = [_distinct_ranks(model, split) for split in splits]
        shape = (len(ranks_by_split), max((len(ranks) for ranks in ranks_by_split), default=1))
        kinds = sorted({kind for blocks in model.blocks for kind in blocks})
        self.ranks = np.array([len(ranks) for ranks in ranks_by_split])
        """Number of distinct ranks of each split."""
        self._rank, self._weight, self._layers = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self._blocks = {kind: np.zeros(shape) for kind in kinds}
        for i, ranks in enumerate(ranks_by_split):
            # Copies of the first rank with weight 0 pad the list to the length of the longest.
            padding = [(*ranks[0][:1], 0, *ranks[0][2:])] * (shape[1] - len(ranks))
            for j, (rank, weight, layers, blocks) in enumerate(ranks + padding):
                self._rank[i, j], self._weight[i, j], self._layers[i, j] = rank, weight, layers
                for kind, count in blocks.items():
                    self._blocks[kind][i, j] = count

    def columns(self, split: Column, values: Mapping[str, Column]) -> Columns:
        """Return columns of shape [layouts, ranks], in which the layouts are contiguous in memory.

        Args:
            split: index of each layout's split.
            values: columns as returned by `fields`; those of sharding and recomputation may have further axes.
        """
        kept_columns = [name for name in NUMBERS if name not in ("gbs", "embedding_as_layer", "loss_as_layer")]
        one: dict[str, Any] = {name: values[name][..., None] for name in kept_columns}
        # At least two: numpy multiplies a single row in another order, and times would depend on other layouts' ranks.
        ranks = slice(max(2, self.ranks[split].max()))
        blocks = {kind: np.asfortranarray(counts[split, ranks]) for kind, counts in self._blocks.items()}
        return Columns(
            **one,
            rank=np.asfortranarray(self._rank[split, ranks]),
            weight=np.asfortranarray(self._weight[split, ranks]),
            layers=np.asfortranarray(self._layers[split, ranks]),
            blocks=blocks,
        )


def _count_blocks(model: ModelShape, chunks: Sequence[range]) -> Mapping[str, float]:
    """Return the number of blocks of each kind in the layers of `chunks`; MLPs are weighted by width."""
    return model.count_blocks(layer for r in chunks for layer in r)


def _distinct_ranks(model: ModelShape, split: Split) -> list[tuple[int, int, int, Mapping[str, float]]]:
    """Return (first rank, number of ranks, layers, kind -> blocks) per group of ranks with the same blocks.

    The first and the last pipeline rank are groups of their own.
    """
    chunks = split.chunk_layers(model.layers)
    distinct: dict[Any, tuple[int, int, int, Mapping[str, float]]] = {}
    for rank in range(split.pp):
        rank_chunks = chunks[rank :: split.pp]
        blocks = _count_blocks(model, rank_chunks)
        key = (rank == 0, rank == split.pp - 1, *sorted(blocks.items()))
        first, weight, layers, _ = distinct.get(key, (rank, 0, sum(map(len, rank_chunks)), blocks))
        distinct[key] = (first, weight + 1, layers, blocks)
    return list(distinct.values())
