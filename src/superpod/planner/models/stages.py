"""Which layers a pipeline stage holds in Megatron.

Source: megatron-core 0.15.3, `get_num_layers_to_build` (transformer_block.py) and `get_transformer_layer_offset`
(transformer_layer.py): chunks take contiguous layers in the order virtual stage, then pipeline rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from superpod.errors import UserError


def even_chunks(layers: Any, pp: Any, vp: Any, embedding: Any, loss: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    """Whether layers divide evenly, and the layers of the first, the middle and the last chunk if they do.

    Takes integers or numpy arrays; `embedding` and `loss` (0 or 1) count as layers. As a `Split` without uneven
    stages or given chunks.
    """
    total, chunks = layers + embedding + loss, pp * vp
    per_chunk, one = total // chunks, chunks == 1
    first, last = per_chunk - embedding - one * loss, per_chunk - loss - one * embedding
    middle = first + (chunks > 2) * (per_chunk - first)
    return (total % pp == 0) & (total // pp % vp == 0), (first, middle, last)


def near_even(layers: int, count: int) -> tuple[int, ...]:
    """Layers of `count` chunks where they do not divide: the first and last, with embedding and loss, get fewer."""
    base, rest = divmod(layers, count)
    order = [*range(1, count - 1), 0, count - 1]  # extra layers go to the middle first
    extra = set(order[:rest])
    return tuple(base + (i in extra) for i in range(count))


ENDS = ((False, False), (True, True), (False, True), (True, False))
"""Whether the embedding and the loss count as layers, in the order of preference: neither or both keep stages alike."""


def divides_with_ends(layers: int, pp: int) -> bool:
    """Whether layers divide over pipeline ranks, where embedding, loss or both may count as layers."""
    return any((layers + sum(ends)) % pp == 0 for ends in ENDS)


def default_partition(layers: int, pp: int, vp: int, *, has_trained: bool = False) -> tuple[Mapping[str, Any], str]:
    """The default partition of layers into stages: fields of a `Layout`, and a sentence if they do not divide.

    The embedding and the loss count as layers if that makes chunks equal. If no such count divides over the pipeline
    ranks, chunks differ by a layer, and the first and last have fewer. {} = even, or impossible: `Split.chunk_layers`
    refuses layers that divide over the ranks, but not over each rank's vp chunks; for a run that `has_trained` so,
    those chunks differ by a layer too.
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
    return {"chunks": near_even(layers, count)}, uneven + "chunks that differ by a layer"


def partition_by_cost(layers: int, pp: int, head: float) -> tuple[int, ...]:
    """Layers of each stage in nanotron (src/nanotron/models/base.py), which closes a stage at its share of parameters.

    `head` is the cost of the output layer, in layers. The last stages may be left with no layer.
    """
    counts, stage = [0] * pp, 0
    for layer in range(1, layers + 1):
        counts[stage] += 1
        stage += layer > (layers + head) * (stage + 1) / pp
    return tuple(counts)


def chunks_before_head(layers: int, pp: int, vp: int, head: float) -> tuple[int, ...]:
    """Layers of each of pp x vp chunks of which none takes longer than it must, where a head stands behind the last.

    `head` is what the last chunk does beside its layers, in layers: output layer, loss, multi-token prediction. All
    other chunks have so many layers or fewer, the first rank's fewer first: it keeps the most activations. One rank at
    least is full, so that its sum is what a step takes: ranks of chunks that differ more would wait for each other.
    pp is 2 or more. () = no such chunks: the head takes longer than a chunk of several.
    """
    count = pp * vp
    most = next(c for c in range(1, layers + 1) if c * (count - 1) + max(0, _beside(c, head)) >= layers)
    last = _beside(most, head)
    if last < 0 and vp > 1:
        return ()
    if vp == 1:  # stages of one chunk wait for the slowest alone
        last = min(range(layers // pp + 1), key=lambda n: (max(-(-(layers - n) // (pp - 1)), n + head), -n))
        most = -(-(layers - last) // (pp - 1))
    last = min(last, layers)
    chunks = [most] * (count - 1) + [last]
    order = [chunk * pp + rank for rank in (0, *range(pp - 1, 0, -1)) for chunk in range(vp)]
    short = [at for at in order if at != count - 1]
    for i in range(most * (count - 1) + last - layers):
        chunks[short[i % len(short)]] -= 1
    return tuple(chunks)


def _beside(layers: int, head: float) -> int:
    """Layers that fit beside a head in the time of so many; below 0 where the head alone takes longer."""
    return math.floor(layers - head + 1e-9)


@dataclass(frozen=True)
class Split:
    """The degrees of a layout that decide which parameters a rank holds."""

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
                raise UserError(f"{key} must be an integer of 1 or more, not {value!r}")
        for key in ("first_layers", "last_layers"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{key} must be 1 or more layers, not {value!r}", f"omit {key}")
        ends = self.first_layers is not None or self.last_layers is not None
        counted = self.embedding_as_layer or self.loss_as_layer
        if self.chunks is not None and (ends or counted):
            raise UserError(
                "chunks cannot be combined with first_layers, last_layers, embedding_as_layer or loss_as_layer",
                "set chunks only",
            )
        if ends and counted:
            raise UserError(
                "first_layers and last_layers cannot be combined with embedding_as_layer and loss_as_layer",
                "set one or the other",
            )

    @classmethod
    def from_layout(cls, layout: Any) -> Split:
        """Create the split of an object with the attributes of a `Layout`; missing ones have their defaults."""
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
        """Tensor parallelism of the routed experts."""
        return self.tp if self.etp is None else self.etp

    def chunk_layers(self, layers: int) -> list[range]:
        """The layers of every chunk in the order of the model: chunk v x pp + r is rank r's chunk v.

        Raises:
            UserError: the layers cannot be partitioned so.
        """
        counts = self._counts(layers)
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def stage_layers(self, layers: int, stage: int) -> list[range]:
        """The layers of each chunk of one pipeline rank."""
        if not 0 <= stage < self.pp:
            raise UserError(f"there is no pipeline stage {stage}: pp {self.pp} has 0 to {self.pp - 1}")
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
        """Layers of each pipeline rank, the embedding and the loss counted where they count as one."""
        if self.pp > layers + 2:
            raise UserError(f"pp {self.pp} exceeds the {layers} layers", f"set pp to {layers} at most")
        ends = ((0, self.first_layers), (self.pp - 1, self.last_layers))
        given = {rank: count for rank, count in ends if count is not None}  # of a single stage, the last count holds
        left = layers + self.embedding_as_layer + self.loss_as_layer - sum(given.values())
        ranks = self.pp - len(given)
        if left < 0 or (left % ranks if ranks else left):
            raise UserError(self._rule(layers, left, ranks, bool(given)), self._next(layers, bool(given)))
        return [given.get(rank, left // max(1, ranks)) for rank in range(self.pp)]

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
        near = sorted((p for p in range(1, total + 1) if total % p == 0), key=lambda p: abs(p - self.pp))[:2]
        return f"nearest: pp {' or '.join(map(str, sorted(near)))}; or set first_layers and last_layers"

    @cached_property
    def is_plain(self) -> bool:
        """Whether every stage gets the same number of layers."""
        return not (self.embedding_as_layer or self.loss_as_layer or self.chunks) and (
            self.first_layers is None and self.last_layers is None
        )
