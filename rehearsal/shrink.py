"""A job to one of the same topology that a laptop can train: sizes shrink, degrees of parallelism stay above 1.

Pure arithmetic on the planner's `PlannedJob`, without NeMo. Every divisibility that the layout relies on is kept, and
so is what makes a layout different: stages of unequal length, layers of different kinds, grouped queries, gradient
accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal.convert import RehearsalError

RANKS = 12
"""Processes that a rehearsal takes at most, unless it is told otherwise: about 0.8 GB each."""

HEAD, VOCAB, SEQ = 16, 128, 32
"""Least size of a head, of the vocabulary and of a sequence."""

NAMES = {"tp": "TP", "pp": "PP", "vp": "VP", "cp": "CP", "ep": "EP", "etp": "ETP", "dp": "DP"}


@dataclass(frozen=True)
class Resized:
    """One number that the rehearsal has different: `what` is the planner's name of it."""

    what: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Shrunk:
    """A job as it is rehearsed."""

    job: PlannedJob
    folded: tuple[Resized, ...]
    """Degrees that became smaller; a degree that was above 1 still is, but DP where there was no room."""
    sizes: tuple[Resized, ...]
    """Sizes of the model, the sequence and the batch that became smaller."""

    @property
    def topology(self) -> str:
        """`TP2 PP2 DP2, folded: TP 8 -> 2, DP 16 -> 2`, or `..., its own topology`."""
        layout = self.job.layout
        dp = layout.dp(self.job.gpus)
        short = " ".join([layout.short() if layout.model_parallel * layout.ep > 1 else "", f"DP{dp}" * (dp > 1)])
        how = ", ".join(f"{NAMES[each.what]} {each.old} -> {each.new}" for each in self.folded)
        return f"{short.strip() or 'one rank'}, {f'folded: {how}' if how else 'its own topology'}"


