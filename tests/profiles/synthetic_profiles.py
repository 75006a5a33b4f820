"""SYNTHETIC profiles: three steps of 1,000 us on a GPU that never was, as a Chrome trace and as an export of nsys.

Both hold the same work at the same times, so that both must be read to the same seconds. Columns and types of the
export are those of "SQLite Export Schema Reference" in Nsight Systems' documentation; fields of the trace are Kineto's.

    python -m tests.profiles.synthetic_profiles FOLDER    writes synthetic.json, synthetic.json.gz and synthetic.sqlite
"""

import gzip
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

STEPS, STEP_US, SMS = 3, 1000, 100
BEGIN_US = 4_561_372_822_000
"""Clocks of real traces begin anywhere."""


class Piece(NamedTuple):
    start: int
    end: int
    name: str
    launched: int
    """us from the beginning of the step"""
    blocks: int = 0
    stream: int = 7
    group: str = ""
    category: str = "kernel"


PIECES = (
    Piece(0, 300, "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", -20, 200),
    Piece(300, 400, "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", -10, 50),
    Piece(400, 440, "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<>", 0, 50),
    Piece(440, 540, "void at::native::vectorized_elementwise_kernel<4, at::native::mul>", 0, 50),
    Piece(450, 600, "ncclDevKernel_AllGather_RING_LL", 5, 10, 20, "TENSOR_MODEL_PARALLEL_GROUP"),
    Piece(620, 700, "ampere_sgemm_128x64_tn", 610, 200),
    Piece(704, 754, "void multi_tensor_apply_kernel<AdamFunctor>", 690, 50),
    Piece(754, 764, "Memcpy HtoD (Pinned -> Device)", 700, category="gpu_memcpy"),
    Piece(900, 960, "ncclDevKernel_SendRecv", 700, 10, 21, "PIPELINE_MODEL_PARALLEL_GROUP"),
)
"""What runs in a step; the next step's product is called 20 us before it starts, 980 us after this one began."""

CLASSES_US = {
    "products": 3 * (300 + 80),
    "attention": 3 * 100,
    "norms": 3 * 40,
    "optimizer": 3 * 50,
    "elementwise": 3 * 100,
    "communication": 3 * (60 + 60),
    "copies": 3 * 10,
    "gaps": 3 * (20 + 4) + 2 * 40,  # late launches, and the one before the next step
    "idle": 3 * 136 + 40,  # its kernel was called before; and the end, after which nothing is called
}
"""By hand, from PIECES."""
HIDDEN_US = 3 * 90
TENSOR_SHARE = 400 / 480
SM_BUSY = (380 + 0.5 * 290 + 0.1 * 120) / 1000


