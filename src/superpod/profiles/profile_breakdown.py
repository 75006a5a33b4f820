"""Breakdown of the time of recorded steps: every moment belongs to one class, so the classes add up to the total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from superpod.profiles.profile_classes import CLASSES, uses_tensor_cores
from superpod.profiles.profile_recording import GROUPS, Recording, Work

SMALL_NS = 10_000
"""Shorter gaps count as launch gaps even if the launch time of the next work item is unknown."""
LONG_NS = 1_000_000
"""Longer gaps are not slow launches: the host did something else, or the GPU waited for other ranks."""
MAX_GAPS = 3
"""Number of the longest gaps to list."""


@dataclass(frozen=True)
class Top:
    """The time in all steps of the kernels, or of the operations on CPUs, that have the same name."""

    name: str
    kind: str
    seconds: float
    """sum of the durations, which may overlap with other work"""
    calls: int | None
    """None on CPUs, where an operation is split into the pieces between nested operations"""
    tensor_cores: bool


@dataclass(frozen=True)
class Gap:
    """An interval in which nothing ran."""

    seconds: float
    at_s: float
    """from the start of the first step"""
    host: str
    """host activity during most of it; "" = none was recorded"""


@dataclass(frozen=True)
class TimeBreakdown:
    """Times of all recorded steps, in seconds."""

    seconds: float
    """from the start of the first step to the end of the last"""
    steps: int
    """0 = unknown"""
    classes: dict[str, float]
    """class -> seconds; they add up to `seconds`"""
    exposed: dict[str, float]
    """tp, cp, ep, dp, pp or "" (unknown) -> seconds of communication not overlapped with computation"""
    hidden_s: float
    """communication overlapped with computation; not part of `seconds`"""
    tensor_share: float | None
    """share of the time of GEMMs and attention on Tensor Cores, based on kernel names; None = CPUs, or neither ran"""
    tensor_busy: float | None
    """share of the time in which a kernel ran on Tensor Cores"""
    busy: float
    """share of the time in which anything ran"""
    sm_busy: float | None
    """mean share of the SMs that the thread blocks could fill; None = the file has no grid sizes"""
    top: tuple[Top, ...]
    gaps: tuple[Gap, ...]
    """the longest ones"""
    late_s: float
    """time outside the profiled steps, which is not counted"""


def break_down(recording: Recording, max_names: int = 10) -> TimeBreakdown:
    """Break down the time of a recording; `top` has at most `max_names` entries."""
    begin, end = recording.begin, recording.end
    work, outside_ns = _clip(recording.work, begin, end)

    # Add the classes one by one to the union of intervals: the time of a class is the growth of the union.
    covered_before, classes, exposed_s = 0, {}, {}
    so_far = np.zeros(len(work), dtype=bool)
    for kind in CLASSES[:-2]:
        is_kind = work.kind == CLASSES.index(kind)
        if kind == "communication":
            exposed_s = _exposed_by_group(work, so_far, is_kind, covered_before)
        so_far |= is_kind
        total = covered_ns(work.start[so_far], work.end[so_far])
        classes[kind] = (total - covered_before) / 1e9
        covered_before = total

    gaps = _gaps(work, begin, end)
    is_launch = _is_launch_gap(work, gaps) if recording.on_gpu else np.zeros(len(gaps[0]), dtype=bool)
    lengths = gaps[1] - gaps[0]
    classes["gaps"] = int(lengths[is_launch].sum()) / 1e9
    classes["idle"] = int(lengths[~is_launch].sum()) / 1e9

    communication = work.kind == CLASSES.index("communication")
    communication_s = covered_ns(work.start[communication], work.end[communication]) / 1e9
    return TimeBreakdown(
        seconds=(end - begin) / 1e9,
        steps=recording.steps,
        classes=classes,
        exposed=exposed_s,
        hidden_s=communication_s - classes["communication"],
        **_tensor_core_shares(recording, work),
        busy=covered_before / max(1, end - begin),
        sm_busy=_sm_busy(work, begin, end),
        top=_top(recording, work, max_names),
        gaps=_longest_gaps(recording, gaps, ~is_launch),
        late_s=outside_ns / 1e9,
    )


def covered_ns(start: Any, end: Any) -> int:
    """Return the number of nanoseconds covered by the union of intervals."""
    merged_intervals = union(start, end)
    return int((merged_intervals[1] - merged_intervals[0]).sum())


def union(start: Any, end: Any) -> tuple[Any, Any]:
    """Return the union of intervals as sorted, disjoint intervals."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return start[first], reach[np.concatenate([first[1:] - 1, [len(reach) - 1]])]


def _clip(work: Work, begin: int, end: int) -> tuple[Work, int]:
    """Return the kernels and operations clipped to the steps, and their nanoseconds outside the steps."""
    start, stop = np.clip(work.start, begin, end), np.clip(work.end, begin, end)
    outside_ns = int((work.end - work.start).sum() - (stop - start).sum())
    is_inside = stop > start
    names, kinds, groups = work.name[is_inside], work.kind[is_inside], work.group[is_inside]
    clipped_work = Work(
        start[is_inside], stop[is_inside], names, kinds, groups, work.launched[is_inside], work.sms[is_inside]
    )
    return clipped_work, outside_ns


