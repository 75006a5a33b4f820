"""Profiles are read to the seconds that are in them: traces, exports, and what is none of both."""

import gzip
import json
import random
import sqlite3
import tracemalloc
from contextlib import closing

import numpy as np
import pytest

from superpod.errors import UserError
from superpod.profiles import profile_breakdown, profile_files, profile_nsys, profile_torch
from superpod.profiles.profile_classes import CLASSES
from superpod.profiles.profile_leaves import Leaves
from superpod.profiles.profile_stream import Trace
from tests.profiles import synthetic_profiles as synthetic


@pytest.fixture
def files(tmp_path):
    synthetic.write(tmp_path)
    return tmp_path


def trace_of(path, events, **head):
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return path


@pytest.mark.parametrize("name", ["synthetic.json", "synthetic.json.gz", "synthetic.sqlite"])
def test_all_formats_are_read_to_the_seconds_that_were_written(files, name):
    recording = profile_files.read(files / name)
    sums = profile_breakdown.break_down(recording)
    assert {kind: round(seconds * 1e6) for kind, seconds in sums.classes.items()} == synthetic.CLASSES_US
    assert sum(sums.classes.values()) == pytest.approx(sums.seconds, rel=1e-12)
    assert (sums.steps, sums.seconds) == (synthetic.STEPS, pytest.approx(3e-3))
    assert sums.hidden_s * 1e6 == pytest.approx(synthetic.HIDDEN_US)
    assert sums.tensor_share == pytest.approx(synthetic.TENSOR_SHARE)
    assert sums.tensor_busy == pytest.approx(0.4)
    assert sums.sm_busy == pytest.approx(synthetic.SM_BUSY)
    assert recording.device == "SYNTHETIC GPU"
    assert [(top.kind, top.calls, top.tensor_cores) for top in sums.top[:2]] == [
        ("products", 3, True),
        ("communication", 3, False),
    ]


def test_communication_is_told_apart_where_its_group_is_named(files):
    trace = profile_breakdown.break_down(profile_files.read(files / "synthetic.json")).exposed
    assert {group: round(s * 1e6) for group, s in trace.items()} == {"tp": 180, "pp": 180}
    export = profile_breakdown.break_down(profile_files.read(files / "synthetic.sqlite")).exposed
    assert {group: round(s * 1e6) for group, s in export.items()} == {"": 360}


def test_a_trace_without_marks_is_summed_whole_and_divided_on_request(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(synthetic.chrome(marks=False)))
    recording = profile_files.read(path)
    assert (recording.steps, profile_breakdown.break_down(recording).seconds) == (0, pytest.approx(2.96e-3))
    assert profile_files.read(path, steps=3).steps == 3
    with pytest.raises(UserError, match=r"--steps 1,000,000,000"):
        profile_files.read(path, steps=1_000_000_000)


def test_steps_of_an_export_are_counted_by_ranges_or_by_the_optimizer(tmp_path):
    path = synthetic.export(tmp_path / "a.sqlite", marks="optimizer")
    recording = profile_nsys.read(path)
    assert (recording.steps, recording.end - recording.begin) == (3, 2_960_000)
    assert "Optimizer.step" in recording.marks
    assert profile_nsys.read(synthetic.export(tmp_path / "b.sqlite", marks="")).steps == 0


def test_hbm_is_read_from_counters_and_else_not_measured(tmp_path):
    recording = profile_nsys.read(synthetic.export(tmp_path / "a.sqlite", metrics=True))
    assert profile_nsys.hbm_share(recording.counters) == pytest.approx(0.41)
    assert profile_nsys.hbm_share(profile_nsys.read(synthetic.export(tmp_path / "b.sqlite")).counters) is None


def test_the_longest_gap_names_what_the_host_did(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "args": {"device": 0}}
    host = {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 1, "tid": 1, "args": {}}
    wide = {**host, "cat": "cpu_op", "name": "whole", "ts": 0, "dur": 9000}
    path = trace_of(
        tmp_path / "t.json",
        [
            {**kernel, "ts": 0, "dur": 1000},
            {**kernel, "ts": 5000, "dur": 1000},
            {**host, "ts": 1500, "dur": 3000},
            wide,
        ],
    )
    (gap,) = profile_breakdown.break_down(profile_torch.read(path)).gaps
    assert (gap.host, gap.seconds, gap.at_s) == ("cudaStreamSynchronize", pytest.approx(4e-3), pytest.approx(1e-3))


def test_steps_of_a_host_that_runs_ahead_are_those_of_the_gpu(tmp_path):
    step = {"ph": "X", "pid": 1, "tid": 1, "name": "ProfilerStep#1"}
    events = [
        {**step, "cat": "user_annotation", "ts": 0, "dur": 100},
        {**step, "cat": "gpu_user_annotation", "ts": 50, "dur": 1000},
        {**step, "cat": "kernel", "name": "gemm", "ts": 50, "dur": 1000, "args": {"device": 0}},
    ]
    sums = profile_breakdown.break_down(profile_torch.read(trace_of(tmp_path / "t.json", events)))
    assert (sums.seconds, sums.classes["products"]) == (pytest.approx(1e-3), pytest.approx(1e-3))


