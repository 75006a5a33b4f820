"""Times that cannot be are omitted of a profile, and it says how many, why, and which was the first."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from superpod.errors import UserError
from superpod.profiles import profile_breakdown, profile_files, profile_summary
from superpod.profiles.profile_times import DAY_NS, Times
from tests.profiles import synthetic_profiles as synthetic
from tests.profiles.test_profile_reading import trace_of

AT = float(synthetic.BEGIN_US)
FAR_US = 10 * DAY_NS / 1000
BAD = {
    "negative": ({"ts": AT + 5, "dur": -3.0}, "1 of negative duration (odd)"),
    "nan": ({"ts": float("nan"), "dur": 3.0}, "1 without a number (odd)"),
    "infinite": ({"ts": AT, "dur": float("inf")}, "1 without a number (odd)"),
    "text": ({"ts": "soon", "dur": 3.0}, "1 without a number (odd)"),
    "none": ({"ts": AT}, "1 without a number (odd)"),
    "huge": ({"ts": 10**400, "dur": 3.0}, "1 without a number (odd)"),
    "past 64 bits": ({"ts": 1e17, "dur": 3.0}, "1 more than a day away from the others (odd)"),
    "before 64 bits": ({"ts": -1e17, "dur": 3.0}, "1 more than a day away from the others (odd)"),
    "far": ({"ts": AT + FAR_US, "dur": 3.0}, "1 more than a day away from the others"),
    "long ago": ({"ts": AT - FAR_US, "dur": 3.0}, "1 more than a day away from the others"),
    "long": ({"ts": AT, "dur": FAR_US}, "1 longer than a day (odd)"),
}
CATEGORIES = ("kernel", "gpu_memcpy", "cuda_runtime", "cpu_op")


def summed(path):
    recording = profile_files.read(path)
    return profile_summary.summarize(path, recording), profile_breakdown.break_down(recording)


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("case", BAD)
def test_one_impossible_event_changes_no_second_and_is_told(tmp_path, case, category):
    times, words = BAD[case]
    trace = synthetic.chrome()
    event = {
        "ph": "X",
        "cat": category,
        "name": "odd",
        "pid": 0,
        "tid": 7,
        "args": {"device": 0, "correlation": 99_999},
    }
    trace["traceEvents"].append(event | times)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace))
    summary, sums = summed(path)
    assert {kind: round(s * 1e6) for kind, s in sums.classes.items()} == synthetic.CLASSES_US
    assert [note for note in summary.notes if "omitted" in note] == [f"omitted 1 event with implausible times: {words}"]


@pytest.mark.parametrize("name", ["ProfilerStep#7", "odd"])
def test_a_mark_or_an_operation_of_a_cpu_far_away_stretches_no_step(tmp_path, name):
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mul", "pid": 1, "tid": 1}
    near = [{**op, "ts": 100.0 * i, "dur": 100.0} for i in range(5)]
    path = trace_of(tmp_path / "t.json", [{**op, "name": name, "ts": FAR_US, "dur": 5.0}, *near])
    summary, sums = summed(path)
    assert sums.seconds == pytest.approx(500e-6)
    assert "omitted 1 event with implausible times: 1 more than a day away from the others" in summary.notes


def test_every_reason_is_counted_and_the_healthy_trace_says_nothing(tmp_path):
    trace = synthetic.chrome()
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace))
    assert not any("omitted" in note for note in summed(path)[0].notes)
    kernel = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "args": {"device": 0}}
    trace["traceEvents"] += [{**kernel, "name": f"odd {i}", "ts": AT, "dur": -1.0} for i in range(1234)]
    trace["traceEvents"] += [{**kernel, "name": "nan", "ts": AT, "dur": float("nan")}]
    path.write_text(json.dumps(trace))
    (note,) = [note for note in summed(path)[0].notes if "omitted" in note]
    assert note == (
        "omitted 1,235 events with implausible times: 1,234 of negative duration (odd 0), 1 without a number (nan)"
    )


def test_events_that_are_not_read_are_not_counted(tmp_path):
    trace = synthetic.chrome()
    trace["traceEvents"] += [{"ph": "X", "cat": "python_function", "name": "f", "ts": AT, "dur": -1.0}]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace))
    assert not any("omitted" in note for note in summed(path)[0].notes)


def test_a_trace_of_nothing_else_is_refused_with_the_counts(tmp_path):
    event = {"ph": "X", "cat": "kernel", "name": "odd", "ts": 1, "dur": -2}
    with pytest.raises(UserError, match=r"2 of negative duration \(odd\)"):
        profile_files.read(trace_of(tmp_path / "t.json", [event, event]))


def inserted(path, *rows):
    """The export without its rules, as a damaged one may be, and with these kernels."""
    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"create table loose as select * from {kernels}")
        db.execute(f"drop table {kernels}")
        db.execute(f"alter table loose rename to {kernels}")
        db.executemany(f"insert into {kernels} (start, end, deviceId) values (?, ?, 0)", rows)
        db.commit()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((9, 5), "1 of negative duration (?)"),
        ((5, None), "1 without a number (?)"),
        ((0, 2 * DAY_NS), "1 longer than a day (?)"),
        ((-(2**63), 2**63 - 1), "1 longer than a day (?)"),
        ((2**63 - 10, 2**63 - 1), "1 more than a day away from the others (?)"),
        ((5, 6), "1 more than a day away from the others"),
    ],
)
def test_an_export_tells_them_too(tmp_path, row, words):
    path = synthetic.export(tmp_path / "a.sqlite")
    inserted(path, row)
    summary, sums = summed(path)
    assert {kind: round(s * 1e6) for kind, s in sums.classes.items()} == synthetic.CLASSES_US
    assert f"omitted 1 event with implausible times: {words}" in summary.notes


def test_a_range_of_an_export_far_away_is_no_step(tmp_path):
    path = synthetic.export(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.execute("INSERT INTO NVTX_EVENTS VALUES (5, 2000005, 59, 'iteration 99', NULL, ?)", (synthetic.PID + 5,))
        db.execute("INSERT INTO NVTX_EVENTS VALUES (5, NULL, 34, 'a mark', NULL, ?)", (synthetic.PID + 5,))
        db.commit()
    summary, sums = summed(path)
    assert sums.steps == synthetic.STEPS
    assert [note for note in summary.notes if "omitted" in note] == [
        "omitted 1 event with implausible times: 1 more than a day away from the others (iteration 99)"
    ]


def test_a_day_from_the_middle_is_near_and_a_moment_more_is_not():
    times = Times()
    times.set_median(np.array([0, 0, 0], dtype=np.int64))
    assert times.is_near(np.array([DAY_NS, -DAY_NS, DAY_NS + 10**6], dtype=np.int64)).tolist() == [True, True, False]
    assert times.span(DAY_NS, 0, 1, "a") == (DAY_NS, DAY_NS)
    assert times.span(DAY_NS + 10**6, 0, 1, "b") is None
    assert times.text == "1 event with implausible times: 1 more than a day away from the others (b)"
