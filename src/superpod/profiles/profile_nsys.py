"""Read an export of Nsight Systems (`nsys export --type sqlite`) as a `Recording`. The file is opened read-only.

Tables and columns are documented in the SQLite schema of the Nsight Systems user guide: CUPTI_ACTIVITY_KIND_KERNEL,
_MEMCPY, _MEMSET and _RUNTIME, NVTX_EVENTS, StringIds, TARGET_INFO_GPU, GPU_METRICS. Times are in nanoseconds.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from superpod.errors import UserError
from superpod.profiles import profile_classes as classes
from superpod.profiles.profile_recording import GROUPS, HOST_NS, Host, Names, Recording, Work
from superpod.profiles.profile_times import Times
from superpod.profiles.profile_torch import find_launch_times

KERNELS, CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "memset"}
MAGIC = b"SQLite format 3\0"
EXPORT = "export a report of `nsys profile -t cuda,nvtx` with `nsys export --type sqlite REPORT.nsys-rep`"
_STEP = re.compile(r"(ProfilerStep|step|iteration|iter|train_step)[ _#:=]*\d+$", re.IGNORECASE)
_OPTIMIZER = re.compile(r"Optimizer\.step#")
_HBM = re.compile(r"DRAM.*(Throughput|Bandwidth|Active)", re.IGNORECASE)
_THREAD_BITS = 0xFFFFFF
"""Bits of a globalTid that contain the thread; the others are those of the globalPid."""

Range = tuple[int, int, str]
"""Start and end in nanoseconds, and name, of an NVTX range."""


def read(path: Path, gpu: int | None = None) -> Recording:
    """Read the work of one GPU from an export, by default of the first GPU in the file.

    Raises:
        UserError: the file is corrupt, is not an export with kernels, or does not contain the GPU.
    """
    try:
        # With `immutable`, SQLite neither locks the file nor looks for a journal next to it.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
            return _read(_File(path, db), gpu)
    except sqlite3.Error as error:
        raise UserError(f"{path} is a corrupt SQLite file: {error}", EXPORT) from error


class _File:
    """The tables of an export; missing tables have no rows, and missing columns are None."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.path, self.db = path, db
        db.text_factory = lambda data: data.decode("utf-8", "replace")
        self.tables = {row[0] for row in db.execute("select name from sqlite_master where type in ('table', 'view')")}
        self.names, self.times = Names(), Times()
        self._strings: dict[int, str] = {}

    def columns(self, table: str) -> set[str]:
        """Return the names of a table's columns."""
        return {row[1] for row in self.db.execute(f'pragma table_info("{table}")')}

    def rows(self, table: str, *wanted: str) -> Iterator[tuple[Any, ...]]:
        """Yield the values of the columns `wanted` in every row of a table."""
        if table not in self.tables:
            return
        table_columns = self.columns(table)
        selected_columns = ", ".join(column if column in table_columns else "null" for column in wanted)
        yield from self.db.execute(f"select {selected_columns} from {table}")

    def text(self, number: Any) -> str:
        """Return the text with a number in the table StringIds, or ""."""
        if not self._strings:
            self._strings = {key: str(value) for key, value in self.rows("StringIds", "id", "value")}
        return self._strings.get(number, "")

    def is_timed(self, start: Any, end: Any, name: str) -> bool:
        """Return whether the times of a row are plausible; otherwise, count the row as omitted."""
        length = end - start if isinstance(start, int) and isinstance(end, int) else None
        return self.times.span(start, length, 1, name) is not None


def _read(file: _File, gpu: int | None) -> Recording:
    if KERNELS not in file.tables:
        listed_tables = ", ".join(sorted(file.tables)[:4]) or "no table"
        raise UserError(f"{file.path} has no kernel table of Nsight Systems: it contains {listed_tables}", EXPORT)
    rows = list(_work_rows(file))
    if not rows:
        omitted = f": omitted {file.times.text}" if file.times.text else ""
        raise UserError(f"{file.path} has no kernel with valid times{omitted}", "record steps that run on a GPU")
    starts = np.array([row[0] for row in rows], dtype=np.int64)
    file.times.set_median(starts)
    is_near = file.times.is_near(starts)
    file.times.count_outliers(int((~is_near).sum()))
    rows = list(compress(rows, is_near))

    gpus = tuple(sorted({row[5] for row in rows}))
    chosen_gpu = gpus[0] if gpu is None else gpu
    if chosen_gpu not in gpus:
        raise UserError(f"--gpu {gpu}: {file.path} has GPU {', '.join(map(str, gpus))}", f"use --gpu {gpus[0]}")
    name, sms = _read_gpu(file, chosen_gpu)
    on_gpu = [row for row in rows if row[5] == chosen_gpu]
    start, end, number, kind, group, _, call, process, blocks = zip(*on_gpu, strict=True)
    processes = set(process)
    ranges = list(_ranges(file, processes))
    host, launched = _read_host(file, processes, np.array(call, dtype=np.int64), ranges)
    share = np.full(len(on_gpu), np.nan)
    if sms:
        share = np.minimum(1.0, np.array(blocks, dtype=np.float32) / sms)
    work = Work(
        start=np.array(start, dtype=np.int64),
        end=np.array(end, dtype=np.int64),
        name=np.array(number, dtype=np.int32),
        kind=np.array(kind, dtype=np.int8),
        group=np.array(group, dtype=np.int8),
        launched=launched,
        sms=share.astype(np.float32),
    )
    begin, finish, steps, marks = _steps(work, ranges)
    return Recording(
        tool="nsys",
        device=name,
        on_gpu=True,
        names=file.names.texts,
        work=work,
        host=host,
        begin=begin,
        end=finish,
        steps=steps,
        marks=marks,
        gpus=gpus,
        counters=_counters(file, begin, finish),
        notes=file.times.notes,
    )


