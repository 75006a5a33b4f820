"""Activations in flight on a pipeline rank, with and without full recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from superpod.planner.arrays import Array, Number
from superpod.planner.memory import activations
from superpod.planner.memory.activations import Kept
from superpod.planner.memory.units import MemoryUnits


@dataclass(frozen=True)
class Graphs:
    """Bytes per rank of Transformer Engine's CUDA graphs for attention, one per layer and micro-batch in flight.

    All graphs are captured before training, in the order of the schedule. The memory in their pool is not available to
    other tensors. Source: megatron-core, transformer/cuda_graphs.py `TECudaGraphHelper`, scope attn.
    """

    kept: Array | float = 0.0
    backward: Array | float = 0.0
    """Memory of the backward pass of the last graph."""
    static: Array | float = 0.0
    """Static inputs and outputs and their gradients."""


@dataclass(frozen=True)
class InFlight:
    """Bytes per rank when the maximum number of micro-batches is in flight, without CUDA graphs."""

    kept: Array
    recomputed: Array
    """Activations that are recomputed for the backward pass of one group of layers."""
    backward: Array
    """Temporary memory of the backward pass of the last block."""
    graphs: Graphs


def in_flight(u: MemoryUnits) -> Array:
    """Return the number of micro-batches in flight on each rank; a fraction if chunks are interleaved.

    1F1B: min(m, p - r). Interleaved: min(m v, 2 (p - r - 1) + (v - 1) p + 1) chunks, each 1/v of the rank's layers.
    Source: megatron-core 0.15.3, pipeline_parallel/schedules.py (`get_pp_rank_microbatches`).
    """
    c = u.c
    pp, vp, m, rank = u.column("pp"), u.column("vp"), np.maximum(1, u.column("micro_batches")), c.rank
    if u.job.options.schedule == "gpipe":
        return np.broadcast_to(1.0 * m, np.broadcast_shapes(m.shape, rank.shape))
    plain = np.minimum(m, pp - rank)
    group = np.minimum(m, u.job.options.microbatch_group or pp)
    chunks = np.minimum(m * vp, 2 * (pp - rank - 1) + (vp - 1) * group + 1)
    return np.where(vp > 1, _in_flight_layer_fraction(u, chunks, group), plain)


def _in_flight_layer_fraction(u: MemoryUnits, chunks: Array, group: Array) -> Array:
    """Return the layers of the chunks in flight, as a multiple of the rank's layers.

    The first or last chunk may have one fewer layer: the embedding replaces a layer in the first chunk of the first
    rank, the loss in the last chunk of the last rank. Each group of micro-batches goes through chunk 0, then chunk 1.
    """
    c, vp = u.c, u.column("vp")
    lacking = -c.layers % vp  # 1 if the embedding or the loss replaces a layer
    short = np.where(c.rank == 0, 0, vp - 1)
    turns, rest = np.divmod(chunks, group * vp)
    of_short = turns * group + np.clip(rest - short * group, 0, group)
    return ((c.layers + lacking) / vp * chunks - lacking * of_short) / np.maximum(1, c.layers)


MIXERS, FEED_FORWARDS = ("attention", "mla", "mamba", "delta"), ("mlp", "moe")
GRAPHED = ("attention", "mla", "delta")
"""Blocks that CUDA graphs support."""


def activations_in_flight(u: MemoryUnits) -> InFlight:
    """Return the activations in flight on each rank, summed over its layers."""
    kinds = activations.blocks(u)
    count = in_flight(u)
    graphed = GRAPHED if u.job.options.cuda_graphs else ()
    whole: Number = sum(
        u.c.blocks[kind] * block.bytes for kind, block in kinds.items() if kind in {*u.c.blocks} - {*graphed}
    )
    kept, group = _full_recompute_bytes(u, whole / np.maximum(1, u.c.layers))
    full = u.column("recompute") == 2
    if u.job.options.framework == "fsdp2":  # torchtitan's selective recomputation repeats every second GEMM
        whole = np.where(u.column("recompute") == 1, 0.5, 1.0) * whole
    mixer = _max_over_kinds(u, kinds, {*MIXERS} - {*graphed})
    rest = _max_over_kinds(u, kinds, {*FEED_FORWARDS})
    # Backward pass of the last layer: first the feed-forward, then the mixer, after the feed-forward's memory is freed.
    after = mixer.recomputed + mixer.backward - rest.bytes - rest.recomputed
    return InFlight(
        kept=count * np.where(full, kept, whole) + _prediction(u, kinds),
        recomputed=np.where(full, group, 0.0),
        backward=np.maximum(np.where(full, rest.backward, rest.recomputed + rest.backward), after),
        graphs=_graphs(u, kinds, count) if graphed else Graphs(),
    )


def _graphs(u: MemoryUnits, kinds: dict[str, Kept], count: Array) -> Graphs:
    taken = [kind for kind in GRAPHED if kind in u.c.blocks]
    last = _max_over_kinds(u, kinds, {*taken})
    size = u.wide * u.job.model.hidden * u.tokens * u.over_sp
    return Graphs(
        kept=count * sum(u.c.blocks[kind] * kinds[kind].bytes for kind in taken),
        backward=last.recomputed + last.backward,
        static=4 * size * count * sum(u.c.blocks[kind] for kind in taken),
    )


def _max_over_kinds(u: MemoryUnits, kinds: dict[str, Kept], names: set[str]) -> Kept:
    """Return the maximum over these kinds of blocks on each rank, because its last layer may have any of them."""
    held = [(blocks > 0, kinds[name]) for name, blocks in u.c.blocks.items() if name in names]

    def largest(part: str) -> Array:
        sizes = [np.where(there, getattr(block, part), 0.0) for there, block in held]
        return reduce(np.maximum, sizes) if sizes else np.zeros(u.c.rank.shape)

    return Kept(largest("bytes"), largest("recomputed"), largest("backward"))


def _prediction(u: MemoryUnits, kinds: dict[str, Kept]) -> Array:
    """Return the activations of multi-token prediction on the last rank: layers, norms and input projection."""
    m = u.job.model
    if not m.mtp_layers:
        return np.zeros(u.c.rank.shape)
    layer: Number = sum(kinds[block].bytes for block in m.mtp_blocks)
    outside = m.hidden * u.tokens * u.over_sp
    return u.c.last * m.mtp_layers * (layer + (2 * u.wide + 2 * u.wide + u.narrow * 2 + 2 * u.wide) * outside)


def _full_recompute_bytes(u: MemoryUnits, one: Array) -> tuple[Array, Array]:
    """Return the bytes (kept per micro-batch, recomputed) with full recomputation; `one`: bytes of a layer."""
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