def chrome(marks: bool = True) -> dict[str, Any]:
    """The trace, as Kineto writes it."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}}]
    for step in range(STEPS):
        at = BEGIN_US + step * STEP_US
        if marks:
            events.append(_event("user_annotation", f"ProfilerStep#{step}", at, at + STEP_US, 100, 100))
        events.append(_event("cpu_op", "aten::item", at + 760, at + 890, 100, 100))
        for number, piece in enumerate(PIECES):
            call = {"correlation": 1000 * step + number}
            launch = at + piece.launched
            events.append(_event("cuda_runtime", "cudaLaunchKernel", launch, launch + 4, 100, 100, call))
            args: dict[str, Any] = {"device": 0, "stream": piece.stream, **call}
            args |= {"blocks per SM": piece.blocks / SMS} if piece.blocks else {}
            args |= {"Process Group Description": piece.group} if piece.group else {}
            events.append(_event(piece.category, piece.name, at + piece.start, at + piece.end, 0, piece.stream, args))
    properties = [{"id": 0, "name": "SYNTHETIC GPU", "numSms": SMS}]
    group = {"backend": "nccl", "rank": 3, "world_size": 16}
    return {"schemaVersion": 1, "deviceProperties": properties, "distributedInfo": group, "traceEvents": events}


def _event(
    category: str, name: str, start: int, end: int, pid: int, tid: int, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": float(start)}
    return event | {"dur": float(end - start), "args": args or {}}


SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, busLocation TEXT, smCount INT, totalMemory INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL,
    contextId INT NOT NULL, streamId INT NOT NULL, correlationId INT, globalPid INT, demangledName INT NOT NULL,
    shortName INT NOT NULL, gridX INT NOT NULL, gridY INT NOT NULL, gridZ INT NOT NULL, blockX INT NOT NULL,
    blockY INT NOT NULL, blockZ INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL,
    contextId INT NOT NULL, streamId INT NOT NULL, correlationId INT, globalPid INT, bytes INT NOT NULL,
    copyKind INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, eventClass INT NOT NULL, globalTid INT,
    correlationId INT, nameId INT NOT NULL, returnValue INT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, eventType INT NOT NULL, text TEXT, textId INT, globalTid INT);
"""
METRICS = """
CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INT, sourceId INT, typeName TEXT, metricId INT, metricName TEXT);
CREATE TABLE GPU_METRICS (rawTimestamp INT, timestamp INT, typeId INT, metricId INT, value INT);
INSERT INTO TARGET_INFO_GPU_METRICS VALUES (1, 1, 'SYNTHETIC', 4, 'DRAM Read Bandwidth [Throughput %]'),
    (1, 1, 'SYNTHETIC', 5, 'DRAM Write Bandwidth [Throughput %]'), (1, 1, 'SYNTHETIC', 6, 'GPU Active [Throughput %]');
"""
PID = 77 << 24


def export(path: Path, *, marks: str = "iteration", metrics: bool = False) -> Path:
    """Write the export; `marks`: `iteration` or `optimizer` NVTX ranges, or none."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.executescript(SCHEMA + (METRICS if metrics else ""))
        names = {name: i for i, name in enumerate(["cudaLaunchKernel_v7000", *(p.name for p in PIECES)])}
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, name) for name, i in names.items()])
        db.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'SYNTHETIC GPU', '0000:00', ?, 80)", (SMS,))
        for step in range(STEPS):
            _step(db, step, names, marks)
            if metrics:
                at = (BEGIN_US + step * STEP_US + 500) * 1000
                rows = [(at, at, 1, metric, value) for metric, value in ((4, 30 + step), (5, 10), (6, 90))]
                db.executemany("INSERT INTO GPU_METRICS VALUES (?, ?, ?, ?, ?)", rows)
        db.commit()
    return path


def _step(db: sqlite3.Connection, step: int, names: dict[str, int], marks: str) -> None:
    at, thread = BEGIN_US + step * STEP_US, PID + 5
    insert = "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?)"
    db.execute(insert, (1000 * (at + 760), 1000 * (at + 890), "aten::item, seq = 12", thread))
    if marks == "iteration":
        db.execute(insert, (1000 * at, 1000 * (at + STEP_US), f"iteration {step + 10}", thread))
    elif marks == "optimizer":
        db.execute(insert, (1000 * (at + 690), 1000 * (at + 700), "Optimizer.step#FusedAdam.step", thread))
    for number, piece in enumerate(PIECES):
        call, launch = 1000 * step + number, 1000 * (at + piece.launched)
        db.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 0, 0)",
            (launch, launch + 4000, thread, call),
        )
        common = (1000 * (at + piece.start), 1000 * (at + piece.end), 0, 1, piece.stream, call, PID)
        if piece.category == "kernel":
            name = names[piece.name]
            grid = (piece.blocks, 1, 1, 128, 1, 1)
            marks_of = ", ".join("?" * 15)
            db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({marks_of})", (*common, name, name, *grid))
        else:
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?, 4096, 1)", common)


def write(folder: Path) -> None:
    """All three files."""
    text = json.dumps(chrome())
    (folder / "synthetic.json").write_text(text)
    (folder / "synthetic.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    export(folder / "synthetic.sqlite")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
