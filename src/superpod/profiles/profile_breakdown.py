"""Divide the time of recorded steps into classes: every moment belongs to one class, so they add up to the total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from superpod.profiles.profile_classes import CLASSES, uses_tensor_cores
from superpod.profiles.profile_recording import GROUPS, Recording, Work

SMALL_NS = 10_000
"""A shorter gap is a launch gap even if the launch time of the next work item is unknown."""
LONG_NS = 1_000_000
"""A longer gap is not a launch gap: the host was busy, or the GPU waited for other ranks."""
MAX_GAPS = 3
"""Number of the longest gaps to list."""


@dataclass(frozen=True)
class Top:
    """All kernels, or operations on CPUs, with the same name in all steps."""

    name: str
    kind: str
    """One of `CLASSES`."""
    seconds: float
    """Sum of the durations, which may overlap with other work."""
    calls: int | None
    """None on CPUs, where an operation is split into the pieces between nested operations."""
    tensor_cores: bool
    """Whether it is a GEMM or attention kernel on Tensor Cores."""


@dataclass(frozen=True)
class Gap:
    """An interval in which nothing ran on the GPU."""

    seconds: float
    at_s: float
    """Seconds from the start of the first step to the start of the gap."""
    host: str
    """Activity of the host during most of the gap; "" = none was recorded."""


@dataclass(frozen=True)
class TimeBreakdown:
    """The time of all recorded steps, divided into classes."""

    seconds: float
    """Time from the start of the first step to the end of the last."""
    steps: int
    """Number of steps; 0 = unknown."""
    classes: dict[str, float]
    """{class: seconds}; the values add up to `seconds`."""
    exposed: dict[str, float]
    """{tp, cp, ep, dp, pp or "" for unknown: seconds of communication that does not overlap with computation}."""
    hidden_s: float
    """Seconds of communication that overlaps with computation; not part of `seconds`."""
    tensor_share: float | None
    """Share of the time of GEMMs and attention on Tensor Cores, by kernel names; None = CPUs, or neither ran."""
    tensor_busy: float | None
    """Share of the time in which a kernel ran on Tensor Cores; None on CPUs."""
    busy: float
    """Share of the time in which anything ran."""
    sm_busy: float | None
    """Mean share of the SMs that the thread blocks could fill; None = the file has no grid sizes."""
    top: tuple[Top, ...]
    """The kernels or operations with the largest total times."""
    gaps: tuple[Gap, ...]
    """The longest gaps that are not launch gaps."""
    late_s: float
    """Seconds of work outside the profiled steps, which is not counted."""


def break_down(recording: Recording, max_names: int = 10) -> TimeBreakdown:
    """Divide the time of a recording into classes; `top` of the result has at most `max_names` entries."""
    begin, end = recording.begin, recording.end
    work, outside_ns = _clip(recording.work, begin, end)

    # Add the classes one by one to the union of intervals: the time of a class is the growth of the union.
    covered_before_ns, classes, exposed_s = 0, {}, {}
    so_far = np.zeros(len(work), dtype=bool)
    for kind in CLASSES[:-2]:
        is_kind = work.kind == CLASSES.index(kind)
        if kind == "communication":
            exposed_s = _exposed_by_group(work, so_far, is_kind, covered_before_ns)
        so_far |= is_kind
        total_ns = covered_ns(work.start[so_far], work.end[so_far])
        classes[kind] = (total_ns - covered_before_ns) / 1e9
        covered_before_ns = total_ns

    gaps = _find_gaps(work, begin, end)
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
        busy=covered_before_ns / max(1, end - begin),
        sm_busy=_sm_busy(work, begin, end),
        top=_sum_by_name(recording, work, max_names),
        gaps=_longest_gaps(recording, gaps, ~is_launch),
        late_s=outside_ns / 1e9,
    )


def covered_ns(start: Any, end: Any) -> int:
    """Return the number of nanoseconds in the union of intervals with these starts and ends."""
    merged_intervals = union(start, end)
    return int((merged_intervals[1] - merged_intervals[0]).sum())


def union(start: Any, end: Any) -> tuple[Any, Any]:
    """Return the union of intervals as (starts, ends) of sorted, disjoint intervals."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return start[first], reach[np.concatenate([first[1:] - 1, [len(reach) - 1]])]


