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

    All graphs are captured before training, in the order of the schedule. Other tensors cannot use the memory of their
    pool. Source: megatron-core, transformer/cuda_graphs.py `TECudaGraphHelper`, scope attn.
    """

    kept: Array | float = 0.0
    """Activations that the graphs keep for their backward passes."""
    backward: Array | float = 0.0
    """Memory of the backward pass of the last graph."""
    static: Array | float = 0.0
    """Static inputs and outputs and their gradients."""


@dataclass(frozen=True)
class InFlight:
    """Bytes per rank when the maximum number of micro-batches is in flight, without CUDA graphs."""

    kept: Array
    """Activations kept for the backward pass."""
    recomputed: Array
    """Activations that are recomputed for the backward pass of one group of layers."""
    backward: Array
    """Temporary memory of the backward pass of the last block."""
    graphs: Graphs


def in_flight(u: MemoryUnits) -> Array:
    """Return the number of micro-batches in flight on each rank; fractional with interleaving, as a chunk is 1/vp.

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
    """Return the number of layers in `chunks` chunks in flight, divided by the rank's number of layers.

    The first or last chunk may have one fewer layer: the embedding replaces a layer in the first chunk of the first
    rank, the loss in the last chunk of the last rank. Each group of micro-batches goes through chunk 0, then chunk 1.
    """
    c, vp = u.c, u.column("vp")
    missing = -c.layers % vp  # 1 if the embedding or the loss replaces a layer
    short_chunk = np.where(c.rank == 0, 0, vp - 1)
    rounds, rest = np.divmod(chunks, group * vp)
    short_in_flight = rounds * group + np.clip(rest - short_chunk * group, 0, group)
    return ((c.layers + missing) / vp * chunks - missing * short_in_flight) / np.maximum(1, c.layers)


MIXERS, FEED_FORWARDS = ("attention", "mla", "mamba", "delta"), ("mlp", "moe")
GRAPHED = ("attention", "mla", "delta")
"""Kinds of blocks that CUDA graphs support."""


def activations_in_flight(u: MemoryUnits) -> InFlight:
    """Return the bytes of activations in flight on each rank, summed over its layers."""
    kinds = activations.blocks(u)
    count = in_flight(u)
    graphed = GRAPHED if u.job.options.cuda_graphs else ()
    eager_kinds = {*u.c.blocks} - {*graphed}
    layers: Number = sum(u.c.blocks[kind] * block.bytes for kind, block in kinds.items() if kind in eager_kinds)
    kept, recomputed = _full_recompute_bytes(u, layers / np.maximum(1, u.c.layers))
    full = u.column("recompute") == 2
    if u.job.options.framework == "fsdp2":  # torchtitan's selective recomputation repeats every second GEMM
        layers = np.where(u.column("recompute") == 1, 0.5, 1.0) * layers
    mixer = _max_over_kinds(u, kinds, {*MIXERS} - {*graphed})
    mlp = _max_over_kinds(u, kinds, {*FEED_FORWARDS})
    # Backward pass of the last layer: first the feed-forward, then the mixer, after the feed-forward's memory is freed.
    mixer_backward = mixer.recomputed + mixer.backward - mlp.bytes - mlp.recomputed
    return InFlight(
        kept=count * np.where(full, kept, layers) + _mtp_bytes(u, kinds),
        recomputed=np.where(full, recomputed, 0.0),
        backward=np.maximum(np.where(full, mlp.backward, mlp.recomputed + mlp.backward), mixer_backward),
        graphs=_graph_bytes(u, kinds, count) if graphed else Graphs(),
    )


def _graph_bytes(u: MemoryUnits, kinds: dict[str, Kept], count: Array) -> Graphs:
    """Return the memory of CUDA graphs for `count` micro-batches in flight."""
    graphed = [kind for kind in GRAPHED if kind in u.c.blocks]
    last = _max_over_kinds(u, kinds, {*graphed})
    size = u.act_bytes * u.job.model.hidden * u.tokens * u.over_sp
    return Graphs(
        kept=count * sum(u.c.blocks[kind] * kinds[kind].bytes for kind in graphed),
        backward=last.recomputed + last.backward,
        static=4 * size * count * sum(u.c.blocks[kind] for kind in graphed),
    )


def _max_over_kinds(u: MemoryUnits, kinds: dict[str, Kept], names: set[str]) -> Kept:
    """Return the maximum over these kinds of blocks on each rank, because its last layer may have any of them."""
    held = [(blocks > 0, kinds[name]) for name, blocks in u.c.blocks.items() if name in names]

    def largest(part: str) -> Array:
        sizes = [np.where(there, getattr(block, part), 0.0) for there, block in held]
        return reduce(np.maximum, sizes) if sizes else np.zeros(u.c.rank.shape)

    return Kept(largest("bytes"), largest("recomputed"), largest("backward"))


def _mtp_bytes(u: MemoryUnits, kinds: dict[str, Kept]) -> Array:
    """Return the bytes of activations of multi-token prediction on the last rank: layers, norms, input projection."""
    m = u.job.model
    if not m.mtp_layers:
        return np.zeros(u.c.rank.shape)
    layer: Number = sum(kinds[block].bytes for block in m.mtp_blocks)
    outside = m.hidden * u.tokens * u.over_sp
    return (
        u.c.last
        * m.mtp_layers
        * (layer + (2 * u.act_bytes + 2 * u.act_bytes + u.gemm_input_bytes * 2 + 2 * u.act_bytes) * outside)
    )


def _full_recompute_bytes(u: MemoryUnits, layer_bytes: Array) -> tuple[Array, Array]:
    """Return the bytes (kept per micro-batch, recomputed) with full recomputation of layers of `layer_bytes` each."""
    input_bytes = u.act_bytes * u.job.model.hidden * u.tokens * u.over_sp
    vp, group = u.column("vp"), u.column("recompute_layers")
    chunk_layers = u.c.layers / vp
    recomputed_layers = np.minimum(group, chunk_layers)
    uniform = vp * np.ceil(chunk_layers / group) * input_bytes
    block = vp * (recomputed_layers * input_bytes + (chunk_layers - recomputed_layers) * layer_bytes)
    is_block = u.column("recompute_block") > 0
    # The block method recomputes one layer at a time, the uniform method a group.
    recomputed = np.where(is_block, np.minimum(1, recomputed_layers), recomputed_layers) * layer_bytes
    return np.where(is_block, block, uniform), recomputed
