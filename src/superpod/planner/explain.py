"""Explain a plan in sentences: why a layout is the fastest, its bottlenecks, and what would save memory or time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from superpod.planner import legality, memory, predict
from superpod.planner.calibration import corrections
from superpod.planner.formats import option_syntax
from superpod.planner.hardware import GIB
from superpod.planner.layout import MEGATRON_FSDP, SHARDINGS, Layout
from superpod.planner.memory.capacity import MARGIN
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.predict import Prediction
from superpod.planner.rules import pipeline_layout
from superpod.planner.search import SearchResult

BOUNDS = {
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert dispatch",
    "pp_bubble": "the pipeline bubble",
    "pp_p2p": "pipeline sends",
    "dp": "data-parallel gradients and parameters",
    "recompute": "recomputed activations",
    "optimizer": "the optimizer step",
}
"""Term of the step time -> its name in a sentence; other terms keep their key."""


UNMEASURED_NOTE = (
    "the prediction for Megatron-FSDP (zero2, zero3) is not validated by measured runs: test it on a few nodes"
)
OPTION = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class Saving:
    """A change to a run that saves memory, and its effect."""

    what: str
    """The change in words."""
    job: PlannedJob
    """The changed job."""
    prediction: Prediction
    frees_gib: float
    slower: float
    """Relative change of the step time; 0.03 = 3 % slower."""


def memory_savings(job: PlannedJob, before: Prediction | None = None) -> list[Saving]:
    """Return every legal single change that frees memory: first those that make the run fit, then by step time."""
    before = before or predict.one(job)
    if before.step_time_s is None or before.reserved_gib_max is None:
        return []
    tried = [(what, job.replace(layout=layout)) for what, layout in _changes(job)]
    tried += [(what, job.replace(options=options)) for what, options in _options(job)]
    legal = [(what, other) for what, other in tried if not legality.violations(other)]
    savings = []
    for (what, other), after in zip(legal, predict.many([other for _, other in legal]), strict=True):
        frees = before.reserved_gib_max - (after.reserved_gib_max or 0)
        if frees > 0.05 and after.step_time_s:  # GiB; less is within the model's error
            savings.append(Saving(what, other, after, frees, after.step_time_s / before.step_time_s - 1))
    return sorted(savings, key=lambda m: (m.prediction.short_gib > 0, m.slower))


def faster_changes(job: PlannedJob, before: Prediction, most: int = 3) -> list[str]:
    """Describe up to `most` single changes that fit and reduce the step time by at least 1 %, the fastest first."""
    tried = [(what, job.replace(layout=layout)) for what, layout in (*_changes(job), *_reversals(job))]
    legal = [(what, other) for what, other in tried if not legality.violations(other)]
    after = zip((what for what, _ in legal), predict.many([other for _, other in legal]), strict=True)
    fits = [(what, p.step_time_s) for what, p in after if p.fit == "fits" and p.step_time_s]
    gains = [(seconds / (before.step_time_s or 1.0) - 1, what) for what, seconds in fits]
    return [f"{what} reduces the step time by {-gain:.1%}" for gain, what in sorted(gains) if gain < -0.01][:most]


SEARCH = "`recipes plan` searches combinations"


def describe_shortage(job: PlannedJob, before: Prediction, together: str = SEARCH) -> str:
    """Describe what a run lacks that does not fit: `40.2 GiB short: cp 2 frees 22.1 GiB (+3 % time), ...`.

    If single changes make it fit, only those are listed; else the largest savings, followed by the hint `together`.
    """
    missing = max(0.0, before.short_gib)
    savings = memory_savings(job, before)
    enough = [m for m in savings if m.prediction.short_gib <= 0][:3]
    shown = enough or sorted(savings, key=lambda m: -m.frees_gib)[:3]
    if not shown:
        return f"{missing:.1f} GiB short, and no single change to the layout frees memory: use more GPUs"
    listed = ", ".join(f"{m.what} frees {m.frees_gib:.1f} ({m.slower:+.0%} time)" for m in shown)
    if not enough:
        return f"{missing:.1f} GiB short: {listed}; no single change is enough" + (f": {together}" if together else "")
    return f"{missing:.1f} GiB short: {listed}" + ("; each of them is enough" if len(enough) > 1 else "")


def advise_more_memory(job: PlannedJob) -> str:
    """Return a hint for a search that found no layout that fits, if no single option is enough."""
    cap = job.options.memory_cap
    return "use more GPUs" if cap is None else f"use more GPUs or raise the memory cap of {cap:g} GiB"


def bound(prediction: Prediction) -> str:
    """Name the two largest terms of the step time with their fractions; only one if no other takes 2 %."""
    seconds = prediction.step_time_s or 1.0
    shares = sorted(((value / seconds, key) for key, value in prediction.terms_s.items()), reverse=True)[:2]
    (first, *second) = [f"{BOUNDS.get(key, key)}, {share:.0%}" for share, key in shares if share >= 0.02] or ["nothing"]
    return f"bound by {first} of the step" + "".join(f"; then {words}" for words in second)


def _allocation_warnings(result: SearchResult, i: int) -> list[str]:
    """Return a warning if the i-th layout is a pipeline with allocation retries, according to a user's calibration."""
    gpu = result.job.node.gpu
    own = corrections.decode(gpu.calibrated_as)[1]
    seconds, level = own.get("alloc_retries", 0.0), own.get("full_from", 1.0)
    full = float(result.reserved[i]) / memory.usable(gpu)
    if result.layout(i).pp == 1 or not seconds or full < level:
        return []
    return [
        f"the rank with the highest memory use reserves {full:.0%} of its GPU; above {level:.0%}, a pipeline spends "
        f"{seconds:.2g} s per micro-batch on allocation retries (calibration): recompute more, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    ]


def explain_layout(result: SearchResult, i: int, prediction: Prediction | None = None) -> list[str]:
    """Explain the position of the i-th layout: bottleneck, memory headroom, stages, and the next layout."""
    prediction = prediction or predict.one(result.job_at(i))
    room = (result.cap - result.reserved[i]) / GIB
    tight = "tight: " * bool(result.tight[i])
    left = f"{room:.1f} of {result.cap / GIB:.1f} GiB usable memory are free on the rank with the highest memory use"
    if room < 0:
        left = f"one rank reserves {-room:.1f} GiB more than the {result.cap / GIB:.1f} GiB of usable memory"
    lines = [bound(prediction), f"{tight}{left}"]
    lines += _allocation_warnings(result, i)
    if result.layout(i).sharding in MEGATRON_FSDP:
        lines.append(UNMEASURED_NOTE)
    if approximate := result.job_at(i).model.approximate:
        lines.append(f"this model is planned approximately: {approximate}")
    layout = result.layout(i)
    if layout.pp > 1:
        lines.append(pipeline(result.job_at(i)))
    lines += pipeline_layout_lines(result.job_at(i))
    ranked = result.ranked
    lines.append(f"to plan only this layout: --layout {option_syntax.format_layout(layout)}")
    if i == ranked[0] and (other := _best_with_other_degrees(result)) is not None:
        lines.append(_compare_with_next(result, i, other))
    return lines


def _compare_with_next(result: SearchResult, i: int, other: int) -> str:
    """Compare the i-th layout with the next one; if that is faster, explain that it ranks lower because it is tight."""
    slower = result.seconds[other] / result.seconds[i] - 1
    name = result.layout(other).short()
    if slower < 0 and result.tight[other] and not result.tight[i]:
        room, cap = (result.cap - result.reserved[other]) / GIB, result.cap / GIB
        left = f"only {room:.2f} of {cap:.1f} GiB are free, less than {MARGIN:.1%}"
        if room < 0:
            left = f"it reserves {-room:.2f} GiB more than {cap:.1f} GiB"
        return f"{name} would be {-slower:.1%} faster, but is tight: {left}"
    return f"the next layout with different parallel degrees, {name}, is {max(0.0, slower):.1%} slower"


def pipeline(job: PlannedJob) -> str:
    """Describe the pipeline bubble in both conventions, and the imbalance of the stages."""
    p, v, m = job.layout.pp, job.layout.vp or 1, job.micro_batches
    chunks = [len(r) for r in job.split.chunk_layers(job.model.layers)]
    per_rank = [sum(chunks[rank::p]) for rank in range(p)]
    uneven = max(per_rank) * p / sum(per_rank) - 1
    return (
        f"the pipeline bubble is {(p - 1) / (v * m):.1%} of the ideal time, {(p - 1) / (v * m + p - 1):.1%} of the "
        f"total time; the largest stage has {uneven:.1%} more layers than the mean"
    )


def pipeline_layout_lines(job: PlannedJob) -> list[str]:
    """Return a line with uneven stages in Megatron's syntax; [] if the stages are even."""
    if not pipeline_layout.is_uneven(job):
        return []
    return [f"the layers of each stage in Megatron's syntax: {OPTION} '{pipeline_layout.from_job(job)}'"]


def near_misses(result: SearchResult, most: int = 3) -> list[str]:
    """Describe layouts that would be faster than the best one but do not fit, and what would make each fit."""
    if not len(result.ranked):
        return []
    best = result.seconds[result.ranked[0]]
    faster = np.flatnonzero(~result.fits & (result.seconds < best * 0.995))  # by at least 0.5 %
    lines: list[str] = []
    shown: set[tuple[int, ...]] = set()
    # First those that almost fit and are fast.
    for i in faster[np.argsort(result.reserved[faster] / result.cap + result.seconds[faster] / best)]:
        job = result.job_at(int(i))
        degrees = (job.layout.tp, job.layout.pp, job.layout.ep)
        if degrees in shown:
            continue
        shown.add(degrees)
        gain = 1 - result.seconds[i] / best
        lines.append(
            f"{title(job.layout)} would be {gain:.1%} faster, but is {describe_shortage(job, predict.one(job), '')}"
        )
        if len(lines) == most:
            break
    return lines


def title(layout: Layout) -> str:
    """Format a layout for messages: `TP4 PP8 VP2 SP, mbs 1, full recompute, zero3`."""
    words = [layout.short(), f"mbs {layout.mbs}"]
    ends = ["embedding"] * layout.embedding_as_layer + ["loss"] * layout.loss_as_layer
    if ends:
        words.append(f"{' and '.join(ends)} as layer{'s' * (len(ends) > 1)}")
    if layout.chunks is not None:
        words.append("uneven stages")
    if layout.recompute == "selective":
        words.append("recompute " + "+".join(layout.recompute_modules))
    elif layout.recompute == "full":
        all_of = layout.recompute_method == "uniform"
        count = f" of {layout.recompute_layers} layer{'s' * (layout.recompute_layers > 1)} per chunk"
        words.append("full recompute" + ("" if all_of else count))
    if layout.sharding != "zero1":
        words.append("no sharding" if layout.sharding == "none" else layout.sharding)
    return ", ".join(words)


def _best_with_other_degrees(result: SearchResult) -> int | None:
    """Return the best layout whose parallel degrees differ from those of the best layout overall."""
    best = result.best_per_degrees
    return int(best[1]) if len(best) > 1 else None


def _changes(job: PlannedJob) -> Iterator[tuple[str, Layout]]:
    x = job.layout
    for key in ("tp", "pp", "cp", "ep"):
        twice = getattr(x, key) * 2
        sp = x.sp or key == "tp"
        if key != "ep" or job.model.is_moe:
            yield f"{key} {twice}", x.replace(**{key: twice}, sp=sp)
    if x.mbs % 2 == 0:
        yield f"mbs {x.mbs // 2}", x.replace(mbs=x.mbs // 2)
    for level in SHARDINGS[SHARDINGS.index(x.sharding) + 1 :] if x.pp == 1 else ():
        if level in MEGATRON_FSDP and job.task != "pretrain":  # Megatron-FSDP cannot start from pretrained weights
            continue
        yield f"{level} (unmeasured)" if level in MEGATRON_FSDP else level, x.replace(sharding=level)
    if x.recompute != "full":
        for module in ("layernorm", "mlp", "moe_act", "moe", "mla_up_proj"):
            changed = x.replace(recompute="selective", recompute_modules=(module,))
            yield f"recomputing {module}", changed
    if x.recompute != "full":
        for layers in (1, 2, 4, 8):
            changed = x.replace(recompute="full", recompute_method="block", recompute_layers=layers)
            yield f"full recompute of {layers} layer{'s' * (layers > 1)} per chunk", changed
        yield "full recompute", x.replace(recompute="full", recompute_method="uniform", recompute_layers=1)


def _reversals(job: PlannedJob) -> Iterator[tuple[str, Layout]]:
    """Yield the changes that save time at the cost of memory."""
    x = job.layout
    for key in ("tp", "pp", "cp", "ep"):
        if (degree := getattr(x, key)) % 2 == 0:
            halved = x.replace(**{key: degree // 2})
            if key == "tp" and degree == 2:
                halved = halved.replace(sp=False)
            if key == "pp" and degree == 2:
                halved = halved.replace(vp=None)
            yield f"{key} {degree // 2}", halved
    if x.pp > 1:
        yield from ((f"vp {v}", x.replace(vp=v)) for v in (2, 3, 4, 5, 6, 8, 10) if v != x.vp)
    yield f"mbs {x.mbs * 2}", x.replace(mbs=x.mbs * 2)
    if x.recompute != "none":
        yield "no recomputation", x.replace(recompute="none")
    if x.sharding in MEGATRON_FSDP:
        yield "zero1", x.replace(sharding="zero1")


def _options(job: PlannedJob) -> Iterator[tuple[str, Options]]:
    if job.options.moments == "fp32" and job.task != "lora":
        yield "BF16 moments", replace(job.options, moments="bf16")
    if job.options.offload < 1 and job.task != "lora":
        yield "the optimizer in host memory", replace(job.options, offload=1.0)