def _clip(work: Work, begin: int, end: int) -> tuple[Work, int]:
    """Return the work items clipped to the interval from `begin` to `end`, and their nanoseconds outside of it."""
    start, stop = np.clip(work.start, begin, end), np.clip(work.end, begin, end)
    outside_ns = int((work.end - work.start).sum() - (stop - start).sum())
    columns: tuple[Any, ...] = (start, stop, work.name, work.kind, work.group, work.launched, work.sms)
    is_inside = stop > start
    return Work(*(column[is_inside] for column in columns)), outside_ns


def _exposed_by_group(work: Work, before: Any, communication: Any, covered_total_ns: int) -> dict[str, float]:
    """Return {group: seconds of exposed communication}; at each moment, the first group in `GROUPS` counts.

    `before` and `communication` are masks of the work items of the preceding classes, which cover `covered_total_ns`,
    and of those that communicate.
    """
    so_far, seconds = before.copy(), {}
    for group in (*GROUPS[1:], ""):
        so_far |= communication & (work.group == GROUPS.index(group))
        total_ns = covered_ns(work.start[so_far], work.end[so_far])
        if total_ns > covered_total_ns:
            seconds[group] = (total_ns - covered_total_ns) / 1e9
        covered_total_ns = total_ns
    return seconds


def _find_gaps(work: Work, begin: int, end: int) -> tuple[Any, Any]:
    """Return the starts and ends of the intervals from `begin` to `end` in which nothing ran."""
    start, stop = union(work.start, work.end)
    edges = np.concatenate([[begin], stop]), np.concatenate([start, [end]])
    is_gap = edges[1] > edges[0]
    return edges[0][is_gap].astype(np.int64), edges[1][is_gap].astype(np.int64)


def _is_launch_gap(work: Work, gaps: tuple[Any, Any]) -> Any:
    """Return a mask of the launch gaps: the next work item was launched after the gap had begun, or is unknown."""
    order = np.argsort(work.start, kind="stable")
    index = np.minimum(np.searchsorted(work.start[order], gaps[1]), max(0, len(order) - 1))
    launched = work.launched[order][index] if len(order) else np.zeros(0)
    length = gaps[1] - gaps[0]
    return (length < SMALL_NS) | ((launched >= gaps[0]) & (length < LONG_NS))


def _tensor_core_shares(recording: Recording, work: Work) -> dict[str, float | None]:
    """Return `tensor_share` and `tensor_busy` of a breakdown."""
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
    """Return the mean share of the SMs in use between `begin` and `end`, or None if no grid size is known.

    At each moment, the running kernel with the largest grid counts. This is an upper bound, like "Est. SM Efficiency"
    in PyTorch's TensorBoard plugin (torch-tb-profiler).
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


def _sum_by_name(recording: Recording, work: Work, max_names: int) -> tuple[Top, ...]:
    """Return the kernels or operations with the largest total times, at most `max_names`."""
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
    """Return the longest gaps among those in `mask`, with the activity of the host."""
    start, end = gaps[0][mask], gaps[1][mask]
    order = np.argsort(start - end, kind="stable")[:MAX_GAPS]
    return tuple(
        Gap((end[i] - start[i]) / 1e9, (start[i] - recording.begin) / 1e9, _host_activity(recording, start[i], end[i]))
        for i in order.tolist()
        if end[i] - start[i] >= LONG_NS
    )


def _host_activity(recording: Recording, start: int, end: int) -> str:
    """Return the name of the shortest host activity that covers at least half of an interval; "" if there is none."""
    host = recording.host
    overlap = np.minimum(host.end, end) - np.maximum(host.start, start)
    candidates = np.flatnonzero(overlap * 2 >= end - start)
    if not len(candidates):
        return ""
    shortest = candidates[np.argmin((host.end - host.start)[candidates])]
    return recording.names[int(host.name[shortest])]
