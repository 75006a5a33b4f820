"""A trace of torch.profiler (Kineto's Chrome trace) as a `Recording`: of a GPU's kernels, or of operations on CPUs."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from superpod.common.files import is_number
from superpod.errors import UserError
from superpod.profiles import profile_classes as classes
from superpod.profiles.profile_leaves import Leaves
from superpod.profiles.profile_recording import GROUPS, HOST_NS, Host, Names, Recording, Work
from superpod.profiles.profile_stream import EXPORT, Trace, TraceEvent
from superpod.profiles.profile_times import Times, keep_rows

STEP = re.compile(r"ProfilerStep#?\s*\d+$")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
OPERATIONS = ("cpu_op", "user_annotation", "Operator")
READ = (*ON_GPU, *CALLS, *OPERATIONS, "gpu_user_annotation")
LATE = 0.01
"""Share of the steps that kernels may run past the last mark on the host, before the marks on the GPU are taken."""


class _Collected:
    """What is kept of the events as they pass: numbers in arrays, 20 to 50 bytes a piece of work."""

    def __init__(self) -> None:
        self.names, self.seen, self.times = Names(), Counter[str](), Times()
        self.columns = {key: array("q") for key in ("start", "end", "name", "kind", "group", "call", "gpu")}
        self.sms = array("f")
        self.call_id, self.call_at = array("q"), array("q")
        self.host_start, self.host_end, self.host_name = array("q"), array("q"), array("i")
        self.marks: dict[str, list[tuple[int, int]]] = {"host": [], "gpu": []}
        self.leaves = Leaves()
        self.kinds: dict[str, int] = {}

    def take(self, event: TraceEvent) -> None:
        """Keep an event, if it says what ran when."""
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
        if category in ON_GPU:
            self._kernel(event, category, name, first, last)
        elif category in CALLS:
            self._call(event, first)
            self._host(name, first, last)
        elif category in OPERATIONS:
            if STEP.match(name):
                self.marks["host"].append((first, last))
            else:
                self._operation(event, name, first, last)
        elif STEP.match(name):
            self.marks["gpu"].append((first, last))

    def leave_out_far(self) -> None:
        """Forget what lies more than a day from the work, which only the whole file tells."""
        times = self.times
        times.settle(
            np.frombuffer(self.columns["start"], dtype=np.int64) if self.columns["start"] else self.leaves.starts
        )
        work = [*self.columns.values(), self.sms]
        far = keep_rows(work, times.near(np.array(self.columns["start"], dtype=np.int64)))
        far += keep_rows([self.call_id, self.call_at], times.near(np.array(self.call_at, dtype=np.int64)))
        far += self.leaves.keep(times.near)
        for kind, marks in self.marks.items():
            near = times.near(np.array([start for start, _ in marks], dtype=np.int64))
            self.marks[kind] = list(compress(marks, near))
            far += len(marks) - len(self.marks[kind])
        host = [self.host_start, self.host_end, self.host_name]  # calls and operations, which are counted already
        keep_rows(host, times.near(np.array(self.host_start, dtype=np.int64)))
        times.leave_out_far(far)

    def _kernel(self, event: TraceEvent, category: str, name: str, start: int, end: int) -> None:
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        kind = "copies" if category != "kernel" else classes.classify_kernel(name)
        group = ""
        if kind == "communication":
            process_group = args.get("Process Group Description") or args.get("Process Group Name") or ""
            group = classes.classify_group(name, str(process_group) if not str(process_group).isdigit() else "")
        row = (start, end, self.names.number(name), classes.CLASSES.index(kind), GROUPS.index(group))
        gpu = args.get("device", event.get("pid"))
        call = args.get("correlation")
        more = (call if isinstance(call, int) else -1, gpu if isinstance(gpu, int) else 0)
        for column, value in zip(self.columns.values(), (*row, *more), strict=True):
            column.append(value)
        blocks = args.get("blocks per SM")
        self.sms.append(min(1.0, float(blocks)) if is_number(blocks) else float("nan"))

    def _call(self, event: TraceEvent, start: int) -> None:
        args = event.get("args")
        call = args.get("correlation") if isinstance(args, dict) else None
        if isinstance(call, int):
            self.call_id.append(call)
            self.call_at.append(start)

    def _host(self, name: str, start: int, end: int) -> None:
        if end - start >= HOST_NS:
            self.host_start.append(start)
            self.host_end.append(end)
            self.host_name.append(self.names.number(name))

    def _operation(self, event: TraceEvent, name: str, start: int, end: int) -> None:
        self._host(name, start, end)
        kind = self.kinds.get(name)
        if kind is None:
            if name.startswith("Optimizer.step#"):
                kind = Leaves.OPTIMIZER
            else:
                known = classes.classify_operation(name)
                kind = classes.CLASSES.index(known) if known else Leaves.HOLDS
            self.kinds[name] = kind
        self.leaves.add((event.get("pid"), event.get("tid")), start, end, self.names.number(name), kind)


def read(path: Path, gpu: int | None = None) -> Recording:
    """The recording in a trace; of one GPU, by default the first that the file has.

    Raises:
        UserError: the file is damaged, is no trace of torch.profiler, or has no such GPU.
    """
    trace, kept = Trace(path), _Collected()
    for event in trace.events():
        kept.take(event)
    kept.leave_out_far()
    _require_profiler(path, trace, kept)
    return _of_gpu(path, trace, kept, gpu) if kept.columns["start"] else _of_cpus(path, trace, kept, gpu)


def _require_profiler(path: Path, trace: Trace, kept: _Collected) -> None:
    if kept.columns["start"] or len(kept.leaves):
        return
    other = trace.head.get("otherData")
    if isinstance(other, dict) and "step_time_s_of_the_plan" in other:
        raise UserError(f"{path} is a predicted step, which `recipes plan --trace` wrote: nothing was measured", EXPORT)
    if kept.times.words:
        raise UserError(f"{path} has nothing to sum up: left out {kept.times.words}", EXPORT)
    listed = ", ".join(f"{name} ({count:,})" for name, count in kept.seen.most_common(4)) or "no timed events"
    raise UserError(f"{path} is no trace of torch.profiler: it has {listed}, and no kernel and no cpu_op", EXPORT)


def _of_gpu(path: Path, trace: Trace, kept: _Collected, gpu: int | None) -> Recording:
    columns = {key: np.frombuffer(column, dtype=np.int64) for key, column in kept.columns.items()}
    gpus = tuple(int(number) for number in np.unique(columns["gpu"]))
    chosen = gpus[0] if gpu is None else gpu
    if chosen not in gpus:
        raise UserError(f"--gpu {gpu}: {path} has kernels of GPU {', '.join(map(str, gpus))}", f"--gpu {gpus[0]}")
    here = columns["gpu"] == chosen
    rows = {key: column[here] for key, column in columns.items()}
    launched = called_at(rows["call"], np.array(kept.call_id, dtype=np.int64), np.array(kept.call_at, dtype=np.int64))
    work = Work(
        *(rows["start"], rows["end"], rows["name"].astype(np.int32), rows["kind"].astype(np.int8)),
        *(rows["group"].astype(np.int8), launched, np.frombuffer(kept.sms, dtype=np.float32)[here]),
    )
    properties = trace.head.get("deviceProperties")
    named = [p for p in properties if isinstance(p, dict)] if isinstance(properties, list) else []
    name = next((str(p.get("name")) for p in named if p.get("id") == chosen and p.get("name")), "GPU")
    begin, end, steps, marks = _steps(kept, work)
    return _recording(trace, kept, work, device=name, on_gpu=True, gpus=gpus, span=(begin, end, steps, marks))


def _of_cpus(path: Path, trace: Trace, kept: _Collected, gpu: int | None) -> Recording:
    if gpu is not None:
        raise UserError(f"--gpu {gpu}: {path} has no work of GPUs, only operations on CPUs", "leave --gpu out")
    start, end, name, kind = kept.leaves.rows()
    unknown = np.full(len(start), -1, dtype=np.int64)
    work = Work(
        *(start, end, name, kind, np.zeros(len(start), dtype=np.int8), unknown),
        np.full(len(start), np.nan, dtype=np.float32),
    )
    span = _steps(kept, work)
    return _recording(trace, kept, work, device="CPU", on_gpu=False, gpus=(), span=span)


def _steps(kept: _Collected, work: Work) -> tuple[int, int, int, str]:
    """(begin, end, number of steps, what marked them)."""
    host, gpu = sorted(kept.marks["host"]), sorted(kept.marks["gpu"])
    last = int(work.end.max())
    if host:
        begin, end = host[0][0], max(stop for _, stop in host)
        if last - end <= LATE * (end - begin) or not gpu:
            return begin, end, len(host), "ProfilerStep on the host"
    if gpu:  # the host runs ahead: its marks end before the work does
        return gpu[0][0], max(stop for _, stop in gpu), len(gpu), "ProfilerStep on the GPU"
    return int(work.start.min()), last, 0, ""


def _recording(
    trace: Trace,
    kept: _Collected,
    work: Work,
    *,
    device: str,
    on_gpu: bool,
    gpus: tuple[int, ...],
    span: tuple[int, int, int, str],
) -> Recording:
    begin, end, steps, marks = span
    starts, ends = (np.array(column, dtype=np.int64) for column in (kept.host_start, kept.host_end))
    host = Host(starts, ends, np.array(kept.host_name, dtype=np.int32))
    group = trace.head.get("distributedInfo")
    rank = group.get("rank") if isinstance(group, dict) else None
    return Recording(
        *("torch", device, on_gpu, kept.names.texts, work, host, begin, end, steps, marks),
        rank=rank if isinstance(rank, int) else None,
        gpus=gpus,
        notes=kept.times.notes,
    )


def called_at(wanted: Any, calls: Any, times: Any) -> Any:
    """The time of the call of each piece of work, by correlation id; -1 where the file has none."""
    if not len(calls):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(calls, kind="stable")
    calls, times = calls[order], times[order]
    at = np.minimum(np.searchsorted(calls, wanted), len(calls) - 1)
    return np.where(calls[at] == wanted, times[at], -1)
