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
    uneven = f"{layers} layers do not divide into {count} chunks; counted with "
    for ends in ENDS:
        if (layers + sum(ends)) % count == 0:
            names = [key for key, counts in zip(("embedding_as_layer", "loss_as_layer"), ends, strict=True) if counts]
            return dict.fromkeys(names, True), (uneven + " and ".join(names)) * bool(names)
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
                raise UserError(f"{key} is {value!r}; it is a whole number, 1 or more")
        for key in ("first_layers", "last_layers"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{key} is {value!r}; it is a number of layers, 1 or more", f"leave {key} out")
        ends = self.first_layers is not None or self.last_layers is not None
        counted = self.embedding_as_layer or self.loss_as_layer
        if self.chunks is not None and (ends or counted):
            raise UserError("chunks say what every stage holds, and so do the other fields", "give chunks alone")
        if ends and counted:
            raise UserError(
                "the first or last stage's layers are given, and the embedding or the loss counts as a layer too",
                "Megatron takes one or the other",
            )

    @classmethod
    def from_layout(cls, layout: Any) -> Split:
        """The split of anything with the attributes of a `Layout`; those that it lacks are as by default."""
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
                    "mend the counts, or leave chunks out",
                )
            return list(self.chunks)
        per_rank = self._per_rank(layers)
        for rank, count in enumerate(per_rank):
            if count % self.vp:
                raise UserError(
                    f"the {count} layers of pipeline rank {rank} do not divide into vp {self.vp} chunks",
                    f"vp divides the layers of a rank ({layers} layers over pp {self.pp})",
                )
        counts = [count // self.vp for _ in range(self.vp) for count in per_rank]
        counts[0] -= self.embedding_as_layer
        counts[-1] -= self.loss_as_layer
        if min(counts) < 0:
            raise UserError(f"{layers} layers are too few for pp {self.pp} x vp {self.vp}", "lower pp or vp")
        return counts

    def _per_rank(self, layers: int) -> list[int]:
        """Layers of each pipeline rank, the embedding and the loss counted where they count as one."""
        if self.pp > layers + 2:
            raise UserError(f"pp {self.pp} is more stages than {layers} layers can fill", f"pp is at most {layers}")
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
                f"{layers} layers with {self.first_layers} on the first stage and {self.last_layers} on the last leave "
                f"{left} for {ranks} stages"
            )
        extra = " + the embedding" * self.embedding_as_layer + " + the loss" * self.loss_as_layer
        return f"{layers} layers{extra} = {left} do not divide over pp {self.pp} stages"

    def _next(self, layers: int, given: bool) -> str:
        if given:
            return "the layers left over must divide over the stages left over"
        total = layers + self.embedding_as_layer + self.loss_as_layer
        near = sorted((p for p in range(1, total + 1) if total % p == 0), key=lambda p: abs(p - self.pp))[:2]
        return f"nearest: pp {' or '.join(map(str, sorted(near)))}; or give the first and last stage's layers"

    @cached_property
    def is_plain(self) -> bool:
        """Whether every stage gets the same number of layers."""
        return not (self.embedding_as_layer or self.loss_as_layer or self.chunks) and (
            self.first_layers is None and self.last_layers is None
        )
