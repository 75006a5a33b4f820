"""Where the time of recorded steps goes: every moment belongs to one class, so that classes add up to the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from superpod.profiles.profile_classes import CLASSES, uses_tensor_cores
from superpod.profiles.profile_recording import GROUPS, Recording, Work

SMALL_NS = 10_000
"""A gap that is shorter counts as one between launches, where nothing says when the next piece of work was called."""
LONG_NS = 1_000_000
"""A gap that is longer is no slow launch: the host did something else, or the GPU waited for others."""


@dataclass(frozen=True)
class Top:
    """A kernel, or an operation on CPUs, by its name: its time in all steps."""

    name: str
    kind: str
    seconds: float
    """the sum of its pieces, which may run beside others"""
    calls: int | None
    """None on CPUs, where a piece is what lies between others"""
    tensor_cores: bool


@dataclass(frozen=True)
class Gap:
    """A time in which nothing ran."""

    seconds: float
    at_s: float
    """from the beginning of the steps"""
    host: str
    """what the host did most of the time; "" = nothing that was recorded"""


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds of all recorded steps."""

    seconds: float
    """from the beginning of the first step to the end of the last"""
    steps: int
    """0 = unknown"""
    classes: dict[str, float]
    """class -> seconds; they add up to `seconds`"""
    exposed: dict[str, float]
    """tp, cp, ep, dp, pp or "" (unknown) -> seconds of communication that nothing hid"""
    hidden_s: float
    """communication beside computation, beside `seconds`"""
    tensor_share: float | None
    """of the time of products and attention, by kernel names; None = CPUs, or neither"""
    tensor_busy: float | None
    """of the steps"""
    busy: float
    """share of the steps in which something ran"""
    sm_busy: float | None
    """share of the SMs that blocks could fill, in the mean of the steps; None = the file has no grids"""
    top: tuple[Top, ...]
    gaps: tuple[Gap, ...]
    """the longest ones"""
    late_s: float
    """work that ran outside of the steps, and is not counted"""


def break_down(recording: Recording, most: int = 10) -> TimeBreakdown:
    """The sums of a recording; of at most `most` names."""
    begin, end = recording.begin, recording.end
    work, late = _clipped(recording.work, begin, end)
    covered, classes, exposed = 0, {}, {}
    so_far = np.zeros(len(work), dtype=bool)
    for kind in CLASSES[:-2]:
        of_kind = work.kind == CLASSES.index(kind)
        if kind == "communication":
            exposed = _exposed(work, so_far, of_kind, covered)
        so_far |= of_kind
        total = measure(work.start[so_far], work.end[so_far])
        classes[kind] = (total - covered) / 1e9
        covered = total
    gaps = _gaps(work, begin, end)
    late_launches = _is_launch(work, gaps) if recording.on_gpu else np.zeros(len(gaps[0]), dtype=bool)
    lengths = gaps[1] - gaps[0]
    classes["gaps"] = int(lengths[late_launches].sum()) / 1e9
    classes["idle"] = int(lengths[~late_launches].sum()) / 1e9
    communication = work.kind == CLASSES.index("communication")
    sent = measure(work.start[communication], work.end[communication]) / 1e9
    return TimeBreakdown(
        seconds=(end - begin) / 1e9,
        steps=recording.steps,
        classes=classes,
        exposed=exposed,
        hidden_s=sent - classes["communication"],
        **_tensor(recording, work),
        busy=covered / max(1, end - begin),
        sm_busy=_sm_busy(work, begin, end),
        top=_top(recording, work, most),
        gaps=_longest(recording, gaps, ~late_launches),
        late_s=late / 1e9,
    )


def measure(start: Any, end: Any) -> int:
    """Nanoseconds that the union of these intervals covers."""
    merged = union(start, end)
    return int((merged[1] - merged[0]).sum())


