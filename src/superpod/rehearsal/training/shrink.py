"""Shrinks a job so that a laptop can train it in the same topology: sizes shrink, but degrees above 1 stay above 1.

Computes with the planner's `PlannedJob`, without NeMo. The result satisfies all divisibility rules of the layout, and
keeps its special features: stages of unequal length, layers of different kinds, grouped queries, gradient accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal.errors import RehearsalError

RANKS = 12
"""Default maximum number of processes of a rehearsal; each takes about 0.8 GB."""

HEAD, VOCAB, SEQ = 16, 128, 32
"""Minimum sizes of a head, the vocabulary and a sequence."""


@dataclass(frozen=True)
class ResizedValue:
    """A size or degree that a rehearsal changes from `old` to `new`."""

    name: str
    """Its name in the planner, such as `hidden` or `tp`."""
    old: Any
    new: Any


@dataclass(frozen=True)
class ShrunkJob:
    """A job that was shrunk for a rehearsal on CPUs, and what differs from the recipe's."""

    job: PlannedJob
    folded: tuple[ResizedValue, ...]
    """Degrees that became smaller. A degree above 1 stays above 1, except DP if there are too few ranks."""
    sizes: tuple[ResizedValue, ...]
    """Sizes of the model, the sequence and the batch that have changed."""

    @property
    def topology(self) -> str:
        """The degrees as text: `TP2 PP2 DP2, folded: TP 8 -> 2, DP 16 -> 2`, or `TP2 DP2, its own topology`."""
        layout = self.job.layout
        dp = layout.dp(self.job.gpus)
        degrees = []
        if layout.model_parallel * layout.ep > 1:
            degrees.append(layout.short())
        if dp > 1:
            degrees.append(f"DP{dp}")
        short = " ".join(degrees) or "one rank"
        if not self.folded:
            return f"{short}, its own topology"
        folded_degrees = ", ".join(f"{degree.name.upper()} {degree.old} -> {degree.new}" for degree in self.folded)
        return f"{short}, folded: {folded_degrees}"


