"""An export of Nsight Systems (`nsys export --type sqlite`) as a `Recording`. Opened read-only; standard library.

Tables and columns as Nsight Systems' user guide documents its SQLite schema: CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY,
_MEMSET and _RUNTIME, NVTX_EVENTS, StringIds, TARGET_INFO_GPU, GPU_METRICS. Times are nanoseconds.
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
from superpod.profiles.profile_torch import called_at

KERNELS, CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "memset"}
MAGIC = b"SQLite format 3\0"
EXPORT = "nsys export --type sqlite REPORT.nsys-rep, of a report of `nsys profile -t cuda,nvtx`"
_STEP = re.compile(r"(ProfilerStep|step|iteration|iter|train_step)[ _#:=]*\d+$", re.IGNORECASE)
_OPTIMIZER = re.compile(r"Optimizer\.step#")
_HBM = re.compile(r"DRAM.*(Throughput|Bandwidth|Active)", re.IGNORECASE)


def read(path: Path, gpu: int | None = None) -> Recording:
    """The recording in an export; of one GPU, by default the first that it has.

    Raises:
        UserError: the file is damaged, is no such export, or has no such GPU.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
            return _read(_File(path, db), gpu)
    except sqlite3.Error as error:
        raise UserError(f"{path} is a damaged SQLite file: {error}", EXPORT) from error