def _work_rows(file: _File) -> Iterator[tuple[Any, ...]]:
    """Yield (start, end, name, kind, group, GPU, correlation ID, process, thread blocks) of kernels and copies."""
    grid = ("gridX", "gridY", "gridZ")
    common = ("start", "end", "deviceId", "correlationId", "globalPid")
    known: dict[str, tuple[int, int, int]] = {}
    for start, end, gpu, call, process, x, y, z, long, short in file.rows(
        KERNELS, *common, *grid, "demangledName", "shortName"
    ):
        name = file.text(long) or file.text(short) or "?"
        if not file.is_timed(start, end, name):
            continue
        if name not in known:
            kind = classes.classify_kernel(name)
            group = classes.classify_group(name) if kind == "communication" else ""
            known[name] = (file.names.number(name), classes.CLASSES.index(kind), GROUPS.index(group))
        blocks = float(x * y * z) if None not in (x, y, z) else float("nan")
        yield start, end, *known[name], gpu or 0, -1 if call is None else call, process, blocks
    copy = classes.CLASSES.index("copies")
    for table, name in COPIES.items():
        for start, end, gpu, call, process in file.rows(table, *common):
            if not file.is_timed(start, end, name):
                continue
            row = (start, end, file.names.number(name), copy, 0, gpu or 0)
            yield *row, -1 if call is None else call, process, float("nan")


def _read_gpu(file: _File, number: int) -> tuple[str, int]:
    """Return the name of a GPU, and its number of SMs or 0 if that is unknown."""
    for identity, name, sms in file.rows("TARGET_INFO_GPU", "id", "name", "smCount"):
        if identity == number:
            return str(name or "GPU"), int(sms or 0)
    return "GPU", 0


def _read_host(file: _File, processes: set[Any], ids: Any, ranges: list[Range]) -> tuple[Host, Any]:
    """Return the host's long API calls and NVTX ranges, and the launch time of each work item in `ids`."""
    calls, times, activities = [], [], []
    for start, end, call, name, thread in file.rows(CALLS, "start", "end", "correlationId", "nameId", "globalTid"):
        if call is None or not _belongs_to(thread, processes) or not file.is_timed(start, end, file.text(name)):
            continue
        calls.append(call)
        times.append(start)
        if end - start >= HOST_NS:
            function = file.text(name).partition("_v")[0] or "a CUDA call"
            activities.append((start, end, file.names.number(function)))
    for start, end, name in ranges:
        if end - start >= HOST_NS:
            activities.append((start, end, file.names.number(name)))
    begins, ends, names = list(zip(*activities, strict=True)) or [(), (), ()]
    host = Host(np.array(begins, dtype=np.int64), np.array(ends, dtype=np.int64), np.array(names, dtype=np.int32))
    launched = find_launch_times(ids, np.array(calls, dtype=np.int64), np.array(times, dtype=np.int64))
    return host, launched


def _belongs_to(thread: Any, processes: set[Any]) -> bool:
    """Return whether a thread (globalTid) belongs to one of the processes (globalPid), or either is unknown."""
    if thread is None or None in processes:
        return True
    return (thread & ~_THREAD_BITS) in {process & ~_THREAD_BITS for process in processes}


def _ranges(file: _File, processes: set[Any]) -> Iterator[Range]:
    """Yield the NVTX ranges of the processes that are long or mark steps, without PyTorch's suffix `, seq = 12`."""
    for start, end, text, number, thread in file.rows("NVTX_EVENTS", "start", "end", "text", "textId", "globalTid"):
        name = str(text or file.text(number)).partition(", ")[0]
        if end is None or not _belongs_to(thread, processes) or not file.is_timed(start, end, name):
            continue
        if end - start >= HOST_NS or _STEP.match(name) or _OPTIMIZER.match(name):
            yield start, end, name


def _steps(work: Work, ranges: list[Range]) -> tuple[int, int, int, str]:
    """Return the start and end of the steps, their number (0 = unknown), and a description of their markers."""
    marks = [(start, end) for start, end, name in ranges if _STEP.match(name)]
    if marks:
        return min(marks)[0], max(end for _, end in marks), len(marks), "NVTX ranges named after steps"
    begin, end = int(work.start.min()), int(work.end.max())
    optimizer_steps = sum(1 for _, _, name in ranges if _OPTIMIZER.match(name))
    if not optimizer_steps:
        return begin, end, 0, ""
    return begin, end, optimizer_steps, "one step per NVTX range Optimizer.step"


def _counters(file: _File, begin: int, end: int) -> dict[str, float]:
    """Return {hardware metric: mean between `begin` and `end`, in %}; {} without `--gpu-metrics-devices`."""
    names = {number: str(name) for number, name in file.rows("TARGET_INFO_GPU_METRICS", "metricId", "metricName")}
    if not names or "GPU_METRICS" not in file.tables:
        return {}
    query = "select metricId, avg(value) from GPU_METRICS where timestamp between ? and ? group by metricId"
    means = file.db.execute(query, (begin, end))
    return {names[number]: float(mean) for number, mean in means if number in names and mean is not None}


def hbm_share(counters: dict[str, float]) -> float | None:
    """Return the share of the HBM bandwidth used by reads and writes, 0 to 1; None without such a counter."""
    shares = [value for name, value in counters.items() if _HBM.search(name) and "%" in name]
    return sum(shares) / 100 if shares else None
