"""Breakdown of the time of recorded steps: every moment belongs to one class, so the classes add up to the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from superpod.profiles.profile_classes import CLASSES, uses_tensor_cores
from superpod.profiles.profile_recording import GROUPS, Recording, Work

SMALL_NS = 10_000
"""A shorter gap counts as a launch gap if the launch time of the next work item is unknown."""
LONG_NS = 1_000_000
"""A longer gap is not a slow launch: the host did something else, or the GPU waited for other ranks."""
LONGEST_GAPS = 3
"""How many of the longest gaps are listed."""


@dataclass(frozen=True)
class Top:
    """All kernels, or operations on CPUs, of one name: their time in all steps."""

    name: str
    kind: str
    seconds: float
    """sum of the durations, which may overlap other work"""
    calls: int | None
    """None on CPUs, where an operation is split into pieces between nested ones"""
    tensor_cores: bool


@dataclass(frozen=True)
class Gap:
    """A time in which nothing ran."""

    seconds: float
    at_s: float
    """from the start of the first step"""
    host: str
    """host activity that covers most of it; "" = none recorded"""


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds of all recorded steps."""

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
    """share of the time of GEMMs and attention on Tensor Cores, by kernel names; None = CPUs, or neither"""
    tensor_busy: float | None
    """share of the steps in which such a kernel ran"""
    busy: float
    """share of the steps in which anything ran"""
    sm_busy: float | None
    """mean share of the SMs that blocks could fill; None = the file has no grid sizes"""
    top: tuple[Top, ...]
    gaps: tuple[Gap, ...]
    """the longest ones"""
    late_s: float
    """work outside the steps, which is not counted"""


def break_down(recording: Recording, most: int = 10) -> TimeBreakdown:
    """Break down the time of a recording; `top` has at most `most` names."""
    begin, end = recording.begin, recording.end
    work, outside_ns = _clip(recording.work, begin, end)

    # Add one class after the other to the union of intervals: its time is by how much the union grows.
    covered, classes, exposed = 0, {}, {}
    so_far = np.zeros(len(work), dtype=bool)
    for kind in CLASSES[:-2]:
        is_kind = work.kind == CLASSES.index(kind)
        if kind == "communication":
            exposed = _exposed_by_group(work, so_far, is_kind, covered)
        so_far |= is_kind
        total = covered_ns(work.start[so_far], work.end[so_far])
        classes[kind] = (total - covered) / 1e9
        covered = total

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
        exposed=exposed,
        hidden_s=communication_s - classes["communication"],
        **_tensor_core_shares(recording, work),
        busy=covered / max(1, end - begin),
        sm_busy=_sm_busy(work, begin, end),
        top=_top(recording, work, most),
        gaps=_longest_gaps(recording, gaps, ~is_launch),
        late_s=outside_ns / 1e9,
    )


def covered_ns(start: Any, end: Any) -> int:
    """Nanoseconds covered by the union of intervals."""
    merged = union(start, end)
    return int((merged[1] - merged[0]).sum())


