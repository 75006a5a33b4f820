"""A recorded step held against the usual bounds, and the three things to change next, the most seconds first.

The bounds are rules of thumb of this project for dense training on NVLink machines, not measurements: past one, a step
is worth a look. Where a plan is at hand, it says what the layout itself makes usual.
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
CURES = {
    "tp": "tp_comm_overlap hides it under products (the recipes set it where Transformer Engine can); or a lower tp, "
    "and tp inside one NVLink domain",
    "cp": "a lower cp, or cp inside one NVLink domain",
    "ep": "DeepEP instead of NCCL's all-to-all, ep inside one NVLink domain, or balanced experts",
    "dp": "overlap_grad_reduce and overlap_param_gather, a larger batch a step, or fewer and larger buckets",
    "pp": "more micro-batches a step, a higher vp, or stages of more even work: the ranks wait for the slowest",
    "": "which collective it is stands among the top kernels; overlap it, or keep its group inside an NVLink domain",
}


@dataclass(frozen=True)
class Bound:
    """One figure beside what is usual."""

    name: str
    value: float | None
    """a share, 0 to 1; None = not measured"""
    usual: str
    fine: bool | None
    """None = not measured"""
    words: str
    """what it means, or why it was not measured"""


@dataclass(frozen=True)
class Change:
    """One thing to change."""

    what: str
    seconds: float
    """of a step, that lie beyond the usual bound: what it can give at most"""
    why: str
    how: str


def bounds(recording: Recording, sums: TimeBreakdown) -> list[Bound]:
    """The usual bounds of a step on a GPU; [] for CPUs, of which they say nothing."""
    if not recording.on_gpu:
        return []
    share = {name: seconds / sums.seconds for name, seconds in sums.classes.items()} if sums.seconds else {}
    hbm = hbm_share(recording.counters)
    no_grid = "the file has no grids of kernels"
    no_counter = "no counters in the file: nsys profile --gpu-metrics-devices, or dcgm's PROF_DRAM_ACTIVE, measure it"
    return [
        _low("GPU busy", sums.busy, 0.95, "some kernel or copy ran; the rest is launch gaps and idle"),
        _low(
            "SMs that have blocks",
            sums.sm_busy,
            0.80,
            no_grid if sums.sm_busy is None else "by grid sizes, a bound from above; low = kernels too small: more mbs",
        ),
        _low(
            "Tensor Cores in products",
            sums.tensor_share,
            0.95,
            "and attention, by kernel names; FP32 and odd shapes run on plain CUDA cores",
        ),
        _low(
            "Tensor Cores in the step",
            sums.tensor_busy,
            0.60,
            "by kernel names: the time of these kernels, not how full their pipes are",
        ),
        Bound(
            "HBM bandwidth",
            hbm,
            f"below {FULL_HBM:.0%}",
            None if hbm is None else hbm < FULL_HBM,
            no_counter
            if hbm is None
            else "reads and writes, by the hardware's counters; more = memory bounds the step",
        ),
        _high("communication, exposed", share.get("communication", 0.0), EXPOSED, "not hidden by computation"),
        _high("launch gaps", share.get("gaps", 0.0), GAPS, "the GPU waits for the host to launch its next kernel"),
        _high("idle", share.get("idle", 0.0), IDLE, "nothing ran, and no launch was late: the host or another rank"),
    ]


EXPOSED, GAPS, IDLE, COPIES, SMALL, NORMS, OPTIMIZER = 0.10, 0.03, 0.03, 0.02, 0.20, 0.06, 0.08
"""Shares of a step that are usual at most."""
FULL_HBM = 0.80
"""Of HBM's bandwidth: hardly any kernel gets more."""


def _low(name: str, value: float | None, least: float, words: str) -> Bound:
    return Bound(name, value, f"from {least:.0%}", None if value is None else value >= least, words)


def _high(name: str, value: float, most: float, words: str) -> Bound:
    return Bound(name, value, f"to {most:.0%}", value <= most, words)


def changes(
    recording: Recording, sums: TimeBreakdown, planned: Mapping[str, float] | None = None, most: int = 3
) -> list[Change]:
    """What to change next: those beyond their bounds first, by seconds; then the largest that are within.

    `planned` are the planner's terms of the step. [] for CPUs.
    """
    if not recording.on_gpu or sums.seconds <= 0:
        return []
    one = sums.seconds / max(1, sums.steps)
    tried = [*_communication(sums, planned or {}, one), *_others(recording, sums, one)]
    beyond = sorted((c for c in tried if c.seconds > 0.001 * one), key=lambda c: -c.seconds)
    within = [c for c in tried if c not in beyond]
    return [*beyond, *within][:most]