def _exposed_by_group(work: Work, before: Any, communication: Any, covered_total: int) -> dict[str, float]:
    """Exposed communication per process group; if two groups communicate at once, the first in GROUPS counts."""
    so_far, seconds = before.copy(), {}
    for group in (*GROUPS[1:], ""):
        so_far |= communication & (work.group == GROUPS.index(group))
        total = covered_ns(work.start[so_far], work.end[so_far])
        if total > covered_total:
            seconds[group] = (total - covered_total) / 1e9
        covered_total = total
    return seconds


def _gaps(work: Work, begin: int, end: int) -> tuple[Any, Any]:
    start, stop = union(work.start, work.end)
    edges = np.concatenate([[begin], stop]), np.concatenate([start, [end]])
    is_gap = edges[1] > edges[0]
    return edges[0][is_gap].astype(np.int64), edges[1][is_gap].astype(np.int64)


def _is_launch_gap(work: Work, gaps: tuple[Any, Any]) -> Any:
    """Return for each gap whether it is due to a late launch: the next work item was launched after the gap began."""
    order = np.argsort(work.start, kind="stable")
    index = np.minimum(np.searchsorted(work.start[order], gaps[1]), max(0, len(order) - 1))
    launched = work.launched[order][index] if len(order) else np.zeros(0)
    length = gaps[1] - gaps[0]
    return (length < SMALL_NS) | ((launched >= gaps[0]) & (length < LONG_NS))


def _tensor_core_shares(recording: Recording, work: Work) -> dict[str, float | None]:
    if not recording.on_gpu:
        return {"tensor_share": None, "tensor_busy": None}
    length = (work.end - work.start).astype(np.float64)
    is_heavy = (work.kind == CLASSES.index("products")) | (work.kind == CLASSES.index("attention"))
    on_tensor = np.array([uses_tensor_cores(name) for name in recording.names], dtype=bool)[work.name] & is_heavy
    heavy_ns = float(length[is_heavy].sum())
    span = max(1, recording.end - recording.begin)
    busy_fraction = covered_ns(work.start[on_tensor], work.end[on_tensor]) / span
    return {
        "tensor_share": float(length[on_tensor].sum()) / heavy_ns if heavy_ns else None,
        "tensor_busy": busy_fraction,
    }


def _sm_busy(work: Work, begin: int, end: int) -> float | None:
    """Mean share of the SMs in use, where at each moment the running kernel with the largest grid counts.

    This is an upper bound, estimated as "Est. SM Efficiency" in PyTorch's TensorBoard plugin (torch-tb-profiler).
    """
    is_known = ~np.isnan(work.sms)
    if not is_known.any():
        return None
    covered_until, total = 0, 0.0
    levels = np.unique(np.round(work.sms[is_known], 2))[::-1]  # at most 101
    shares = np.round(work.sms, 2)
    for level in levels:
        wide = is_known & (shares >= level)
        reach = covered_ns(work.start[wide], work.end[wide])
        total += (reach - covered_until) * float(level)
        covered_until = reach
    return total / max(1, end - begin)


def _top(recording: Recording, work: Work, max_names: int) -> tuple[Top, ...]:
    length = (work.end - work.start).astype(np.float64)
    keys, which = np.unique(work.name.astype(np.int64) * len(CLASSES) + work.kind, return_inverse=True)
    seconds = np.bincount(which, weights=length, minlength=len(keys)) / 1e9
    calls = np.bincount(which, minlength=len(keys))
    rows = []
    for i in np.argsort(-seconds, kind="stable")[:max_names].tolist():
        name, kind = recording.names[int(keys[i]) // len(CLASSES)], CLASSES[int(keys[i]) % len(CLASSES)]
        tensor = recording.on_gpu and kind in ("products", "attention") and uses_tensor_cores(name)
        rows.append(Top(name, kind, float(seconds[i]), int(calls[i]) if recording.on_gpu else None, tensor))
    return tuple(rows)


def _longest_gaps(recording: Recording, gaps: tuple[Any, Any], mask: Any) -> tuple[Gap, ...]:
    start, end = gaps[0][mask], gaps[1][mask]
    order = np.argsort(start - end, kind="stable")[:MAX_GAPS]
    return tuple(
        Gap((end[i] - start[i]) / 1e9, (start[i] - recording.begin) / 1e9, _host_activity(recording, start[i], end[i]))
        for i in order.tolist()
        if end[i] - start[i] >= LONG_NS
    )


def _host_activity(recording: Recording, start: int, end: int) -> str:
    """Return the shortest host activity that covers at least half of this interval."""
    host = recording.host
    shared = np.minimum(host.end, end) - np.maximum(host.start, start)
    inside_indices = np.flatnonzero(shared * 2 >= end - start)
    if not len(inside_indices):
        return ""
    shortest = inside_indices[np.argmin((host.end - host.start)[inside_indices])]
    return recording.names[int(host.name[shortest])]