class _File:
    """The tables of an export; a table or column that it lacks reads as none."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.path, self.db = path, db
        db.text_factory = lambda data: data.decode("utf-8", "replace")
        self.tables = {row[0] for row in db.execute("select name from sqlite_master where type in ('table', 'view')")}
        self.names, self.times = Names(), Times()
        self._strings: dict[int, str] = {}

    def columns(self, table: str) -> set[str]:
        """Those of a table."""
        return {row[1] for row in self.db.execute(f'pragma table_info("{table}")')}

    def rows(self, table: str, *wanted: str) -> Iterator[tuple[Any, ...]]:
        """These columns of every row; None for a column that the table lacks."""
        if table not in self.tables:
            return
        have = self.columns(table)
        yield from self.db.execute(f"select {', '.join(c if c in have else 'null' for c in wanted)} from {table}")

    def text(self, number: Any) -> str:
        """A string of StringIds."""
        if not self._strings:
            self._strings = {key: str(value) for key, value in self.rows("StringIds", "id", "value")}
        return self._strings.get(number, "")

    def is_timed(self, start: Any, end: Any, name: str) -> bool:
        """False for a row that was still open when the recording ended, and for one that is damaged; both count."""
        whole = isinstance(start, int) and isinstance(end, int)
        return self.times.span(start if whole else None, end - start if whole else None, 1, name) is not None


def _read(file: _File, gpu: int | None) -> Recording:
    if KERNELS not in file.tables:
        listed = ", ".join(sorted(file.tables)[:4]) or "no table"
        raise UserError(f"{file.path} has no kernels of Nsight Systems: it holds {listed}", EXPORT)
    rows = list(_work_rows(file))
    if not rows:
        left_out = f": left out {file.times.words}" if file.times.words else ""
        raise UserError(
            f"{file.path} has a table of kernels, and none with its times in it{left_out}",
            "record steps in which a GPU works",
        )
    starts = np.array([row[0] for row in rows], dtype=np.int64)
    file.times.settle(starts)
    near = file.times.near(starts)
    file.times.leave_out_far(int((~near).sum()))
    rows = list(compress(rows, near))
    gpus = tuple(sorted({row[5] for row in rows}))
    chosen = gpus[0] if gpu is None else gpu
    if chosen not in gpus:
        raise UserError(f"--gpu {gpu}: {file.path} has GPU {', '.join(map(str, gpus))}", f"--gpu {gpus[0]}")
    name, sms = _gpu(file, chosen)
    mine = [row for row in rows if row[5] == chosen]
    start, end, number, kind, group, _, call, process, blocks = zip(*mine, strict=True)
    processes = set(process)
    ranges = list(_ranges(file, processes))
    host, launched = _host(file, processes, np.array(call, dtype=np.int64), ranges)
    share = np.minimum(1.0, np.array(blocks, dtype=np.float32) / sms) if sms else np.full(len(mine), np.nan)
    work = Work(
        *(np.array(start, dtype=np.int64), np.array(end, dtype=np.int64), np.array(number, dtype=np.int32)),
        *(np.array(kind, dtype=np.int8), np.array(group, dtype=np.int8), launched, share.astype(np.float32)),
    )
    begin, finish, steps, marks = _steps(work, ranges)
    return Recording(
        *("nsys", name, True, file.names.texts, work, host, begin, finish, steps, marks),
        gpus=gpus,
        counters=_counters(file, begin, finish),
        notes=file.times.notes,
    )


def _work_rows(file: _File) -> Iterator[tuple[Any, ...]]:
    """(start, end, name, kind, group, gpu, correlation, process, blocks) of kernels and copies."""
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


def _gpu(file: _File, number: int) -> tuple[str, int]:
    """The name of a GPU, and its SMs; 0 = unknown."""
    for identity, name, sms in file.rows("TARGET_INFO_GPU", "id", "name", "smCount"):
        if identity == number:
            return str(name or "GPU"), int(sms or 0)
    return "GPU", 0


def _host(file: _File, processes: set[Any], wanted: Any, ranges: list[tuple[int, int, str]]) -> tuple[Host, Any]:
    """Long calls and ranges of the host, and when it called for each piece of work."""
    calls, times, spans = [], [], []
    for start, end, call, name, thread in file.rows(CALLS, "start", "end", "correlationId", "nameId", "globalTid"):
        if call is None or not _of(thread, processes) or not file.is_timed(start, end, file.text(name)):
            continue
        calls.append(call)
        times.append(start)
        if end - start >= HOST_NS:
            spans.append((start, end, file.names.number(file.text(name).partition("_v")[0] or "a call of CUDA")))
    for start, end, name in ranges:
        if end - start >= HOST_NS:
            spans.append((start, end, file.names.number(name)))
    columns = list(zip(*spans, strict=True)) or [(), (), ()]
    begins, ends = (np.array(column, dtype=np.int64) for column in columns[:2])
    host = Host(begins, ends, np.array(columns[2], dtype=np.int32))
    launched = called_at(wanted, np.array(calls, dtype=np.int64), np.array(times, dtype=np.int64))
    return host, launched


def _of(thread: Any, processes: set[Any]) -> bool:
    """Whether a thread is of one of these processes: globalTid is globalPid with the thread in its last 24 bits."""
    return thread is None or None in processes or (thread & ~0xFFFFFF) in {p & ~0xFFFFFF for p in processes}


def _ranges(file: _File, processes: set[Any]) -> Iterator[tuple[int, int, str]]:
    """NVTX ranges that say something: those that are long, and marks of steps.

    What PyTorch appends to a name (`, seq = 12`) is left out; so are events without an end, which are no ranges.
    """
    for start, end, text, number, thread in file.rows("NVTX_EVENTS", "start", "end", "text", "textId", "globalTid"):
        name = str(text or file.text(number)).partition(", ")[0]
        if end is None or not _of(thread, processes) or not file.is_timed(start, end, name):
            continue
        if end - start >= HOST_NS or _STEP.match(name) or _OPTIMIZER.match(name):
            yield start, end, name


def _steps(work: Work, ranges: list[tuple[int, int, str]]) -> tuple[int, int, int, str]:
    marks, optimizer = [], 0
    for start, end, name in ranges:
        if _STEP.match(name):
            marks.append((start, end))
        optimizer += bool(_OPTIMIZER.match(name))
    if marks:
        return min(marks)[0], max(end for _, end in marks), len(marks), "NVTX ranges named after steps"
    begin, end = int(work.start.min()), int(work.end.max())
    return begin, end, optimizer, "one step for each NVTX range Optimizer.step" if optimizer else ""


def _counters(file: _File, begin: int, end: int) -> dict[str, float]:
    """Means of the hardware's metrics over the steps, %; {} where `--gpu-metrics-devices` was not on."""
    names = {number: str(name) for number, name in file.rows("TARGET_INFO_GPU_METRICS", "metricId", "metricName")}
    if not names or "GPU_METRICS" not in file.tables:
        return {}
    query = "select metricId, avg(value) from GPU_METRICS where timestamp between ? and ? group by metricId"
    return {
        names[n]: float(mean) for n, mean in file.db.execute(query, (begin, end)) if n in names and mean is not None
    }


def hbm_share(counters: dict[str, float]) -> float | None:
    """The share of HBM's bandwidth that reads and writes took, 0 to 1; None where it was not measured."""
    shares = [value for name, value in counters.items() if _HBM.search(name) and "%" in name]
    return sum(shares) / 100 if shares else None
