"""Shrinks a job so that a laptop can train it in the same topology: sizes shrink, degrees above 1 stay above 1.

Pure arithmetic on the planner's `PlannedJob`, without NeMo. The result keeps every divisibility that the layout relies
on, and whatever makes a layout special: stages of unequal length, layers of different kinds, grouped queries, gradient
accumulation.
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
"""Most processes of a rehearsal by default; each takes about 0.8 GB."""

HEAD, VOCAB, SEQ = 16, 128, 32
"""Least size of a head, of the vocabulary and of a sequence."""

NAMES = {"tp": "TP", "pp": "PP", "vp": "VP", "cp": "CP", "ep": "EP", "etp": "ETP", "dp": "DP"}


@dataclass(frozen=True)
class Resized:
    """A number that differs in the rehearsal; `name` is the planner's."""

    name: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Shrunk:
    """A shrunk job."""

    job: PlannedJob
    folded: tuple[Resized, ...]
    """Degrees that became smaller. A degree above 1 stays above 1, except DP where there is no room."""
    sizes: tuple[Resized, ...]
    """Sizes of the model, the sequence and the batch that became smaller."""

    @property
    def topology(self) -> str:
        """`TP2 PP2 DP2, folded: TP 8 -> 2, DP 16 -> 2`, or `..., its own topology`."""
        layout = self.job.layout
        dp = layout.dp(self.job.gpus)
        short = " ".join([layout.short() if layout.model_parallel * layout.ep > 1 else "", f"DP{dp}" * (dp > 1)])
        folded = ", ".join(f"{NAMES[degree.name]} {degree.old} -> {degree.new}" for degree in self.folded)
        return f"{short.strip() or 'one rank'}, {f'folded: {folded}' if folded else 'its own topology'}"


