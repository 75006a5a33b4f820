"""Explain a plan in sentences: why a layout is the fastest, and its bottlenecks."""

from __future__ import annotations

import numpy as np

from superpod.planner import memory, predict, suggestions
from superpod.planner.arrays import Flags
from superpod.planner.calibration import corrections
from superpod.planner.formats import option_syntax
from superpod.planner.hardware import GIB
from superpod.planner.layout import MEGATRON_FSDP, Layout
from superpod.planner.memory.capacity import MARGIN
from superpod.planner.planned_job import PlannedJob
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


def bound(prediction: Prediction) -> str:
    """Name the two largest terms of the step time with their fractions; only one if no other takes 2 %."""
    seconds = prediction.step_time_s or 1.0
    shares = sorted(((value / seconds, key) for key, value in prediction.terms_s.items()), reverse=True)[:2]
    (first, *second) = [f"{BOUNDS.get(key, key)}, {share:.0%}" for share, key in shares if share >= 0.02] or ["nothing"]
    return f"bound by {first} of the step" + "".join(f"; then {words}" for words in second)


def _allocation_warnings(result: SearchResult, i: int) -> list[str]:
    """Return a warning if the i-th layout is a pipeline with allocation retries, according to a user's calibration."""
    gpu = result.job.node.gpu
    corrections_of_gpu = corrections.decode(gpu.calibrated_as)[1]
    seconds, level = corrections_of_gpu.get("alloc_retries", 0.0), corrections_of_gpu.get("full_from", 1.0)
    share = float(result.reserved[i]) / memory.usable(gpu)
    if result.layout(i).pp == 1 or not seconds or share < level:
        return []
    return [
        f"the rank with the highest memory use reserves {share:.0%} of its GPU; above {level:.0%}, a pipeline spends "
        f"{seconds:.2g} s per micro-batch on allocation retries (calibration): recompute more, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    ]


def explain_layout(result: SearchResult, i: int, prediction: Prediction | None = None) -> list[str]:
    """Explain the position of the i-th layout: bottleneck, memory headroom, stages, and the next layout."""
    prediction = prediction or predict.one(result.job_at(i))
    room = (result.cap - result.reserved[i]) / GIB
    prefix = "tight: " if result.tight[i] else ""
    headroom = (
        f"{room:.1f} of {result.cap / GIB:.1f} GiB usable memory are free on the rank with the highest memory use"
    )
    if room < 0:
        headroom = f"one rank reserves {-room:.1f} GiB more than the {result.cap / GIB:.1f} GiB of usable memory"
    lines = [bound(prediction), f"{prefix}{headroom}"]
    lines += _allocation_warnings(result, i)
    if result.layout(i).sharding in MEGATRON_FSDP:
        lines.append(UNMEASURED_NOTE)
    if approximate := result.job_at(i).model.approximate:
        lines.append(f"this model is planned approximately: {approximate}")
    layout = result.layout(i)
    if layout.pp > 1:
        lines.append(pipeline(result.job_at(i)))
    lines += pipeline_layout_lines(result.job_at(i))
    ranked_layouts = result.ranked
    lines.append(f"to plan only this layout: --layout {option_syntax.format_layout(layout)}")
    if i == ranked_layouts[0] and (other := _best_with_other_degrees(result)) is not None:
        lines += _compare_with_next(result, i, other)
    return lines


def _compare_with_next(result: SearchResult, i: int, other: int) -> list[str]:
    """Compare the i-th layout with the next one; [] if that is faster and ranks lower only because it is tight."""
    slowdown = result.seconds[other] / result.seconds[i] - 1
    if slowdown < 0 and result.tight[other]:
        return []
    name = result.layout(other).short()
    return [f"the next layout with different parallel degrees, {name}, is {max(0.0, slowdown):.1%} slower"]


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


def faster_layouts(result: SearchResult, count: int = 3) -> list[str]:
    """Describe layouts that would be faster than the best one: the fastest tight one, and `count` that do not fit."""
    if not len(result.ranked):
        return []
    return _faster_tight(result) + near_misses(result, count)


def _is_faster(result: SearchResult) -> Flags:
    """Whether each layout is faster than the best one by at least 0.5 %."""
    return result.seconds < 0.995 * result.seconds[result.ranked[0]]


def _faster_tight(result: SearchResult) -> list[str]:
    """Describe the fastest tight layout if it would be faster than the best one, which fits."""
    best = result.ranked[0]
    candidates = np.flatnonzero(result.tight & _is_faster(result))
    if result.tight[best] or not len(candidates):
        return []
    i = int(candidates[np.argmin(result.seconds[candidates])])
    room, cap = (result.cap - result.reserved[i]) / GIB, result.cap / GIB
    headroom = f"only {room:.2f} of {cap:.1f} GiB are free, less than {MARGIN:.1%}"
    if room < 0:
        headroom = f"it reserves {-room:.2f} GiB more than {cap:.1f} GiB, and runs only without fragmentation"
    layout = result.layout(i)
    gain = 1 - result.seconds[i] / result.seconds[best]
    return [
        f"{title(layout)} would be {gain:.1%} faster, but is tight: {headroom}; to plan it: "
        f"--layout {option_syntax.format_layout(layout)}"
    ]


def near_misses(result: SearchResult, count: int = 3) -> list[str]:
    """Describe layouts that would be faster than the best one but do not fit, and what would make each fit."""
    best = result.seconds[result.ranked[0]]
    candidates = np.flatnonzero((result.fit == memory.TOO_LARGE) & _is_faster(result))
    lines: list[str] = []
    shown: set[tuple[int, ...]] = set()
    # First those that almost fit and are fast.
    excess = result.reserved[candidates] / result.cap + result.seconds[candidates] / best
    for i in candidates[np.argsort(excess)]:
        job = result.job_at(int(i))
        degrees = (job.layout.tp, job.layout.pp, job.layout.ep)
        if degrees in shown:
            continue
        shown.add(degrees)
        gain = 1 - result.seconds[i] / best
        shortage = suggestions.describe_shortage(job, predict.one(job), "")
        lines.append(f"{title(job.layout)} would be {gain:.1%} faster, but is {shortage}")
        if len(lines) == count:
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