def _communication(sums: TimeBreakdown, planned: Mapping[str, float], one: float) -> Iterator[Change]:
    steps = max(1, sums.steps)
    total = sum(sums.exposed.values()) or 1.0
    for group, seconds in sorted(sums.exposed.items(), key=lambda item: -item[1]):
        per_step = seconds / steps
        usual = EXPOSED * one * seconds / total
        words = f"{EXPOSED:.0%} for all communication is usual"
        names = ("pp_p2p", "pp_bubble") if group == "pp" else (group,)
        if planned and group:
            usual = max(usual, sum(planned.get(name, 0.0) for name in names))
            words = f"planned {_ms(sum(planned.get(name, 0.0) for name in names))}"
        why = f"{_ms(per_step)} a step, {per_step / one:.0%}, is {GROUP_WORDS[group]} that nothing hides; {words}"
        yield Change(f"hide {GROUP_WORDS[group]}", max(0.0, per_step - usual), why, CURES[group])


def _others(recording: Recording, sums: TimeBreakdown, one: float) -> Iterator[Change]:
    steps = max(1, sums.steps)
    per_step = {name: seconds / steps for name, seconds in sums.classes.items()}
    longest = sums.gaps[0] if sums.gaps else None
    did = (
        f"; in the longest gap, {longest.seconds * 1e3:.1f} ms, the host was in {longest.host or 'nothing recorded'}"
        if longest
        else ""
    )
    yield _class(
        "launch faster", per_step["gaps"], GAPS, one, "the GPU waits for launches",
        "a larger micro-batch, with=cuda_graphs for dense models, or fewer and fused kernels; and no other work on the "
        "host's cores",
    )  # fmt: skip
    yield _class(
        "keep the GPU fed", per_step["idle"], IDLE, one, f"nothing runs{did}",
        "look at what the host does then: data.num_workers for the loader; .item(), logging and checkpoints wait for "
        "the GPU; in a pipeline it is the bubble",
    )  # fmt: skip
    lost = (1 - (sums.tensor_share if sums.tensor_share is not None else 1.0)) * (
        per_step["products"] + per_step["attention"]
    )
    slow = next((top for top in sums.top if top.kind in ("products", "attention") and not top.tensor_cores), None)
    usual = 0.05 * (per_step["products"] + per_step["attention"])
    why = f"{_ms(lost)} a step of products and attention are not on Tensor Cores, by their names"
    yield Change(
        "bring products onto Tensor Cores", max(0.0, lost - usual),
        why + (f"; the largest is {slow.name[:60]}" if slow else ""),
        "BF16 or FP8 inputs, sizes that 16 divides, a padded vocabulary, and the fused or flash attention",
    )  # fmt: skip
    yield _class(
        "fuse small operations", per_step["elementwise"], SMALL, one, "elementwise and other kernels, bound by HBM",
        "the fusions of fusions.py (bias, SwiGLU, RoPE, cross entropy), a lower recomputation, and FP8's casts "
        "fused into the norms",
    )  # fmt: skip
    yield _class(
        "shorten norms", per_step["norms"], NORMS, one, "norms, bound by HBM",
        "Transformer Engine's fused norm and linear layer, and sequence parallelism where tp > 1",
    )  # fmt: skip
    yield _class(
        "shorten the optimizer step", per_step["optimizer"], OPTIMIZER, one, "the optimizer, bound by HBM",
        "the distributed optimizer over more data-parallel ranks, or a larger batch a step",
    )  # fmt: skip
    yield _class(
        "hide copies", per_step["copies"], COPIES, one, "copies that nothing hides",
        "pinned memory in the loader, and no offloading where memory allows",
    )  # fmt: skip
    if (hbm := hbm_share(recording.counters)) is not None and hbm > FULL_HBM:
        why = f"HBM is at {hbm:.0%} of its bandwidth; {FULL_HBM:.0%} and more bounds a step"
        yield Change("move fewer bytes", (hbm - FULL_HBM) * one, why, "FP8, fusions, and less recomputation")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def _class(what: str, seconds: float, most: float, one: float, words: str, how: str) -> Change:
    why = f"{_ms(seconds)} a step, {seconds / one:.0%}: {words}; up to {most:.0%} is usual"
    return Change(what, max(0.0, seconds - most * one), why, how)