def shrink(job: PlannedJob, ranks: int = RANKS) -> Shrunk:
    """Make the job small enough for so many processes.

    Args:
        job: a legal job.
        ranks: most processes; the result may need fewer.

    Raises:
        RehearsalError: a feature of the job has no rehearsal, or `ranks` is too few even with each degree at 2.
    """
    _refuse(job)
    degrees = _fold(job, ranks)
    layout, layers = _stages(job, degrees)
    seq = _sequence(layout)
    model = _model(job.model, layout, layers)
    if model.window:  # a window that cuts the recipe's sequences must cut the short ones too
        model = model.replace(window=seq // 4 if job.model.window < job.seq else seq)
    if model.positions:
        model = model.replace(positions=seq)
    if model.indexer_topk:
        model = model.replace(indexer_topk=seq // 2)
    dp = degrees["dp"]
    gpus = layout.model_parallel * dp
    # Ranks on CPUs train in FP32, without userbuffers: what FP8 and those ask of a sequence is not asked of this one.
    instances = min(2, job.options.optimizer_instances)
    options = replace(job.options, fp8_params=False, overlap_tp=False, optimizer_instances=instances)
    sizes = {"model": model, "layout": _batch(job, layout, dp), "gpus": gpus, "seq": seq}
    small = job.replace(**sizes, precision="bf16", options=options)
    return Shrunk(small, tuple(_folded(job, degrees)), tuple(_sizes(job, small)))


def _refuse(job: PlannedJob) -> None:
    """Refuse what has no rehearsal, by name."""
    model, name = job.model, job.model.name
    refusals = {
        "Mamba and hybrid layers need GPU packages": bool(model.pattern or {"mamba", "delta"} & model.kinds),
        "its layers differ in width one by one, and its configuration lists each": bool(model.runs),
        "sparse attention's indexer is not in Megatron-Core 0.15.3": bool(model.indexer_heads),
    }
    for reason, applies in refusals.items():
        if applies:
            raise RehearsalError(
                f"{name} cannot be rehearsed: {reason}", "`recipes check` judges it without running it"
            )


def _fold(job: PlannedJob, ranks: int) -> dict[str, int]:
    """Degrees that fit, the largest halved first; DP is the least that experts and batch allow, 2 if there is room."""
    layout = job.layout
    own_etp = layout.tp if layout.etp is None else layout.etp
    d = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "etp": own_etp}
    while (room := ranks // (d["tp"] * d["pp"] * d["cp"])) < (least := _least_dp(d)):
        largest = max(("ep", "tp", "pp", "cp"), key=d.__getitem__)
        if d[largest] <= 2:
            raise _too_few_ranks(job, d["tp"] * d["pp"] * d["cp"] * least, ranks)
        d[largest] = _smaller(d[largest])
        d["etp"] = d["tp"] if layout.etp is None else min(d["etp"], d["tp"])
    # Of a sharded optimizer's instances, two, each of which is sharded too: DP 4.
    parts = 2 * min(2, job.options.optimizer_instances)
    preferred = max(least, min(parts, layout.dp(job.gpus)))
    d["dp"] = next(
        (dp for dp in range(preferred, room + 1) if _expert_grid_fits(d, dp) and dp % (parts // 2) == 0), least
    )
    d["vp"] = layout.vp or 0
    if d["vp"] > 2 and d["pp"] * d["vp"] > 8:  # more chunks are more layers, and no other schedule
        d["vp"] = 2
    return d


def _too_few_ranks(job: PlannedJob, least: int, ranks: int) -> RehearsalError:
    return RehearsalError(
        f"{job.model.name} as {job.layout.short()} takes {least} ranks with every degree folded to 2, and --ranks is "
        f"{ranks}",
        f"--ranks {least}, at about 0.8 GB each",
    )


def _least_dp(d: dict[str, int]) -> int:
    """The least DP at which the experts' grid, ep x etp, divides the ranks of a stage, tp x cp x dp."""
    return d["ep"] * d["etp"] // math.gcd(d["ep"] * d["etp"], d["tp"] * d["cp"])


def _expert_grid_fits(d: dict[str, int], dp: int) -> bool:
    return d["tp"] * d["cp"] * dp % (d["ep"] * d["etp"]) == 0


def _smaller(degree: int) -> int:
    """The next smaller degree, 2 at least."""
    factor = next(f for f in range(2, degree + 1) if degree % f == 0)
    return max(2, degree // factor)


def _stages(job: PlannedJob, d: dict[str, int]) -> tuple[Layout, int]:
    """The folded layout and its number of layers: one or two a chunk, unequal where the recipe's are."""
    old = job.layout
    ends_as_layers = old.embedding_as_layer or old.loss_as_layer
    given_ends = old.first_layers is not None or old.last_layers is not None
    count = d["pp"] * max(1, d["vp"])
    per_chunk = _layers_per_chunk(job, count)
    changes: dict[str, Any] = {}
    layers = count * per_chunk - old.embedding_as_layer - old.loss_as_layer
    if old.chunks is not None:
        chunks = _fewer_chunks(old.chunks, count, per_chunk)
        changes["chunks"], layers = chunks, sum(chunks)
    elif given_ends:
        changes, layers = _ends(job, d, per_chunk)
    if old.recompute == "full":
        changes["recompute_layers"] = min(old.recompute_layers, 1 if old.recompute_method == "block" else per_chunk)
    # Groups of layers must fill every chunk, and chunks of unequal length have no other common group than 1.
    if old.recompute_method == "uniform" and (given_ends or old.chunks or ends_as_layers):
        changes["recompute_layers"] = 1
    degrees = {name: d[name] for name in ("tp", "pp", "cp", "ep")}
    etp = None if old.etp is None else d["etp"]
    return old.replace(**degrees, vp=d["vp"] or None, etp=etp, **changes), layers


def _layers_per_chunk(job: PlannedJob, count: int) -> int:
    """Layers of each of `count` chunks: 1, or as many as the model's kinds of layers and the layout need."""
    old, model = job.layout, job.model
    # One dense layer at the start shrinks to itself; several shrink to 1, before at least one with experts.
    dense_and_more = model.dense_first + 1 if model.dense_first == 1 else 2 * bool(model.dense_first)
    kinds = max(2, dense_and_more, model.moe_every, model.global_every)
    part_recomputed = old.recompute == "full" and (old.recompute_method == "block" or old.recompute_layers > 1)
    uneven = old.first_layers is not None or old.last_layers is not None or old.embedding_as_layer or old.loss_as_layer
    return max(2 if part_recomputed or uneven else 1, -(-kinds // count))


def _fewer_chunks(old: tuple[int, ...], count: int, per_chunk: int) -> tuple[int, ...]:
    """So many chunks, first and last included: the longest hold `per_chunk + 1` layers, shorter ones one less."""
    picked = [old[round(i * (len(old) - 1) / max(1, count - 1))] for i in range(count)]
    longest = max(picked)
    if len(set(old)) > 1 and len(set(picked)) == 1:  # the chunk of another length was between the picked ones
        picked[count // 2] = next(size for size in old if size != longest)
        longest = max(picked)
    uneven = len(set(picked)) > 1
    return tuple(0 if not size else per_chunk + uneven - (size < longest) for size in picked)


def _ends(job: PlannedJob, d: dict[str, int], per_chunk: int) -> tuple[dict[str, int], int]:
    """Layers of the first and the last stage, fewer or more than the others' as in the recipe; and of the model."""
    old, vp = job.layout, max(1, d["vp"])
    ends = {"first_layers": old.first_layers, "last_layers": old.last_layers}
    given = {name: count for name, count in ends.items() if count is not None}
    others = (job.model.layers - sum(given.values())) / max(1, old.pp - len(given))
    new = {name: vp * (per_chunk + (count > others) - (count < others)) for name, count in given.items()}
    return new, sum(new.values()) + (d["pp"] - len(given)) * vp * per_chunk


def _model(m: ModelShape, layout: Layout, layers: int) -> ModelShape:
    """A model of the same kind at the least sizes that the layout can divide."""
    if m.moe_every > 1 and m.dense_first:
        raise RehearsalError(f"{m.name} cannot be rehearsed: experts neither in every layer nor after the first ones")
    tp, etp = layout.tp, layout.tp if layout.etp is None else layout.etp
    groups, heads = _heads(m, tp)
    hidden = heads * HEAD
    wide = m.heads * m.channels
    if m.hidden != wide and not m.kv_lora:  # heads together wider or narrower than the hidden state
        hidden = hidden // 2 if m.hidden < wide else hidden + tp * HEAD
    both = math.lcm(tp, etp)
    expert = -(-hidden // both) * both if m.expert_ffn else 0
    changes: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": groups if m.kv_heads else 0,
        "head_dim": HEAD if m.head_dim or m.hidden != wide else 0,
        "vocab": tp * -(-VOCAB // tp),
        "vocab_divisible_by": 1,
        "ffn": 2 * hidden if m.ffn else 0,
        "expert_ffn": expert,
        "shared_ffn": expert * min(2, -(-m.shared_ffn // m.expert_ffn)) if m.shared_ffn else 0,
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


def _heads(m: ModelShape, tp: int) -> tuple[int, int]:
    """Query groups and heads: grouped, multi-query or one key per head as in the model, and divisible by `tp`."""
    per_rank = 2 if tp == 1 or (m.groups > tp and tp == 2) else 1  # two where the model has several and TP is small
    groups = 1 if m.groups == 1 else tp * per_rank
    if m.heads == m.groups:
        return groups, groups
    return groups, max(2, tp) if groups == 1 else 2 * groups


def _sequence(layout: Layout) -> int:
    """Tokens of a sequence: a multiple of 2 x cp x tp."""
    unit = 2 * layout.cp * layout.tp
    return unit * -(-SEQ // unit)


def _batch(job: PlannedJob, layout: Layout, dp: int) -> Layout:
    """The least batch that runs the schedule: two micro-batches a stage, if the recipe has as many."""
    own = job.layout.micro_batches(job.gpus)
    micro = min(own, 2 * layout.pp)
    if layout.vp:  # the interleaved schedule takes a multiple of pp
        micro = max(layout.pp, micro // layout.pp * layout.pp)
    mbs = min(job.layout.mbs, 2)
    return layout.replace(mbs=mbs, gbs=mbs * dp * micro)


def _folded(job: PlannedJob, degrees: dict[str, int]) -> Iterator[Resized]:
    own = {name: getattr(job.layout, name) for name in ("tp", "pp", "vp", "cp", "ep", "etp")}
    own["dp"] = job.layout.dp(job.gpus)
    for name, old in own.items():
        if old is not None and old != degrees[name]:
            yield Resized(name, old, degrees[name])


def _sizes(job: PlannedJob, small: PlannedJob) -> Iterator[Resized]:
    yield from _differences(job.model, small.model, [field.name for field in fields(ModelShape)])
    yield Resized("seq", job.seq, small.seq)
    of_layout = ("mbs", "gbs", "first_layers", "last_layers", "chunks", "recompute_layers")
    yield from _differences(job.layout, small.layout, of_layout)


def _differences(old: object, new: object, names: Iterable[str]) -> Iterator[Resized]:
    for name in names:
        if getattr(old, name) != getattr(new, name):
            yield Resized(name, getattr(old, name), getattr(new, name))
