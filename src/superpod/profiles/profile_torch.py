"""Read a torch.profiler trace (Kineto's Chrome trace) as a `Recording` of GPU kernels, or of operations on CPUs."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from superpod.common.json_files import is_number
from superpod.errors import UserError
from superpod.profiles import profile_classes as classes
from superpod.profiles.profile_leaves import Leaves
from superpod.profiles.profile_recording import GROUPS, HOST_NS, Host, Names, Recording, Work
from superpod.profiles.profile_stream import EXPORT, Trace, TraceEvent
from superpod.profiles.profile_times import Times, keep_rows

STEP = re.compile(r"ProfilerStep#?\s*\d+$")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
OPERATIONS = ("cpu_op", "user_annotation", "Operator")
READ = (*GPU_CATEGORIES, *CALLS, *OPERATIONS, "gpu_user_annotation")
LATE = 0.01
"""If kernels end later than the host's last marker by more than this share of the time, the GPU's markers count."""


class _Collected:
    """The data of a trace's events, as arrays of numbers with 20 to 50 bytes per work item."""

    def __init__(self) -> None:
        self.names, self.seen, self.times = Names(), Counter[str](), Times()
        self.columns = {key: array("q") for key in ("start", "end", "name", "kind", "group", "call", "gpu")}
        self.sms = array("f")
        self.call_id, self.call_at = array("q"), array("q")
        self.host_start, self.host_end, self.host_name = array("q"), array("q"), array("i")
        self.marks: dict[str, list[tuple[int, int]]] = {"host": [], "gpu": []}
        self.leaves = Leaves()
        self.kinds: dict[str, int] = {}

    def add(self, event: TraceEvent) -> None:
        """Add an event if it has a duration (phase X) and is in one of the categories READ."""
        if event.get("ph") != "X":
            return
        category, name = str(event.get("cat")), event.get("name")
        self.seen[category] += 1
        if category not in READ or not isinstance(name, str):
            return
        span = self.times.span(event.get("ts"), event.get("dur"), 1000, name)
        if span is None:
            return
        first, last = span
        if category in GPU_CATEGORIES:
            self._add_kernel(event, category, name, first, last)
        elif category in CALLS:
            self._add_call(event, first)
            self._add_host(name, first, last)
        elif category in OPERATIONS:
            if STEP.match(name):
                self.marks["host"].append((first, last))
            else:
                self._add_operation(event, name, first, last)
        elif STEP.match(name):
            self.marks["gpu"].append((first, last))

    def remove_outliers(self) -> None:
        """Remove the events that are more than a day away from the median of the work items."""
        times = self.times
        if self.columns["start"]:
            times.set_median(np.frombuffer(self.columns["start"], dtype=np.int64))
        else:
            times.set_median(self.leaves.starts)
        work = [*self.columns.values(), self.sms]
        removed = keep_rows(work, times.is_near(np.array(self.columns["start"], dtype=np.int64)))
        removed += keep_rows([self.call_id, self.call_at], times.is_near(np.array(self.call_at, dtype=np.int64)))
        removed += self.leaves.keep(times.is_near)
        for kind, marks in self.marks.items():
            is_near = times.is_near(np.array([start for start, _ in marks], dtype=np.int64))
            self.marks[kind] = list(compress(marks, is_near))
            removed += len(marks) - len(self.marks[kind])
        host = [self.host_start, self.host_end, self.host_name]  # calls and operations, which are already counted
        keep_rows(host, times.is_near(np.array(self.host_start, dtype=np.int64)))
        times.count_outliers(removed)

    def _add_kernel(self, event: TraceEvent, category: str, name: str, start: int, end: int) -> None:
        args = event.get("args")
        if not isinstance(args, dict):
            args = {}
        kind = "copies" if category != "kernel" else classes.classify_kernel(name)
        group = ""
        if kind == "communication":
            process_group = str(args.get("Process Group Description") or args.get("Process Group Name") or "")
            group = classes.classify_group(name, "" if process_group.isdigit() else process_group)
        gpu = args.get("device", event.get("pid"))
        call = args.get("correlation")
        row = {
            "start": start,
            "end": end,
            "name": self.names.number(name),
            "kind": classes.CLASSES.index(kind),
            "group": GROUPS.index(group),
            "call": call if isinstance(call, int) else -1,
            "gpu": gpu if isinstance(gpu, int) else 0,
        }
        for key, value in row.items():
            self.columns[key].append(value)
        blocks = args.get("blocks per SM")
        self.sms.append(min(1.0, float(blocks)) if is_number(blocks) else float("nan"))

    def _add_call(self, event: TraceEvent, start: int) -> None:
        args = event.get("args")
        call = args.get("correlation") if isinstance(args, dict) else None
        if isinstance(call, int):
            self.call_id.append(call)
            self.call_at.append(start)

    def _add_host(self, name: str, start: int, end: int) -> None:
        if end - start >= HOST_NS:
            self.host_start.append(start)
            self.host_end.append(end)
            self.host_name.append(self.names.number(name))

    def _add_operation(self, event: TraceEvent, name: str, start: int, end: int) -> None:
        self._add_host(name, start, end)
        kind = self.kinds.get(name)
        if kind is None:
            kind = self.kinds[name] = _operation_kind(name)
        self.leaves.add((event.get("pid"), event.get("tid")), start, end, self.names.number(name), kind)


