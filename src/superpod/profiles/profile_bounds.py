"""Compare a recorded step with typical bounds, and suggest the three most effective changes.

The bounds are rules of thumb for dense training on NVLink machines, not measurements. A plan provides the expected
communication time of the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from superpod.profiles.profile_breakdown import TimeBreakdown
from superpod.profiles.profile_nsys import hbm_share
from superpod.profiles.profile_recording import Recording

GROUP_WORDS = {
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert dispatch",
    "dp": "data-parallel gradients and parameters",
    "pp": "pipeline sends and waits",
    "": "communication",
}
REMEDIES = {
    "tp": "tp_comm_overlap, which overlaps it with GEMMs (recipes set it where Transformer Engine supports it); or a "
    "lower tp, and tp inside one NVLink domain",
    "cp": "a lower cp, or cp inside one NVLink domain",
    "ep": "DeepEP instead of NCCL's all-to-all, ep inside one NVLink domain, or balanced experts",
    "dp": "overlap_grad_reduce and overlap_param_gather, a larger batch per step, or fewer and larger buckets",
    "pp": "more micro-batches per step, a higher vp, or balanced stages: the ranks wait for the slowest",
    "": "the top kernels show which collective it is; overlap it, or keep its group inside an NVLink domain",
}
EXPOSED, GAPS, IDLE, COPIES, SMALL, NORMS, OPTIMIZER = 0.10, 0.03, 0.03, 0.02, 0.20, 0.06, 0.08
"""Typical upper bounds of exposed communication and other classes of time, as shares of a step."""
FULL_HBM = 0.80
"""Share of the HBM bandwidth that few kernels exceed."""
NOT_ON_TENSOR_CORES = 0.05
"""Typical share of the time of GEMMs and attention that is not spent on Tensor Cores."""


@dataclass(frozen=True)
class Bound:
    """A measured share of the time or the bandwidth, and the limit that it usually stays below."""

    name: str
    value: float | None
    """The share, 0 to 1; None = not measured."""
    usual: str
    """The bound as text, such as `at most 10%`."""
    fine: bool | None
    """Whether the value is within the bound; None = not measured."""
    words: str
    """Meaning of the quantity, or the reason why it was not measured."""


@dataclass(frozen=True)
class Change:
    """A suggested change that makes steps faster."""

    what: str
    seconds: float
    """Time per step beyond the typical bound: the maximum that the change can save."""
    why: str
    """The measured time, and its typical bound."""
    how: str
    """Settings to change."""


def bounds(recording: Recording, breakdown: TimeBreakdown) -> list[Bound]:
    """Compare the steps of a recording with the typical bounds; [] for CPUs, to which the bounds do not apply."""
    if not recording.on_gpu:
        return []
    share = {}
    if breakdown.seconds:
        share = {name: seconds / breakdown.seconds for name, seconds in breakdown.classes.items()}
    return [
        _lower_bound("GPU busy", breakdown.busy, 0.95, "a kernel or copy ran; the rest is launch gaps and idle time"),
        _sm_bound(breakdown.sm_busy),
        _lower_bound(
            "Tensor Cores in GEMMs",
            breakdown.tensor_share,
            0.95,
            "and attention, according to kernel names; FP32 and odd shapes run on CUDA cores",
        ),
        _lower_bound(
            "Tensor Cores in the step",
            breakdown.tensor_busy,
            0.60,
            "according to kernel names: the time of these kernels, not the utilization of their pipelines",
        ),
        _hbm_bound(hbm_share(recording.counters)),
        _upper_bound("communication, exposed", share.get("communication", 0.0), EXPOSED, "not hidden by computation"),
        _upper_bound("launch gaps", share.get("gaps", 0.0), GAPS, "the GPU waits for the host to launch a kernel"),
        _upper_bound(
            "idle",
            share.get("idle", 0.0),
            IDLE,
            "nothing ran, but no launch was late: waiting for the host or other ranks",
        ),
    ]


def _sm_bound(value: float | None) -> Bound:
    meaning = "upper bound, based on grid sizes; low = kernels are too small: increase mbs"
    if value is None:
        meaning = "the file has no grid sizes"
    return _lower_bound("SMs that have blocks", value, 0.80, meaning)


def _hbm_bound(value: float | None) -> Bound:
    usual_text = f"below {FULL_HBM:.0%}"
    if value is None:
        note = "the file has no counters: use `nsys profile --gpu-metrics-devices`, or PROF_DRAM_ACTIVE of dcgm"
        return Bound("HBM bandwidth", None, usual_text, None, note)
    meaning = "reads and writes, from hardware counters; above it, the step is memory-bound"
    return Bound("HBM bandwidth", value, usual_text, value < FULL_HBM, meaning)


def _lower_bound(name: str, value: float | None, bound: float, meaning: str) -> Bound:
    return Bound(name, value, f"at least {bound:.0%}", None if value is None else value >= bound, meaning)


def _upper_bound(name: str, value: float, bound: float, meaning: str) -> Bound:
    return Bound(name, value, f"at most {bound:.0%}", value <= bound, meaning)


def changes(
    recording: Recording, breakdown: TimeBreakdown, planned: Mapping[str, float] | None = None, max_changes: int = 3
) -> list[Change]:
    """Return suggested changes: first those beyond their bounds, by the time that they can save, then the others.

    Args:
        recording: the recording; for CPUs, there are no changes.
        breakdown: the breakdown of its time.
        planned: planned seconds per step of each term, such as `tp`.
        max_changes: maximum number of changes.
    """
    if not recording.on_gpu or breakdown.seconds <= 0:
        return []
    step_s = breakdown.seconds / max(1, breakdown.steps)
    candidates = list(_communication_changes(breakdown, planned or {}, step_s))
    candidates += _other_changes(recording, breakdown, step_s)
    effective = [change for change in candidates if change.seconds > 0.001 * step_s]
    effective.sort(key=lambda change: -change.seconds)
    return [*effective, *(change for change in candidates if change not in effective)][:max_changes]


def _communication_changes(breakdown: TimeBreakdown, planned: Mapping[str, float], step_s: float) -> Iterator[Change]:
    steps = max(1, breakdown.steps)
    total = sum(breakdown.exposed.values()) or 1.0
    for group, seconds in sorted(breakdown.exposed.items(), key=lambda item: -item[1]):
        measured_s = seconds / steps
        usual_s = EXPOSED * step_s * seconds / total
        usual_text = f"typical for all communication: {EXPOSED:.0%}"
        if planned and group:
            terms = ("pp_p2p", "pp_bubble") if group == "pp" else (group,)
            planned_s = sum(planned.get(name, 0.0) for name in terms)
            usual_s = max(usual_s, planned_s)
            usual_text = f"planned {_ms(planned_s)}"
        name = GROUP_WORDS[group]
        why = f"{_ms(measured_s)} per step ({measured_s / step_s:.0%}) of exposed {name}; {usual_text}"
        yield Change(f"hide {name}", max(0.0, measured_s - usual_s), why, REMEDIES[group])


def _other_changes(recording: Recording, breakdown: TimeBreakdown, step_s: float) -> Iterator[Change]:
    steps = max(1, breakdown.steps)
    per_step = {name: seconds / steps for name, seconds in breakdown.classes.items()}
    idle_text = "nothing runs"
    if breakdown.gaps:
        longest_gap = breakdown.gaps[0]
        activity = longest_gap.host or "nothing recorded"
        idle_text += f"; in the longest gap, {longest_gap.seconds * 1e3:.1f} ms, the host was in {activity}"
    yield _class_change(
        "launch faster", per_step["gaps"], GAPS, step_s, "the GPU waits for launches",
        "a larger micro-batch, with=cuda_graphs for dense models, or fewer, fused kernels; and no other work on the "
        "cores of the host",
    )  # fmt: skip
    yield _class_change(
        "keep the GPU fed", per_step["idle"], IDLE, step_s, idle_text,
        "check what the host does at that time: for the data loader, increase data.num_workers; .item(), logging and "
        "checkpoints wait for the GPU; in a pipeline, it is the bubble",
    )  # fmt: skip
    yield _tensor_core_change(breakdown, per_step["products"] + per_step["attention"])
    yield _class_change(
        "fuse small operations", per_step["elementwise"], SMALL, step_s,
        "elementwise and other kernels, bound by HBM bandwidth",
        "the fusions in fusions.py (bias, SwiGLU, RoPE, cross entropy), less recomputation, and FP8 casts fused into "
        "the norms",
    )  # fmt: skip
    yield _class_change(
        "shorten norms", per_step["norms"], NORMS, step_s, "norms, bound by HBM bandwidth",
        "Transformer Engine's fused norm and linear layer, and sequence parallelism where tp > 1",
    )  # fmt: skip
    yield _class_change(
        "shorten the optimizer step", per_step["optimizer"], OPTIMIZER, step_s, "the optimizer, bound by HBM bandwidth",
        "the distributed optimizer over more data-parallel ranks, or a larger batch per step",
    )  # fmt: skip
    yield _class_change(
        "hide copies", per_step["copies"], COPIES, step_s, "exposed copies",
        "pinned memory in the data loader, and no offloading where memory allows",
    )  # fmt: skip
    hbm = hbm_share(recording.counters)
    if hbm is not None and hbm > FULL_HBM:
        why = f"HBM is at {hbm:.0%} of its bandwidth; above {FULL_HBM:.0%}, a step is memory-bound"
        yield Change("move fewer bytes", (hbm - FULL_HBM) * step_s, why, "FP8, fusions, and less recomputation")


def _tensor_core_change(breakdown: TimeBreakdown, heavy_s: float) -> Change:
    """Return the suggestion to move GEMMs to Tensor Cores; `heavy_s` is the time of GEMMs and attention per step."""
    share = breakdown.tensor_share if breakdown.tensor_share is not None else 1.0
    off_s = (1 - share) * heavy_s
    why = f"{_ms(off_s)} per step of GEMMs and attention are not on Tensor Cores, according to kernel names"
    slow_kernels = [top for top in breakdown.top if top.kind in ("products", "attention") and not top.tensor_cores]
    if slow_kernels:
        why += f"; the largest is {slow_kernels[0].name[:60]}"
    how = "BF16 or FP8 inputs, sizes divisible by 16, a padded vocabulary, and fused or flash attention"
    return Change("move GEMMs to Tensor Cores", max(0.0, off_s - NOT_ON_TENSOR_CORES * heavy_s), why, how)


def _class_change(what: str, seconds: float, bound: float, step_s: float, meaning: str, how: str) -> Change:
    """Return the suggestion for a class of time that takes `seconds` per step, with `bound` as a share of a step."""
    why = f"{_ms(seconds)} per step, {seconds / step_s:.0%}: {meaning}; up to {bound:.0%} is typical"
    return Change(what, max(0.0, seconds - bound * step_s), why, how)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
