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
    """Partition layers evenly: return (whether that is possible, layers of the (first, middle, last) chunk).

    Arguments are integers or numpy arrays; `embedding` and `loss` are 1 if they count as layers, else 0. The result is
    that of a `Split` without uneven stages and explicit chunks.
    """
    total, chunks = layers + embedding + loss, pp * vp
    per_chunk, one = total // chunks, chunks == 1
    first, last = per_chunk - embedding - one * loss, per_chunk - loss - one * embedding
    middle_layers = first + (chunks > 2) * (per_chunk - first)
    return (total % pp == 0) & (total // pp % vp == 0), (first, middle_layers, last)


def near_even_chunks(layers: int, count: int) -> tuple[int, ...]:
    """Return the layers of `count` chunks that differ by at most one layer; the first and last chunk have fewer."""
    base, rest = divmod(layers, count)
    order = [*range(1, count - 1), 0, count - 1]  # extra layers go to the middle first
    extra = set(order[:rest])
    return tuple(base + (i in extra) for i in range(count))


ENDS = ((False, False), (True, True), (False, True), (True, False))
"""Whether (the embedding, the loss) counts as a layer, in order of preference: neither or both keep stages even."""


def divides_with_ends(layers: int, pp: int) -> bool:
    """Return whether pp divides the layers, with the embedding, the loss, both or neither counted as a layer."""
    return any((layers + sum(ends)) % pp == 0 for ends in ENDS)


def default_partition(layers: int, pp: int, vp: int, *, has_trained: bool = False) -> tuple[Mapping[str, Any], str]:
    """Return the default partition of layers into pp x vp chunks: (fields of `Layout`, note or "").

    The embedding and the loss count as layers if that makes the chunks equal. If pp divides no such count, the chunks
    differ by one layer, and the first and last chunk have fewer. If pp divides it but pp x vp does not, the result is
    {}, which `Split.chunk_layers` rejects; for a run that `has_trained`, the chunks differ by one layer instead. An
    even partition is {} as well.
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
    """Return the layers of each stage as nanotron partitions them, by parameters (src/nanotron/models/base.py).

    `head` is the cost of the output layer, in layers. The last stages may have no layers.
    """
    counts, stage = [0] * pp, 0
    for layer in range(1, layers + 1):
        counts[stage] += 1
        stage += layer > (layers + head) * (stage + 1) / pp
    return tuple(counts)


def chunks_before_head(layers: int, pp: int, vp: int, head: float) -> tuple[int, ...]:
    """Return the layers of pp x vp chunks of equal compute time, where the last chunk also has the output layer.

    `head` is the additional compute time of the last chunk, in layers: output layer, loss, multi-token prediction. The
    largest number of layers per chunk is minimized. The first rank, which keeps the most activations, has fewer layers
    first; at least one rank has the largest number. pp must be at least 2. () = no such partition exists, because the
    head takes longer than a chunk with vp > 1.
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
    """Return how many layers plus the output layer (as long as `head` layers) take no longer than `layers` layers.

    Negative if the output layer alone takes longer.
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
        """Create the split of a `Layout`, or of an object with at least its attributes tp, pp, vp, ep and etp."""
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
        """Return the range of layers of each chunk, in the order of the model: index v x pp + r is chunk v on rank r.

        Raises:
            UserError: the layers are not divisible by the split.
        """
        counts = self._chunk_sizes(layers)
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def stage_layers(self, layers: int, stage: int) -> list[range]:
        """Return the range of layers of each chunk on one pipeline rank. Raises UserError if there is no such stage."""
        if not 0 <= stage < self.pp:
            raise UserError(f"there is no pipeline stage {stage}: pp {self.pp} has stages 0 to {self.pp - 1}")
        return self.chunk_layers(layers)[stage :: self.pp]

    def _chunk_sizes(self, layers: int) -> list[int]:
        """Return the number of layers of each chunk, in the order of the model."""
        if self.chunks is not None:
            if len(self.chunks) != self.pp * self.vp or sum(self.chunks) != layers or min(self.chunks) < 0:
                raise UserError(
                    f"the chunks {self.chunks} must be pp {self.pp} x vp {self.vp} = {self.pp * self.vp} numbers "
                    f"that add up to {layers} layers",
                    "correct the numbers, or omit chunks",
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
        """Return the layers of each pipeline rank, with the embedding and the loss if they count as layers."""
        if self.pp > layers + 2:
            raise UserError(f"pp {self.pp} exceeds the {layers} layers", f"set pp to at most {layers}")
        ends = ((0, self.first_layers), (self.pp - 1, self.last_layers))
        given_layers = {rank: count for rank, count in ends if count is not None}  # with one stage, last_layers applies
        remaining_layers = layers + self.embedding_as_layer + self.loss_as_layer - sum(given_layers.values())
        ranks = self.pp - len(given_layers)
        if remaining_layers < 0 or (remaining_layers % ranks if ranks else remaining_layers):
            if given_layers:
                raise UserError(
                    f"{layers} layers with first_layers {self.first_layers} and last_layers {self.last_layers} leave "
                    f"{remaining_layers} layers for {ranks} stages",
                    "the remaining layers must be divisible by the remaining stages",
                )
            raise self._indivisible_error(layers, remaining_layers)
        return [given_layers.get(rank, remaining_layers // max(1, ranks)) for rank in range(self.pp)]

    def _indivisible_error(self, layers: int, total: int) -> UserError:
        """Return the error for layers whose total, with the embedding and the loss, is not divisible by pp."""
        terms = f"{layers} layers{' + the embedding' * self.embedding_as_layer}{' + the loss' * self.loss_as_layer}"
        nearest_pp = sorted((p for p in range(1, total + 1) if total % p == 0), key=lambda p: abs(p - self.pp))[:2]
        return UserError(
            f"{terms} = {total} must be divisible by pp {self.pp}",
            f"nearest: pp {' or '.join(map(str, sorted(nearest_pp)))}; or set first_layers and last_layers",
        )

    @cached_property
    def is_plain(self) -> bool:
        """Whether layers are partitioned evenly, without counting the embedding or the loss."""
        return not (self.embedding_as_layer or self.loss_as_layer or self.chunks) and (
            self.first_layers is None and self.last_layers is None
        )