def shrink(job: PlannedJob, ranks: int = RANKS) -> Shrunk:
    """The job made small enough for so many processes.

    Args:
        job: a legal job.
        ranks: processes at most; the result may need fewer.

    Raises:
        RehearsalError: what the job has cannot be shrunk, or does not fit so few processes with each degree at 2.
    """
    _refuse(job)
    degrees = _fold(job, ranks)
    layout, layers = _stages(job, degrees)
    dp = degrees["dp"]
    model = _model(job.model, layout, layers)
    seq = _sequence(layout)
    if model.window:
        model = model.replace(window=seq // 4 if job.model.window < job.seq else seq)
    if model.positions:
        model = model.replace(positions=seq)
    if model.indexer_topk:
        model = model.replace(indexer_topk=seq // 2)
    gpus = layout.model_parallel * dp
    small = job.replace(model=model, layout=_batch(job, layout, dp), gpus=gpus, seq=seq)
    return Shrunk(small, tuple(_folded(job, degrees)), tuple(_sizes(job, small)))


def _refuse(job: PlannedJob) -> None:
    """What has no rehearsal, by name."""
    model, name, sharding = job.model, job.model.name, job.layout.sharding
    lacking = {
        "Mamba and hybrid layers need GPU packages": bool(model.pattern or {"mamba", "delta"} & model.kinds),
        "its layers differ in width one by one, and its configuration lists each": bool(model.runs),
        "sparse attention's indexer is not in Megatron-Core 0.15.3": bool(model.indexer_heads),
        f"{sharding} is Megatron-FSDP, which orders its work on CUDA's streams": sharding in ("zero2", "zero3"),
    }
    for why, found in lacking.items():
        if found:
            raise RehearsalError(f"{name} cannot be rehearsed: {why}", "`recipes check` judges it without running it")


def _fold(job: PlannedJob, ranks: int) -> dict[str, int]:
    """Degrees that fit, the largest halved first; DP is the least that experts and batch allow, 2 if there is room."""
    layout = job.layout
    own = layout.dp(job.gpus)
    d = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
    d["etp"] = layout.tp if layout.etp is None else layout.etp
    while True:
        d["dp"] = least = _experts_need(d)
        wanted = 2 if own > 1 else 1
        room = ranks // (d["tp"] * d["pp"] * d["cp"])
        if room >= least:
            d["dp"] = next((n for n in range(max(wanted, least), room + 1) if _grid_fits(d, n)), least)
            break
        name = max(("ep", "tp", "pp", "cp"), key=lambda each: d[each])
        if d[name] <= 2:
            raise RehearsalError(
                f"{job.model.name} as {layout.short()} takes {d['tp'] * d['pp'] * d['cp'] * least} ranks with every "
                f"degree folded to 2, and --ranks is {ranks}",
                f"--ranks {d['tp'] * d['pp'] * d['cp'] * least}, at about 0.8 GB each",
            )
        d[name] = _smaller(d[name])
        d["etp"] = d["tp"] if layout.etp is None else min(d["etp"], d["tp"])
    d["vp"] = layout.vp or 0
    if d["vp"] > 2 and d["pp"] * d["vp"] > 8:
        d["vp"] = 2
    return d


def _experts_need(d: dict[str, int]) -> int:
    """The least DP at which the experts' grid divides the ranks of a stage."""
    return d["ep"] * d["etp"] // math.gcd(d["ep"] * d["etp"], d["tp"] * d["cp"])


def _grid_fits(d: dict[str, int], dp: int) -> bool:
    return d["tp"] * d["cp"] * dp % (d["ep"] * d["etp"]) == 0


def _smaller(degree: int) -> int:
    """The next smaller degree, 2 at least."""
    factor = next(f for f in range(2, degree + 1) if degree % f == 0)
    return max(2, degree // factor)


def _stages(job: PlannedJob, d: dict[str, int]) -> tuple[Layout, int]:
    """The folded layout and its number of layers: one or two a chunk, unequal where the recipe's are."""
    old, m = job.layout, job.model
    count = d["pp"] * max(1, d["vp"])
    need = max(2, m.dense_first + 1 if m.dense_first == 1 else 2 * bool(m.dense_first), m.moe_every, m.global_every)
    block = old.recompute == "full" and (old.recompute_method == "block" or old.recompute_layers > 1)
    ends = old.first_layers is not None or old.last_layers is not None
    each = max(2 if block or ends or old.embedding_as_layer or old.loss_as_layer else 1, -(-need // count))
    changes: dict[str, Any] = {}
    layers = count * each - old.embedding_as_layer - old.loss_as_layer
    if old.chunks is not None:
        chunks = _fewer_chunks(old.chunks, count, each)
        changes["chunks"], layers = chunks, sum(chunks)
    elif ends:
        changes, layers = _ends(job, d, each)
    if old.recompute == "full":
        changes["recompute_layers"] = min(old.recompute_layers, 1 if old.recompute_method == "block" else each)
    if old.recompute_method == "uniform" and (ends or old.chunks or old.embedding_as_layer or old.loss_as_layer):
        changes["recompute_layers"] = 1
    layout = old.replace(
        **{name: d[name] for name in ("tp", "pp", "cp", "ep")},
        vp=d["vp"] or None,
        etp=None if old.etp is None else d["etp"],
        **changes,
    )
    return layout, layers


def _fewer_chunks(old: tuple[int, ...], count: int, each: int) -> tuple[int, ...]:
    """So many chunks, first and last among them: the longest hold `each + 1` layers, shorter ones one less."""
    picked = [old[round(i * (len(old) - 1) / max(1, count - 1))] for i in range(count)]
    most = max(picked)
    if len(set(old)) > 1 and len(set(picked)) == 1:  # the odd one was between those picked
        picked[count // 2] = next(size for size in old if size != most)
        most = max(picked)
    uneven = len(set(picked)) > 1
    return tuple(0 if not size else each + uneven - (size < most) for size in picked)


def _ends(job: PlannedJob, d: dict[str, int], each: int) -> tuple[dict[str, int], int]:
    """Layers of the first and the last stage, fewer or more than the others' as they were."""
    old, vp = job.layout, max(1, d["vp"])
    given = {"first_layers": old.first_layers, "last_layers": old.last_layers}
    given = {name: count for name, count in given.items() if count is not None}
    others = (job.model.layers - sum(given.values())) / max(1, old.pp - len(given))
    new = {name: vp * (each + (count > others) - (count < others)) for name, count in given.items()}
    return new, sum(new.values()) + (d["pp"] - len(given)) * vp * each


def _model(m: ModelShape, layout: Layout, layers: int) -> ModelShape:
    """The model's own kind at the least sizes that the layout can divide."""
    tp, etp = layout.tp, layout.tp if layout.etp is None else layout.etp
    groups = 1 if m.groups == 1 else tp * (2 if tp == 1 or (m.groups > tp and tp == 2) else 1)
    heads = groups if m.heads == m.groups else max(2, tp) * groups if groups == 1 else 2 * groups
    hidden = heads * HEAD
    wide = m.heads * m.channels
    if m.hidden != wide and not m.kv_lora:  # heads together wider or narrower than the hidden state
        hidden = hidden // 2 if m.hidden < wide else hidden + tp * HEAD
    both = tp * etp // math.gcd(tp, etp)
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
    if m.moe_every > 1 and m.dense_first:
        raise RehearsalError(f"{m.name} cannot be rehearsed: experts neither in every layer nor after the first ones")
    return m.replace(**changes)


def _sequence(layout: Layout) -> int:
    """Tokens of a sequence: a multiple of 2 x cp x tp."""
    unit = 2 * layout.cp * layout.tp
    return unit * -(-SEQ // unit)


def _batch(job: PlannedJob, layout: Layout, dp: int) -> Layout:
    """The least batch that runs the schedule: micro-batches for twice the stages, if the recipe has as many."""
    own = job.layout.micro_batches(job.gpus)
    micro = min(own, 2 * layout.pp)
    if layout.vp:
        micro = max(layout.pp, micro // layout.pp * layout.pp)
    mbs = min(job.layout.mbs, 2)
    return layout.replace(mbs=mbs, gbs=mbs * dp * micro)


def _folded(job: PlannedJob, degrees: dict[str, int]) -> Iterator[Resized]:
    old = {name: getattr(job.layout, name) for name in ("tp", "pp", "vp", "cp", "ep", "etp")}
    old["dp"] = job.layout.dp(job.gpus)
    for name, was in old.items():
        if was is not None and was != degrees[name]:
            yield Resized(name, was, degrees[name])


def _sizes(job: PlannedJob, small: PlannedJob) -> Iterator[Resized]:
    for each in fields(ModelShape):
        old, new = getattr(job.model, each.name), getattr(small.model, each.name)
        if old != new:
            yield Resized(each.name, old, new)
    yield Resized("seq", job.seq, small.seq)
    for name in ("mbs", "gbs", "first_layers", "last_layers", "chunks", "recompute_layers"):
        old, new = getattr(job.layout, name), getattr(small.layout, name)
        if old != new:
            yield Resized(name, old, new)