def union(start: Any, end: Any) -> tuple[Any, Any]:
    """The union of intervals as sorted, disjoint intervals."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return start[first], reach[np.concatenate([first[1:] - 1, [len(reach) - 1]])]


def _clip(work: Work, begin: int, end: int) -> tuple[Work, int]:
    """The work clipped to the steps, and the nanoseconds outside them."""
    start, stop = np.clip(work.start, begin, end), np.clip(work.end, begin, end)
    outside_ns = int((work.end - work.start).sum() - (stop - start).sum())
    inside = stop > start
    names, kinds, groups = work.name[inside], work.kind[inside], work.group[inside]
    clipped = Work(start[inside], stop[inside], names, kinds, groups, work.launched[inside], work.sms[inside])
    return clipped, outside_ns


def _exposed_by_group(work: Work, before: Any, communication: Any, covered: int) -> dict[str, float]:
    """Exposed communication by process group; a moment of two groups belongs to the first in GROUPS."""
    so_far, seconds = before.copy(), {}
    for group in (*GROUPS[1:], ""):
        so_far |= communication & (work.group == GROUPS.index(group))
        total = covered_ns(work.start[so_far], work.end[so_far])
        if total > covered:
            seconds[group] = (total - covered) / 1e9
        covered = total
    return seconds


def _gaps(work: Work, begin: int, end: int) -> tuple[Any, Any]:
    start, stop = union(work.start, work.end)
    edges = np.concatenate([[begin], stop]), np.concatenate([start, [end]])
    is_gap = edges[1] > edges[0]
    return edges[0][is_gap].astype(np.int64), edges[1][is_gap].astype(np.int64)


def _is_launch_gap(work: Work, gaps: tuple[Any, Any]) -> Any:
    """Whether a late launch caused each gap: the host launched the next work item only after the gap began."""
    order = np.argsort(work.start, kind="stable")
    at = np.minimum(np.searchsorted(work.start[order], gaps[1]), max(0, len(order) - 1))
    launched = work.launched[order][at] if len(order) else np.zeros(0)
    length = gaps[1] - gaps[0]
    return (length < SMALL_NS) | ((launched >= gaps[0]) & (length < LONG_NS))


def _tensor_core_shares(recording: Recording, work: Work) -> dict[str, float | None]:
    if not recording.on_gpu:
        return {"tensor_share": None, "tensor_busy": None}
    length = (work.end - work.start).astype(np.float64)
    is_heavy = (work.kind == CLASSES.index("products")) | (work.kind == CLASSES.index("attention"))
    on_tensor = np.array([uses_tensor_cores(name) for name in recording.names], dtype=bool)[work.name] & is_heavy
    heavy = float(length[is_heavy].sum())
    span = max(1, recording.end - recording.begin)
    busy = covered_ns(work.start[on_tensor], work.end[on_tensor]) / span
    return {"tensor_share": float(length[on_tensor].sum()) / heavy if heavy else None, "tensor_busy": busy}


def _sm_busy(work: Work, begin: int, end: int) -> float | None:
    """Mean share of the SMs in use: at each moment that of the widest running kernel, by its grid size.

    An upper bound, estimated like "Est. SM Efficiency" of PyTorch's TensorBoard plugin (docs of torch-tb-profiler).
    """
    known = ~np.isnan(work.sms)
    if not known.any():
        return None
    covered, total = 0, 0.0
    levels = np.unique(np.round(work.sms[known], 2))[::-1]  # at most 101
    shares = np.round(work.sms, 2)
    for level in levels:
        wide = known & (shares >= level)
        reach = covered_ns(work.start[wide], work.end[wide])
        total += (reach - covered) * float(level)
        covered = reach
    return total / max(1, end - begin)


def _top(recording: Recording, work: Work, most: int) -> tuple[Top, ...]:
    length = (work.end - work.start).astype(np.float64)
    keys, which = np.unique(work.name.astype(np.int64) * len(CLASSES) + work.kind, return_inverse=True)
    seconds = np.bincount(which, weights=length, minlength=len(keys)) / 1e9
    calls = np.bincount(which, minlength=len(keys))
    rows = []
    for i in np.argsort(-seconds, kind="stable")[:most].tolist():
        name, kind = recording.names[int(keys[i]) // len(CLASSES)], CLASSES[int(keys[i]) % len(CLASSES)]
        tensor = recording.on_gpu and kind in ("products", "attention") and uses_tensor_cores(name)
        rows.append(Top(name, kind, float(seconds[i]), int(calls[i]) if recording.on_gpu else None, tensor))
    return tuple(rows)


def _longest_gaps(recording: Recording, gaps: tuple[Any, Any], wanted: Any) -> tuple[Gap, ...]:
    start, end = gaps[0][wanted], gaps[1][wanted]
    order = np.argsort(start - end, kind="stable")[:LONGEST_GAPS]
    return tuple(
        Gap((end[i] - start[i]) / 1e9, (start[i] - recording.begin) / 1e9, _host_activity(recording, start[i], end[i]))
        for i in order.tolist()
        if end[i] - start[i] >= LONG_NS
    )


def _host_activity(recording: Recording, start: int, end: int) -> str:
    """The shortest host activity that covers at least half of this time."""
    host = recording.host
    shared = np.minimum(host.end, end) - np.maximum(host.start, start)
    inside = np.flatnonzero(shared * 2 >= end - start)
    if not len(inside):
        return ""
    shortest = inside[np.argmin((host.end - host.start)[inside])]
    return recording.names[int(host.name[shortest])]
