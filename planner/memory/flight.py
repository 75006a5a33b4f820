"""How much of the activations a pipeline rank has in flight, and what full recomputation leaves of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from superpod.planner.memory import activations
from superpod.planner.memory.activations import Kept
from superpod.planner.memory.units import Array, Units


@dataclass(frozen=True)
class Flight:
    """Bytes on each rank, at the moment that most micro-batches are in flight."""

    kept: Array
    again: Array
    """What recomputation brings back while one part's backward pass runs."""
    backward: Array
    """What the backward pass of the last block needs for itself."""


def in_flight(u: Units) -> Array:
    """Micro-batches in flight on each rank, in parts where chunks are interleaved.

    1F1B: min(m, p - r). Interleaved: min(m v, 2 (p - r - 1) + (v - 1) p + 1) chunks, each 1/v of the rank's layers.
    Source: megatron-core 0.15.3, pipeline_parallel/schedules.py (`get_pp_rank_microbatches`).
    """
    c = u.c
    pp, vp, m, rank = u.column("pp"), u.column("vp"), u.column("micro_batches"), c.rank
    if u.job.options.schedule == "gpipe":
        return np.broadcast_to(1.0 * m, np.broadcast_shapes(m.shape, rank.shape))
    plain = np.minimum(m, pp - rank)
    chunks = np.minimum(m * vp, 2 * (pp - rank - 1) + (vp - 1) * pp + 1)
    return np.where(vp > 1, chunks / vp, plain)


def flight(u: Units) -> Flight:
    """Activations of all layers that a rank has in flight."""
    kinds = activations.blocks(u)
    count = in_flight(u)
    whole: Any = sum(u.c.blocks[kind] * each.bytes for kind, each in kinds.items())
    layers = np.maximum(1, u.c.layers)
    again: Any = _largest(u, kinds, "again")
    backward: Any = _largest(u, kinds, "backward")
    one = whole / layers
    kept, group = _recomputed(u, one)
    full = u.column("recompute") == 2
    return Flight(
        kept=count * np.where(full, kept, whole),
        again=np.where(full, group, again),
        backward=backward,
    )


def _largest(u: Units, kinds: dict[str, Kept], what: str) -> Any:
    """Of the last layer of a rank: its blocks run backward one at a time."""
    sizes = [np.where(u.c.blocks[kind] > 0, getattr(each, what), 0.0) for kind, each in kinds.items()]
    return np.maximum.reduce(np.broadcast_arrays(*sizes)) if sizes else 0.0


def _recomputed(u: Units, one: Array) -> tuple[Array, Array]:
    """(bytes of a micro-batch kept, bytes brought back) under full recomputation, per rank; `one` is a layer's bytes."""
    source = u.wide * u.job.model.hidden * u.tokens * u.over_sp
    vp, group = u.column("vp"), u.column("recompute_layers")
    layers = u.c.layers
    a_chunk = layers / vp
    uniform = vp * np.ceil(a_chunk / group) * source
    taken = np.minimum(group, a_chunk)
    block = vp * (taken * source + (a_chunk - taken) * one)
    is_block = u.column("recompute_block") > 0
    back = np.where(is_block, np.minimum(1, taken), np.minimum(group, a_chunk)) * one
    return np.where(is_block, block, uniform), back