def _operation_kind(name: str) -> int:
    """Return the index of an operation's class, or a kind defined in `Leaves`."""
    if name.startswith("Optimizer.step#"):
        return Leaves.OPTIMIZER
    known_class = classes.classify_operation(name)
    return classes.CLASSES.index(known_class) if known_class else Leaves.HOLDS


class _Steps(NamedTuple):
    """Start and end of the recorded steps in nanoseconds, their number, and their markers."""

    begin: int
    end: int
    number: int
    """0 = unknown."""
    marks: str
    """Description of the step markers; "" if there are none."""


def read(path: Path, gpu: int | None = None) -> Recording:
    """Read the work of one GPU from a trace, by default of the first GPU in the file.

    Raises:
        UserError: the file is corrupt, is not a torch.profiler trace, or does not contain the GPU.
    """
    trace, kept = Trace(path), _Collected()
    for event in trace.events():
        kept.add(event)
    kept.remove_outliers()
    _require_profiler(path, trace, kept)
    if kept.columns["start"]:
        return _read_gpu(path, trace, kept, gpu)
    return _read_cpu_events(path, trace, kept, gpu)


def _require_profiler(path: Path, trace: Trace, collected: _Collected) -> None:
    """Raise UserError if a trace contains no work items of torch.profiler."""
    if collected.columns["start"] or len(collected.leaves):
        return
    other_data = trace.head.get("otherData")
    if isinstance(other_data, dict) and "step_time_s_of_the_plan" in other_data:
        raise UserError(f"{path} is a predicted step written by `recipes plan --trace`, not a measurement", EXPORT)
    if collected.times.text:
        raise UserError(f"{path} contains no usable events: omitted {collected.times.text}", EXPORT)
    counts = [f"{name} ({count:,})" for name, count in collected.seen.most_common(4)]
    found = ", ".join(counts) or "no timed events"
    raise UserError(f"{path} is not a torch.profiler trace: it has {found}, but no kernel and no cpu_op", EXPORT)


def _read_gpu(path: Path, trace: Trace, collected: _Collected, gpu: int | None) -> Recording:
    columns = {key: np.frombuffer(column, dtype=np.int64) for key, column in collected.columns.items()}
    gpus = tuple(int(number) for number in np.unique(columns["gpu"]))
    chosen_gpu = gpus[0] if gpu is None else gpu
    if chosen_gpu not in gpus:
        raise UserError(f"--gpu {gpu}: {path} has kernels of GPU {', '.join(map(str, gpus))}", f"use --gpu {gpus[0]}")
    is_chosen_gpu = columns["gpu"] == chosen_gpu
    rows = {key: column[is_chosen_gpu] for key, column in columns.items()}
    calls, times = np.array(collected.call_id, dtype=np.int64), np.array(collected.call_at, dtype=np.int64)
    work = Work(
        start=rows["start"],
        end=rows["end"],
        name=rows["name"].astype(np.int32),
        kind=rows["kind"].astype(np.int8),
        group=rows["group"].astype(np.int8),
        launched=find_launch_times(rows["call"], calls, times),
        sms=np.frombuffer(collected.sms, dtype=np.float32)[is_chosen_gpu],
    )
    device = _gpu_name(trace, chosen_gpu)
    return _build_recording(trace, collected, work, device=device, gpus=gpus, steps=_find_steps(collected, work))