def union(start: Any, end: Any) -> tuple[Any, Any]:
    """Intervals that do not touch, in their order, which cover what these cover."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return start[first], reach[np.concatenate([first[1:] - 1, [len(reach) - 1]])]


def _clipped(work: Work, begin: int, end: int) -> tuple[Work, int]:
    """The work within the steps, and the nanoseconds of what is not."""
    start, stop = np.clip(work.start, begin, end), np.clip(work.end, begin, end)
    late = int((work.end - work.start).sum() - (stop - start).sum())
    inside = stop > start
    names, kinds, groups = work.name[inside], work.kind[inside], work.group[inside]
    return Work(start[inside], stop[inside], names, kinds, groups, work.launched[inside], work.sms[inside]), late


def _exposed(work: Work, before: Any, communication: Any, covered: int) -> dict[str, float]:
    """Exposed communication by what it serves; a moment of two is the first one's."""
    so_far, seconds = before.copy(), {}
    for group in (*GROUPS[1:], ""):
        so_far |= communication & (work.group == GROUPS.index(group))
        total = measure(work.start[so_far], work.end[so_far])
        if total > covered:
            seconds[group] = (total - covered) / 1e9
        covered = total
    return seconds


def _gaps(work: Work, begin: int, end: int) -> tuple[Any, Any]:
    start, stop = union(work.start, work.end)
    edges = np.concatenate([[begin], stop]), np.concatenate([start, [end]])
    open_ = edges[1] > edges[0]
    return edges[0][open_].astype(np.int64), edges[1][open_].astype(np.int64)


def _is_launch(work: Work, gaps: tuple[Any, Any]) -> Any:
    """Whether each gap is one that the host's launches made: the next piece of work was called only after it began."""
    order = np.argsort(work.start, kind="stable")
    at = np.minimum(np.searchsorted(work.start[order], gaps[1]), max(0, len(order) - 1))
    called = work.launched[order][at] if len(order) else np.zeros(0)
    length = gaps[1] - gaps[0]
    return (length < SMALL_NS) | ((called >= gaps[0]) & (length < LONG_NS))


def _tensor(recording: Recording, work: Work) -> dict[str, float | None]:
    if not recording.on_gpu:
        return {"tensor_share": None, "tensor_busy": None}
    length = (work.end - work.start).astype(np.float64)
    heavy = (work.kind == CLASSES.index("products")) | (work.kind == CLASSES.index("attention"))
    uses = np.array([uses_tensor_cores(name) for name in recording.names], dtype=bool)[work.name] & heavy
    whole = float(length[heavy].sum())
    span = max(1, recording.end - recording.begin)
    busy = measure(work.start[uses], work.end[uses]) / span
    return {"tensor_share": float(length[uses].sum()) / whole if whole else None, "tensor_busy": busy}


def _sm_busy(work: Work, begin: int, end: int) -> float | None:
    """The share of SMs with work: of each moment the widest kernel's, as its grid has blocks for them.

    As PyTorch's TensorBoard plugin estimates it (docs of torch-tb-profiler, "Est. SM Efficiency"): a bound from above.
    """
    known = ~np.isnan(work.sms)
    if not known.any():
        return None
    covered, total = 0, 0.0
    levels = np.unique(np.round(work.sms[known], 2))[::-1]
    shares = np.round(work.sms, 2)
    for level in levels:  # at most 101 of them
        wide = known & (shares >= level)
        reach = measure(work.start[wide], work.end[wide])
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


def _longest(recording: Recording, gaps: tuple[Any, Any], wanted: Any, most: int = 3) -> tuple[Gap, ...]:
    start, end = gaps[0][wanted], gaps[1][wanted]
    order = np.argsort(start - end, kind="stable")[:most]
    return tuple(
        Gap((end[i] - start[i]) / 1e9, (start[i] - recording.begin) / 1e9, _host_at(recording, start[i], end[i]))
        for i in order.tolist()
        if end[i] - start[i] >= LONG_NS
    )


def _host_at(recording: Recording, start: int, end: int) -> str:
    """The shortest thing that the host did for half of this time or more."""
    host = recording.host
    shared = np.minimum(host.end, end) - np.maximum(host.start, start)
    inside = np.flatnonzero(shared * 2 >= end - start)
    if not len(inside):
        return ""
    shortest = inside[np.argmin((host.end - host.start)[inside])]
    return recording.names[int(host.name[shortest])]