def test_gpus_of_one_file_are_shown_one_at_a_time(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 0}
    events = [{**kernel, "dur": 100 * (gpu + 1), "args": {"device": gpu}} for gpu in (0, 1)]
    path = trace_of(tmp_path / "t.json", events)
    assert profile_torch.read(path).gpus == (0, 1)
    assert profile_breakdown.break_down(profile_torch.read(path, gpu=1)).seconds == pytest.approx(200e-6)
    with pytest.raises(UserError, match=r"--gpu 2: .* has kernels of GPU 0, 1"):
        profile_torch.read(path, gpu=2)


@pytest.mark.parametrize("seed", range(20))
def test_every_moment_belongs_to_the_first_class_that_runs_then(tmp_path, seed):
    """Against a timeline that is painted nanosecond by nanosecond."""
    draw = random.Random(seed)
    names = {
        "products": "gemm",
        "attention": "flash",
        "norms": "layernorm",
        "elementwise": "mul",
        "communication": "nccl",
    }
    span, rows, events = 4000, [], []
    for _ in range(draw.randint(1, 60)):
        kind, start = draw.choice([*names]), draw.randrange(-300, span)
        end = start + draw.randrange(1, 300)
        rows.append((CLASSES.index(kind), start, end))
        event = {"ph": "X", "cat": "kernel", "name": names[kind], "pid": 0, "tid": 7, "args": {"device": 0}}
        events.append({**event, "ts": start / 1000, "dur": (end - start) / 1000})
    mark = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "ProfilerStep#0",
        "pid": 1,
        "tid": 1,
        "ts": 0,
        "dur": span / 1000,
    }
    gpu_mark = {**mark, "cat": "gpu_user_annotation"}
    sums = profile_breakdown.break_down(profile_torch.read(trace_of(tmp_path / "t.json", [mark, gpu_mark, *events])))
    painted = np.full(span, len(CLASSES))
    for kind, start, end in rows:
        inside = slice(max(0, start), max(0, min(span, end)))
        painted[inside] = np.minimum(painted[inside], kind)
    for kind in names:
        assert round(sums.classes[kind] * 1e9) == int((painted == CLASSES.index(kind)).sum()), kind
    nothing = int((painted == len(CLASSES)).sum())
    assert round((sums.classes["gaps"] + sums.classes["idle"]) * 1e9) == nothing
    assert sum(sums.classes.values()) == pytest.approx(span / 1e9, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_each_moment_of_a_thread_is_its_innermost_operation_s(seed):
    draw = random.Random(seed)
    leaves, painted = Leaves(), np.full(1000, -1)

    def nest(start, end, depth):
        kind = draw.choice([0, 1, 4, Leaves.HOLDS])
        leaves.add((1, 1), start, end, depth, kind)
        painted[start:end] = kind
        at = start
        while depth < 4 and at < end:
            first = draw.randint(at, end)
            last = draw.randint(first, end)
            if last > first:
                nest(first, last, depth + 1)
            at = last + 1

    nest(0, 1000, 0)
    start, end, _, kind = leaves.rows()
    measured = np.full(1000, -1)
    for row in zip(start.tolist(), end.tolist(), kind.tolist(), strict=True):
        assert (measured[row[0] : row[1]] == -1).all()
        measured[row[0] : row[1]] = row[2]
    assert (measured == painted).all()


def test_work_inside_the_optimizer_s_step_is_the_optimizer_s(tmp_path):
    op = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    events = [
        {**op, "cat": "user_annotation", "name": "Optimizer.step#Adam.step", "ts": 100, "dur": 100},
        {**op, "name": "aten::mul", "ts": 110, "dur": 50},
        {**op, "name": "aten::mul", "ts": 0, "dur": 30},
        {**op, "name": "autograd::engine::evaluate_function: MulBackward0", "ts": 40, "dur": 40},
    ]
    sums = profile_breakdown.break_down(profile_torch.read(trace_of(tmp_path / "t.json", events)))
    assert sums.classes["optimizer"] == pytest.approx(50e-6)
    assert sums.classes["elementwise"] == pytest.approx(30e-6)
    assert sums.classes["idle"] == pytest.approx(80e-6)
    assert {(top.kind, top.calls) for top in sums.top} == {("optimizer", None), ("elementwise", None)}


BROKEN = {
    "empty.json": (b"", "is empty"),
    "blank.json": (b" \n ", "is empty"),
    "words.json": (b"hello", "not a trace"),
    "other.json": (b'{"a": [1, 2, 3]}', "no list `traceEvents`"),
    "none.json": (b'{"traceEvents": []}', "no timed events"),
    "cut.json": (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur"',
        "corrupt after 0 events",
    ),
    "open.json": (
        b'[{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2, "tid": 1},',
        "corrupt after 1 events",
    ),
    "bad.json": (b'{"traceEvents": [{"a": nope}]}', "corrupt after 0 events"),
    "numbers.json": (b'{"traceEvents": [1, 2, 3]}', "no timed events"),
    "browser.json": (b'[{"ph": "X", "cat": "blink", "name": "a", "ts": 1, "dur": 2}]', "it has blink"),
    "deep.json": (b'{"traceEvents": [' + b"[" * 100_000, "corrupt after 0 events"),
    "binary.json": (bytes(range(256)), "not a trace"),
    "cut.gz": (gzip.compress(b'{"traceEvents": [' + b'{"a": 1},' * 9999)[:50], "truncated"),
    "notgz.gz": (b"\x1f\x8b nothing of it", "cannot be read|corrupt"),
    "cut.sqlite": (b"SQLite format 3\0" + b"x" * 5000, "corrupt SQLite|no kernel table"),
    "report.nsys-rep": (b"whatever", "which only nsys can read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_profile_is_refused_with_the_way_out(tmp_path, name):
    content, words = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as refused:
        profile_files.read(tmp_path / name)
    assert refused.value.hint


def test_a_cut_export_and_other_databases_are_refused(files, tmp_path):
    whole = (files / "synthetic.sqlite").read_bytes()
    (tmp_path / "half.sqlite").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="corrupt SQLite"):
        profile_files.read(tmp_path / "half.sqlite")
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as db:
        db.execute("create table songs (id int)")
        db.commit()
    with pytest.raises(UserError, match="songs"):
        profile_files.read(tmp_path / "other.sqlite")


def test_an_export_of_an_older_nsys_without_some_columns_is_read(tmp_path):
    path = synthetic.export(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.execute("alter table CUPTI_ACTIVITY_KIND_KERNEL drop column globalPid")
        db.execute("alter table CUPTI_ACTIVITY_KIND_KERNEL drop column gridX")
        db.execute("drop table TARGET_INFO_GPU")
        db.commit()
    sums = profile_breakdown.break_down(profile_nsys.read(path))
    assert round(sums.classes["products"] * 1e6) == synthetic.CLASSES_US["products"]
    assert sums.sm_busy is None


def test_reading_an_export_changes_nothing_beside_it(files):
    (files / "synthetic.sqlite").chmod(0o444)
    before = sorted(path.name for path in files.iterdir())
    profile_nsys.read(files / "synthetic.sqlite")
    assert sorted(path.name for path in files.iterdir()) == before


def test_a_predicted_step_is_no_measurement(tmp_path):
    path = trace_of(tmp_path / "step.json", [], otherData={"step_time_s_of_the_plan": 1.0})
    with pytest.raises(UserError, match="predicted step"):
        profile_files.read(path)


def test_a_large_trace_takes_little_memory(tmp_path):
    """60 MB take less than 30: a block and what is kept of an event; a gigabyte takes no more."""
    event = {"ph": "X", "cat": "other", "name": "x" * 400, "ts": 1, "dur": 2, "args": {"a": "b" * 100}}
    text = json.dumps(event)
    with (tmp_path / "t.json").open("w") as file:
        file.write('{"traceEvents": [')
        for _ in range(100_000):
            file.write(text + ",\n")
        file.write(text + "]}")
    tracemalloc.start()
    assert sum(1 for _ in Trace(tmp_path / "t.json").events()) == 100_001
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "t.json").stat().st_size > 5e7
    assert peak < 3e7


def test_an_event_that_lies_across_two_blocks_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("superpod.profiles.profile_stream.BLOCK", 37)
    synthetic.write(tmp_path)
    sums = profile_breakdown.break_down(profile_torch.read(tmp_path / "synthetic.json"))
    assert {kind: round(seconds * 1e6) for kind, seconds in sums.classes.items()} == synthetic.CLASSES_US


@pytest.mark.parametrize("times", ["null, 5", "5, null", "'soon', 9", "9, 5"])
def test_a_kernel_without_its_times_is_left_out(files, times):
    path = files / "synthetic.sqlite"
    before = profile_files.read(path).work.start.size
    with closing(sqlite3.connect(path)) as db:
        kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
        db.execute(f"create table loose as select * from {kernels}")  # without the rules of a whole export
        db.execute(f"drop table {kernels}")
        db.execute(f"alter table loose rename to {kernels}")
        db.execute(f"insert into {kernels} (start, end, deviceId) values ({times}, 0)")
        db.commit()
    assert profile_files.read(path).work.start.size == before