def _gpu_name(trace: Trace, number: int) -> str:
    """Return the name of a GPU in a trace's `deviceProperties`, or `GPU` if it is unknown."""
    properties = trace.head.get("deviceProperties")
    for gpu in properties if isinstance(properties, list) else ():
        if isinstance(gpu, dict) and gpu.get("id") == number and gpu.get("name"):
            return str(gpu["name"])
    return "GPU"


def _read_cpu_events(path: Path, trace: Trace, collected: _Collected, gpu: int | None) -> Recording:
    if gpu is not None:
        raise UserError(f"--gpu {gpu}: {path} has no GPU work, only operations on CPUs", "omit --gpu")
    start, end, name, kind = collected.leaves.rows()
    work = Work(
        start=start,
        end=end,
        name=name,
        kind=kind,
        group=np.zeros(len(start), dtype=np.int8),
        launched=np.full(len(start), -1, dtype=np.int64),
        sms=np.full(len(start), np.nan, dtype=np.float32),
    )
    return _build_recording(trace, collected, work, device="CPU", gpus=(), steps=_find_steps(collected, work))


def _find_steps(collected: _Collected, work: Work) -> _Steps:
    """Return the steps that the markers of the host or the GPU delimit; without markers, the entire recording."""
    host, gpu = sorted(collected.marks["host"]), sorted(collected.marks["gpu"])
    last = int(work.end.max())
    if host:
        begin, end = host[0][0], max(stop for _, stop in host)
        if last - end <= LATE * (end - begin) or not gpu:
            return _Steps(begin, end, len(host), "ProfilerStep on the host")
    if gpu:  # the host runs ahead of the GPU, so that its markers end before the work does
        return _Steps(gpu[0][0], max(stop for _, stop in gpu), len(gpu), "ProfilerStep on the GPU")
    return _Steps(int(work.start.min()), last, 0, "")


def _build_recording(
    trace: Trace, collected: _Collected, work: Work, *, device: str, gpus: tuple[int, ...], steps: _Steps
) -> Recording:
    """Build the recording of a GPU, or of CPUs if `gpus` is empty."""
    starts, ends = (np.array(column, dtype=np.int64) for column in (collected.host_start, collected.host_end))
    group = trace.head.get("distributedInfo")
    rank = group.get("rank") if isinstance(group, dict) else None
    return Recording(
        tool="torch",
        device=device,
        on_gpu=bool(gpus),
        names=collected.names.texts,
        work=work,
        host=Host(starts, ends, np.array(collected.host_name, dtype=np.int32)),
        begin=steps.begin,
        end=steps.end,
        steps=steps.number,
        marks=steps.marks,
        rank=rank if isinstance(rank, int) else None,
        gpus=gpus,
        notes=collected.times.notes,
    )


def find_launch_times(ids: Any, calls: Any, times: Any) -> Any:
    """Return the time at which the host launched each work item; -1 if the launch is not in the file.

    Args:
        ids: correlation IDs of the work items.
        calls: correlation IDs of the host's API calls.
        times: start times of these calls.
    """
    if not len(calls):
        return np.full(len(ids), -1, dtype=np.int64)
    order = np.argsort(calls, kind="stable")
    calls, times = calls[order], times[order]
    index = np.minimum(np.searchsorted(calls, ids), len(calls) - 1)
    return np.where(calls[index] == ids, times[index], -1)