def shrink(job: PlannedJob, ranks: int = RANKS) -> ShrunkJob:
    """Shrink a job to at most `ranks` processes.

    Args:
        job: a job whose layout is legal.
        ranks: maximum number of processes; the result may need fewer.

    Raises:
        RehearsalError: a feature of the job cannot be rehearsed, or `ranks` is too small even with each degree at 2.
    """
    refuse_unsupported(job)
    degrees = _fold_degrees(job, ranks)
    layout, layers = _shrink_layout(job, degrees)
    seq = round_up(SEQ, 2 * layout.cp * layout.tp)
    model = _shrink_model(job.model, layout, layers)
    if model.window:  # a window shorter than the recipe's sequences must be shorter than the rehearsal's, too
        model = model.replace(window=seq // 4 if job.model.window < job.seq else seq)
    if model.positions:
        model = model.replace(positions=seq)
    if model.indexer_topk:
        model = model.replace(indexer_topk=seq // 2)
    dp = degrees["dp"]
    gpus = layout.model_parallel * dp
    # Ranks on CPUs train in FP32 without userbuffers, so that the requirements of FP8 and userbuffers do not apply.
    instances = min(2, job.options.optimizer_instances)
    options = replace(job.options, fp8_params=False, overlap_tp=False, optimizer_instances=instances)
    sizes = {"model": model, "layout": _shrink_batch(job, layout, dp), "gpus": gpus, "seq": seq}
    small_job = job.replace(**sizes, precision="bf16", options=options)
    return ShrunkJob(small_job, tuple(_list_folded(job, degrees)), tuple(list_sizes(job, small_job)))


def refuse_unsupported(job: PlannedJob) -> None:
    """Raise RehearsalError if a model's layers need GPU packages, or have features that a smaller model cannot keep."""
    model = job.model
    reason = None
    if model.pattern or {"mamba", "delta"} & model.kinds:
        reason = "Mamba and hybrid layers need GPU packages"
    elif model.runs:
        reason = "its layers have different widths, and its configuration lists each layer"
    elif model.indexer_heads:
        reason = "the indexer of sparse attention is not in Megatron-Core 0.15.3"
    if reason:
        raise RehearsalError(
            f"{model.name} cannot be rehearsed: {reason}", "check it without training: `recipes check`"
        )


def _fold_degrees(job: PlannedJob, ranks: int) -> dict[str, int]:
    """Return the degrees (tp, pp, cp, ep, etp, dp, vp) with which a job needs at most `ranks` processes.

    The largest degree is reduced first. DP is 2 if possible, or else the minimum that the experts need.
    """
    layout = job.layout
    own_etp = layout.tp if layout.etp is None else layout.etp
    degrees = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "etp": own_etp}
    while True:
        model_parallel = degrees["tp"] * degrees["pp"] * degrees["cp"]
        max_dp, min_dp = ranks // model_parallel, _min_dp(degrees)
        if max_dp >= min_dp:
            break
        largest_degree = max(("ep", "tp", "pp", "cp"), key=degrees.__getitem__)
        if degrees[largest_degree] <= 2:
            needed_ranks = model_parallel * min_dp
            raise RehearsalError(
                f"{job.model.name} with {job.layout.short()} needs {needed_ranks} ranks even if every degree is 2, but "
                f"--ranks is {ranks}",
                f"use --ranks {needed_ranks} (about 0.8 GB each)",
            )
        degrees[largest_degree] = _next_smaller(degrees[largest_degree])
        degrees["etp"] = degrees["tp"] if layout.etp is None else min(degrees["etp"], degrees["tp"])

    # With several instances of the distributed optimizer, keep two, each sharded over two ranks: DP 4.
    instances = min(2, job.options.optimizer_instances)
    preferred_dp = max(min_dp, min(2 * instances, layout.dp(job.gpus)))
    experts = degrees["ep"] * degrees["etp"]
    degrees["dp"] = min_dp
    for dp in range(preferred_dp, max_dp + 1):
        if degrees["tp"] * degrees["cp"] * dp % experts == 0 and dp % instances == 0:
            degrees["dp"] = dp
            break
    degrees["vp"] = layout.vp or 0
    # Every chunk needs a layer, and the schedule of more than 2 chunks per rank is the same.
    if degrees["vp"] > 2 and degrees["pp"] * degrees["vp"] > 8:
        degrees["vp"] = 2
    return degrees


def _min_dp(degrees: dict[str, int]) -> int:
    """Return the smallest DP for which the grid of experts, ep x etp, divides the ranks of a stage, tp x cp x dp."""
    expert_ranks = degrees["ep"] * degrees["etp"]
    return expert_ranks // math.gcd(expert_ranks, degrees["tp"] * degrees["cp"])


def _next_smaller(degree: int) -> int:
    """Return the largest divisor of a degree that is smaller than the degree, at least 2."""
    factor = next(f for f in range(2, degree + 1) if degree % f == 0)
    return max(2, degree // factor)


def _shrink_layout(job: PlannedJob, degrees: dict[str, int]) -> tuple[Layout, int]:
    """Return the layout with these degrees and its number of layers.

    A chunk has one or two layers; the chunks are unequal if the recipe's are.
    """
    old_layout = job.layout
    ends_as_layers = old_layout.embedding_as_layer or old_layout.loss_as_layer
    given_ends = old_layout.first_layers is not None or old_layout.last_layers is not None
    count = degrees["pp"] * max(1, degrees["vp"])
    per_chunk = _layers_per_chunk(job, count)
    changes: dict[str, Any] = {}
    layers = count * per_chunk - old_layout.embedding_as_layer - old_layout.loss_as_layer
    if old_layout.chunks is not None:
        chunks = _select_chunks(old_layout.chunks, count, per_chunk)
        changes["chunks"], layers = chunks, sum(chunks)
    elif given_ends:
        changes, layers = _shrink_end_stages(job, degrees, per_chunk)
    if old_layout.recompute == "full":
        max_layers = 1 if old_layout.recompute_method == "block" else per_chunk
        changes["recompute_layers"] = min(old_layout.recompute_layers, max_layers)
    # Groups of recomputed layers must fill every chunk, so that chunks of unequal length need groups of 1.
    if old_layout.recompute_method == "uniform" and (given_ends or old_layout.chunks or ends_as_layers):
        changes["recompute_layers"] = 1
    changes |= {name: degrees[name] for name in ("tp", "pp", "cp", "ep")}
    etp = None if old_layout.etp is None else degrees["etp"]
    return old_layout.replace(vp=degrees["vp"] or None, etp=etp, **changes), layers


def _layers_per_chunk(job: PlannedJob, count: int) -> int:
    """Return the layers per chunk of `count` chunks: 1, or more for several kinds of layers or uneven stages."""
    old, model = job.layout, job.model
    # At least 2 layers, which also suffices for the dense layers at the start: they shrink to one.
    kinds = max(2, model.moe_every, model.global_every)
    part_recomputed = old.recompute == "full" and (old.recompute_method == "block" or old.recompute_layers > 1)
    uneven = old.first_layers is not None or old.last_layers is not None or old.embedding_as_layer or old.loss_as_layer
    return max(2 if part_recomputed or uneven else 1, -(-kinds // count))


def _select_chunks(chunk_layers: tuple[int, ...], count: int, per_chunk: int) -> tuple[int, ...]:
    """Return the layers of `count` chunks like the recipe's (`chunk_layers`), including the first and the last.

    A chunk has `per_chunk` layers; the longest chunks have another one if the recipe's lengths differ.
    """
    picked_counts = [chunk_layers[round(i * (len(chunk_layers) - 1) / max(1, count - 1))] for i in range(count)]
    max_count = max(picked_counts)
    if len(set(chunk_layers)) > 1 and len(set(picked_counts)) == 1:  # no chunk with a different length was selected
        picked_counts[count // 2] = next(size for size in chunk_layers if size != max_count)
        max_count = max(picked_counts)
    if len(set(picked_counts)) == 1:
        return tuple(per_chunk if size else 0 for size in picked_counts)
    chunks = []
    for size in picked_counts:
        if size == max_count:
            chunks.append(per_chunk + 1)
        else:
            chunks.append(per_chunk if size else 0)
    return tuple(chunks)


def _shrink_end_stages(job: PlannedJob, degrees: dict[str, int], per_chunk: int) -> tuple[dict[str, int], int]:
    """Return `first_layers` and `last_layers` of the layout, if the recipe sets them, and the model's layers."""
    old, vp = job.layout, max(1, degrees["vp"])
    ends = {"first_layers": old.first_layers, "last_layers": old.last_layers}
    given_ends = {name: count for name, count in ends.items() if count is not None}
    other_stage_layers = (job.model.layers - sum(given_ends.values())) / max(1, old.pp - len(given_ends))
    new_ends = {
        name: vp * (per_chunk + (count > other_stage_layers) - (count < other_stage_layers))
        for name, count in given_ends.items()
    }
    return new_ends, sum(new_ends.values()) + (degrees["pp"] - len(given_ends)) * vp * per_chunk


def _shrink_model(m: ModelShape, layout: Layout, layers: int) -> ModelShape:
    """Return a model of the same kind with `layers` layers and the smallest sizes that the layout can divide."""
    if m.moe_every > 1 and m.dense_first:
        raise RehearsalError(
            f"{m.name} cannot be rehearsed: it combines dense first layers with experts in some layers"
        )
    tp, etp = layout.tp, layout.tp if layout.etp is None else layout.etp
    groups, heads = _shrink_heads(m, tp)
    hidden_size = heads * HEAD
    attention_width = m.heads * m.channels
    if m.hidden != attention_width and not m.kv_lora:  # keep heads that are wider or narrower than the hidden state
        hidden_size = hidden_size // 2 if m.hidden < attention_width else hidden_size + tp * HEAD
    expert_ffn = 0
    if m.expert_ffn:
        expert_ffn = round_up(hidden_size, math.lcm(tp, etp))
    changes: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden_size,
        "heads": heads,
        "kv_heads": groups if m.kv_heads else 0,
        "head_dim": HEAD if m.head_dim or m.hidden != attention_width else 0,
        "vocab": round_up(VOCAB, tp),
        "vocab_divisible_by": 1,
        "ffn": 2 * hidden_size if m.ffn else 0,
        "expert_ffn": expert_ffn,
        "shared_ffn": expert_ffn * min(2, -(-m.shared_ffn // m.expert_ffn)) if m.shared_ffn else 0,
        "dense_first": min(m.dense_first, 1),
        "mtp_layers": min(m.mtp_layers, 1),
    }
    if m.experts:
        topk = min(m.topk, 2)
        local = 2 if m.experts > layout.ep else 1
        changes |= {"topk": topk, "experts": layout.ep * max(local, -(-2 * topk // layout.ep))}
    if m.kv_lora:
        latent = {"kv_lora": 2 * HEAD, "q_lora": 3 * HEAD if m.q_lora else 0}
        changes |= latent | {"qk_nope_dim": HEAD, "qk_rope_dim": HEAD // 2, "v_dim": HEAD, "head_dim": 0}
    return m.replace(**changes)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `size`."""
    return multiple * -(-size // multiple)


def _shrink_heads(m: ModelShape, tp: int) -> tuple[int, int]:
    """Return (query groups, heads), divisible by `tp`, that keep grouped, multi-query or multi-head attention."""
    per_rank = 2 if tp == 1 or (m.groups > tp and tp == 2) else 1  # several per rank if TP is small
    groups = 1 if m.groups == 1 else tp * per_rank
    if m.heads == m.groups:
        return groups, groups
    return groups, max(2, tp) if groups == 1 else 2 * groups


def _shrink_batch(job: PlannedJob, layout: Layout, dp: int) -> Layout:
    """Set the smallest batch that runs the schedule: two micro-batches per stage, if the recipe has that many."""
    own_micro_batches = job.layout.micro_batches(job.gpus)
    micro = min(own_micro_batches, 2 * layout.pp)
    if layout.vp:  # the interleaved schedule requires a multiple of pp
        micro = max(layout.pp, micro // layout.pp * layout.pp)
    mbs = min(job.layout.mbs, 2)
    return layout.replace(mbs=mbs, gbs=mbs * dp * micro)


def _list_folded(job: PlannedJob, degrees: dict[str, int]) -> Iterator[ResizedValue]:
    """Yield the degrees that differ from those of the job's layout."""
    own_degrees = {name: getattr(job.layout, name) for name in ("tp", "pp", "vp", "cp", "ep", "etp")}
    own_degrees["dp"] = job.layout.dp(job.gpus)
    for name, old in own_degrees.items():
        if old is not None and old != degrees[name]:
            yield ResizedValue(name, old, degrees[name])


def list_sizes(job: PlannedJob, small_job: PlannedJob) -> Iterator[ResizedValue]:
    """Yield the sizes of model, sequence and batch that differ between a job and its smaller version."""
    yield from _differences(job.model, small_job.model, [field.name for field in fields(ModelShape)])
    yield ResizedValue("seq", job.seq, small_job.seq)
    layout_fields = ("mbs", "gbs", "first_layers", "last_layers", "chunks", "recompute_layers")
    yield from _differences(job.layout, small_job.layout, layout_fields)


def _differences(old: object, new: object, names: Iterable[str]) -> Iterator[ResizedValue]:
    for name in names:
        if getattr(old, name) != getattr(new, name):
            yield ResizedValue(name, getattr(old, name), getattr(new, name))
