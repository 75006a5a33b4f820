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
    "the prediction for Megatron-FSDP (zero2, zero3) is not validated by measured runs: test it on a few nodes first"
)
MAX_NEAR_MISSES = 3


def bound(prediction: Prediction) -> str:
    """Name the two largest terms of the step time and their shares; terms below 2 % are omitted."""
    seconds = prediction.step_time_s or 1.0
    shares = sorted(((value / seconds, key) for key, value in prediction.terms_s.items()), reverse=True)[:2]
    (first, *second) = [f"{BOUNDS.get(key, key)}, {share:.0%}" for share, key in shares if share >= 0.02] or ["nothing"]
    return f"bound by {first} of the step" + "".join(f"; then {term}" for term in second)


def _allocation_warnings(result: SearchResult, i: int) -> list[str]:
    """Return a warning if, by a user's calibration, the i-th layout is a pipeline slowed down by allocation retries."""
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
    """Return lines about the i-th layout of a search: bottleneck, free memory, pipeline stages, next best layout."""
    job = result.job_at(i)
    prediction = prediction or predict.one(job)
    free_gib, usable_gib = (result.cap - result.reserved[i]) / GIB, result.cap / GIB
    prefix = "tight: " if result.tight[i] else ""
    headroom = f"{free_gib:.1f} of {usable_gib:.1f} GiB usable memory are free on the rank with the highest memory use"
    if free_gib < 0:
        headroom = f"one rank reserves {-free_gib:.1f} GiB more than the {usable_gib:.1f} GiB of usable memory"
    lines = [bound(prediction), f"{prefix}{headroom}"]
    lines += _allocation_warnings(result, i)
    if job.layout.sharding in MEGATRON_FSDP:
        lines.append(UNMEASURED_NOTE)
    if job.model.approximate:
        lines.append(f"this model is planned approximately: {job.model.approximate}")
    if job.layout.pp > 1:
        lines.append(pipeline(job))
    lines += pipeline_layout_lines(job)
    lines.append(f"to plan only this layout: --layout {option_syntax.format_layout(job.layout)}")
    if i == result.ranked[0]:
        lines += _compare_with_next(result, i)
    return lines


def _compare_with_next(result: SearchResult, i: int) -> list[str]:
    """Compare the best layout, the i-th, with the next one that has other parallel degrees.

    [] if there is none, or if it is faster and ranks lower only because it is tight.
    """
    best = result.best_per_degrees
    if len(best) == 1:
        return []
    other = int(best[1])
    slowdown = result.seconds[other] / result.seconds[i] - 1
    if slowdown < 0 and result.tight[other]:
        return []
    name = result.layout(other).short()
    return [f"the next layout with different parallel degrees, {name}, is {max(0.0, slowdown):.1%} slower"]


def pipeline(job: PlannedJob) -> str:
    """Describe the pipeline bubble, relative to the ideal and to the total time, and the imbalance of the stages."""
    p, v, m = job.layout.pp, job.layout.vp or 1, job.micro_batches
    chunks = [len(r) for r in job.split.chunk_layers(job.model.layers)]
    per_rank = [sum(chunks[rank::p]) for rank in range(p)]
    uneven = max(per_rank) * p / sum(per_rank) - 1
    return (
        f"the pipeline bubble is {(p - 1) / (v * m):.1%} of the ideal time, {(p - 1) / (v * m + p - 1):.1%} of the "
        f"total time; the largest stage has {uneven:.1%} more layers than the mean"
    )


def pipeline_layout_lines(job: PlannedJob) -> list[str]:
    """Return a line with Megatron's option for uneven pipeline stages; [] if the stages are even."""
    if not pipeline_layout.is_uneven(job):
        return []
    option = f"--pipeline-model-parallel-layout '{pipeline_layout.from_job(job)}'"
    return [f"the layers of each stage in Megatron's syntax: {option}"]


def faster_layouts(result: SearchResult) -> list[str]:
    """Describe layouts that would be faster than the best: the fastest tight one, and some that do not fit."""
    if not len(result.ranked):
        return []
    return _faster_tight(result) + near_misses(result)


def _is_faster(result: SearchResult) -> Flags:
    """Return, for each layout, whether its step is over 0.5 % shorter than that of the best layout that fits."""
    return result.seconds < 0.995 * result.seconds[result.ranked[0]]


def _faster_tight(result: SearchResult) -> list[str]:
    """Describe the fastest tight layout if it is faster than the best one; [] if there is none or the best is tight."""
    best = result.ranked[0]
    candidates = np.flatnonzero(result.tight & _is_faster(result))
    if result.tight[best] or not len(candidates):
        return []
    i = int(candidates[np.argmin(result.seconds[candidates])])
    free_gib, usable_gib = (result.cap - result.reserved[i]) / GIB, result.cap / GIB
    headroom = f"only {free_gib:.2f} of {usable_gib:.1f} GiB are free, less than {MARGIN:.1%}"
    if free_gib < 0:
        headroom = (
            f"it reserves {-free_gib:.2f} GiB more than the usable {usable_gib:.1f} GiB, and runs only without "
            "fragmentation"
        )
    layout = result.layout(i)
    gain = 1 - result.seconds[i] / result.seconds[best]
    return [
        f"{title(layout)} would be {gain:.1%} faster, but is tight: {headroom}; to plan it: "
        f"--layout {option_syntax.format_layout(layout)}"
    ]


def near_misses(result: SearchResult) -> list[str]:
    """Describe up to MAX_NEAR_MISSES layouts that would be faster than the best one but exceed the memory limit."""
    best = result.seconds[result.ranked[0]]
    candidates = np.flatnonzero((result.fit == memory.TOO_LARGE) & _is_faster(result))
    lines: list[str] = []
    shown: set[tuple[int, ...]] = set()
    # Sort by memory relative to the limit plus time relative to the best, so that fast near-fits come first.
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
        if len(lines) == MAX_NEAR_MISSES:
            break
    return lines


def title(layout: Layout) -> str:
    """Format a layout for messages, such as `TP4 PP8 VP2 SP, mbs 1, full recompute, zero3`."""
    words = [layout.short(), f"mbs {layout.mbs}"]
    ends = ["embedding"] * layout.embedding_as_layer + ["loss"] * layout.loss_as_layer
    if ends:
        words.append(f"{' and '.join(ends)} as layer{'s' * (len(ends) > 1)}")
    if layout.chunks is not None:
        words.append("uneven stages")
    if layout.recompute == "selective":
        words.append("recompute " + "+".join(layout.recompute_modules))
    elif layout.recompute == "full":
        words.append("full recompute")
        if layout.recompute_method == "block":
            words[-1] += f" of {layout.recompute_layers} layer{'s' * (layout.recompute_layers > 1)} per chunk"
    if layout.sharding != "zero1":
        words.append("no sharding" if layout.sharding == "none" else layout.sharding)
    return ", ".join(words)
