"""Partition the layers of a model into pipeline stages and chunks as Megatron does.

Source: megatron-core 0.15.3, `get_num_layers_to_build` (transformer_block.py) and `get_transformer_layer_offset`
(transformer_layer.py): chunks have contiguous layers, ordered by virtual stage, then by pipeline rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from superpod.errors import UserError


def even_chunks(layers: Any, pp: Any, vp: Any, embedding: Any, loss: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return whether the layers can be partitioned evenly, and if so, the layers of the first, middle and last chunk.

    Arguments are integers or numpy arrays; `embedding` and `loss` (0 or 1) count as layers. The result is the same as
    for a `Split` without uneven stages and explicit chunks.
    """
    total, chunks = layers + embedding + loss, pp * vp
    per_chunk, one = total // chunks, chunks == 1
    first, last = per_chunk - embedding - one * loss, per_chunk - loss - one * embedding
    middle_layers = first + (chunks > 2) * (per_chunk - first)
    return (total % pp == 0) & (total // pp % vp == 0), (first, middle_layers, last)


def near_even_chunks(layers: int, count: int) -> tuple[int, ...]:
    """Partition layers into `count` chunks that differ by at most one; the first and last chunk have fewer."""
    base, rest = divmod(layers, count)
    order = [*range(1, count - 1), 0, count - 1]  # extra layers go to the middle first
    extra = set(order[:rest])
    return tuple(base + (i in extra) for i in range(count))


ENDS = ((False, False), (True, True), (False, True), (True, False))
"""Whether the embedding and the loss count as layers, in order of preference: neither or both keep stages even."""


def divides_with_ends(layers: int, pp: int) -> bool:
    """Return whether the layers are divisible by pp, if embedding, loss or both may count as layers."""
    return any((layers + sum(ends)) % pp == 0 for ends in ENDS)


def default_partition(layers: int, pp: int, vp: int, *, has_trained: bool = False) -> tuple[Mapping[str, Any], str]:
    """Return the default partition of layers into stages: fields of `Layout`, and a note if they are not divisible.

    The embedding and the loss count as layers if that makes the chunks equal. If no such count is divisible by pp, the
    chunks differ by one layer, and the first and last chunk have fewer. {} = even, or impossible: `Split.chunk_layers`
    rejects layers that are divisible by pp, but not by pp x vp; for runs that `has_trained`, such chunks also differ by
    one layer.
    """
    count = pp * vp
    if count > layers + 2:
        return {}, ""
    uneven = f"{layers} layers are not divisible by {count} chunks; planned with "
    for ends in ENDS:
        if (layers + sum(ends)) % count == 0:
            names = [key for key, counts in zip(("embedding_as_layer", "loss_as_layer"), ends, strict=True) if counts]
            return dict.fromkeys(names, True), uneven + " and ".join(names) if names else ""
    if divides_with_ends(layers, pp) and not has_trained:
        return {}, ""
    return {"chunks": near_even_chunks(layers, count)}, uneven + "chunks that differ by one layer"


def partition_by_cost(layers: int, pp: int, head: float) -> tuple[int, ...]:
    """Return the layers of each stage in nanotron (src/nanotron/models/base.py), which balances parameters.

    `head` is the cost of the output layer, in layers. The last stages may have no layers.
    """
    counts, stage = [0] * pp, 0
    for layer in range(1, layers + 1):
        counts[stage] += 1
        stage += layer > (layers + head) * (stage + 1) / pp
    return tuple(counts)


def chunks_before_head(layers: int, pp: int, vp: int, head: float) -> tuple[int, ...]:
    """Balance the layers of pp x vp chunks if the last chunk also has the output layer.

    `head` is the additional compute time of the last chunk, in layers: output layer, loss, multi-token prediction. The
    largest number of layers per chunk is minimized. Surplus layers are removed from the first rank first, because it
    keeps the most activations; at least one rank remains full. pp is at least 2. The result is () if there is
    no such partition, because the head takes longer than a chunk with vp > 1.
    """
    count = pp * vp
    largest = next(c for c in range(1, layers + 1) if c * (count - 1) + max(0, _layers_next_to_head(c, head)) >= layers)
    last = _layers_next_to_head(largest, head)
    if last < 0 and vp > 1:
        return ()
    if vp == 1:  # only the slowest stage matters
        last = min(range(layers // pp + 1), key=lambda n: (max(-(-(layers - n) // (pp - 1)), n + head), -n))
        largest = -(-(layers - last) // (pp - 1))
    last = min(last, layers)
    chunks = [largest] * (count - 1) + [last]
    order = [chunk * pp + rank for rank in (0, *range(pp - 1, 0, -1)) for chunk in range(vp)]
    short = [at for at in order if at != count - 1]
    for i in range(largest * (count - 1) + last - layers):
        chunks[short[i % len(short)]] -= 1
    return tuple(chunks)


def _layers_next_to_head(layers: int, head: float) -> int:
    """Return how many layers a chunk with the output layer can have within the time of `layers` layers.

    The result is negative if the output layer alone takes longer.
    """
    return math.floor(layers - head + 1e-9)


@dataclass(frozen=True)
class Split:
    """The fields of a layout that determine which parameters a rank holds."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    """Model chunks per pipeline rank; 1 = not interleaved."""
    ep: int = 1
    etp: int | None = None
    """None = Megatron's default, tp."""
    embedding_as_layer: bool = False
    loss_as_layer: bool = False
    first_layers: int | None = None
    """num_layers_in_first_pipeline_stage"""
    last_layers: int | None = None
    """num_layers_in_last_pipeline_stage"""
    chunks: tuple[int, ...] | None = None
    """Layers of each of the pp x vp chunks, in the order of the model (pipeline_model_parallel_layout)."""

    def __post_init__(self) -> None:
        for key in ("tp", "pp", "vp", "ep", "expert_tp"):
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise UserError(f"{key} must be an integer of at least 1, not {value!r}")
        for key in ("first_layers", "last_layers"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{key} must be at least 1, not {value!r}", f"omit {key}")
        ends = self.first_layers is not None or self.last_layers is not None
        counts_ends = self.embedding_as_layer or self.loss_as_layer
        if self.chunks is not None and (ends or counts_ends):
            raise UserError(
                "chunks cannot be combined with first_layers, last_layers, embedding_as_layer or loss_as_layer",
                "set only chunks",
            )
        if ends and counts_ends:
            raise UserError(
                "first_layers and last_layers cannot be combined with embedding_as_layer and loss_as_layer",
                "set only one of the two",
            )

    @classmethod
    def from_layout(cls, layout: Any) -> Split:
        """Create the split for an object with the attributes of `Layout`; missing attributes have defaults."""
        return cls(
            tp=layout.tp,
            pp=layout.pp,
            vp=layout.vp or 1,
            ep=layout.ep,
            etp=layout.etp,
            embedding_as_layer=getattr(layout, "embedding_as_layer", False),
            loss_as_layer=getattr(layout, "loss_as_layer", False),
            first_layers=getattr(layout, "first_layers", None),
            last_layers=getattr(layout, "last_layers", None),
            chunks=getattr(layout, "chunks", None),
        )

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of routed experts."""
        return self.tp if self.etp is None else self.etp

    def chunk_layers(self, layers: int) -> list[range]:
        """Return the layers of each chunk in the order of the model: index v x pp + r is chunk v on rank r.

        Raises:
            UserError: the layers cannot be partitioned in this way.
        """
        counts = self._counts(layers)
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def stage_layers(self, layers: int, stage: int) -> list[range]:
        """Return the layers of each chunk on one pipeline rank."""
        if not 0 <= stage < self.pp:
            raise UserError(f"there is no pipeline stage {stage}: pp {self.pp} has stages 0 to {self.pp - 1}")
        return self.chunk_layers(layers)[stage :: self.pp]

    def _counts(self, layers: int) -> list[int]:
        if self.chunks is not None:
            if len(self.chunks) != self.pp * self.vp or sum(self.chunks) != layers or min(self.chunks) < 0:
                raise UserError(
                    f"the chunks {self.chunks} must be pp {self.pp} x vp {self.vp} = {self.pp * self.vp} counts "
                    f"that add up to {layers} layers",
                    "correct the counts, or omit chunks",
                )
            return list(self.chunks)
        per_rank = self._per_rank(layers)
        for rank, count in enumerate(per_rank):
            if count % self.vp:
                raise UserError(
                    f"the {count} layers of pipeline rank {rank} must be divisible by vp {self.vp}",
                    f"set vp to a divisor of the layers per rank ({layers} layers, pp {self.pp})",
                )
        counts = [count // self.vp for _ in range(self.vp) for count in per_rank]
        counts[0] -= self.embedding_as_layer
        counts[-1] -= self.loss_as_layer
        if min(counts) < 0:
            raise UserError(f"{layers} layers are too few for pp {self.pp} x vp {self.vp}", "reduce pp or vp")
        return counts

    def _per_rank(self, layers: int) -> list[int]:
        """Return the layers of each pipeline rank, including the embedding and the loss if they count as layers."""
        if self.pp > layers + 2:
            raise UserError(f"pp {self.pp} exceeds the {layers} layers", f"set pp to at most {layers}")
        ends = ((0, self.first_layers), (self.pp - 1, self.last_layers))
        given_layers = {rank: count for rank, count in ends if count is not None}  # with one stage, last_layers applies
        remaining_layers = layers + self.embedding_as_layer + self.loss_as_layer - sum(given_layers.values())
        ranks = self.pp - len(given_layers)
        if remaining_layers < 0 or (remaining_layers % ranks if ranks else remaining_layers):
            raise UserError(
                self._rule(layers, remaining_layers, ranks, bool(given_layers)), self._next(layers, bool(given_layers))
            )
        return [given_layers.get(rank, remaining_layers // max(1, ranks)) for rank in range(self.pp)]

    def _rule(self, layers: int, left: int, ranks: int, given: bool) -> str:
        if given:
            return (
                f"{layers} layers with first_layers {self.first_layers} and last_layers {self.last_layers} leave "
                f"{left} layers for {ranks} stages"
            )
        total = f"{layers} layers"
        if self.embedding_as_layer:
            total += " + the embedding"
        if self.loss_as_layer:
            total += " + the loss"
        return f"{total} = {left} must be divisible by pp {self.pp}"

    def _next(self, layers: int, given: bool) -> str:
        if given:
            return "the remaining layers must be divisible by the remaining stages"
        total = layers + self.embedding_as_layer + self.loss_as_layer
        nearest_pp = sorted((p for p in range(1, total + 1) if total % p == 0), key=lambda p: abs(p - self.pp))[:2]
        return f"nearest: pp {' or '.join(map(str, sorted(nearest_pp)))}; or set first_layers and last_layers"

    @cached_property
    def is_plain(self) -> bool:
        """Whether all stages have the same number of layers."""
        return not (self.embedding_as_layer or self.loss_as_layer or self.chunks) and (
            self.first_layers is None and self.last_layers is None
        )
