"""The trace file: the documented format, tracks without gaps, slices that sum to the step, arrows that land.

Perfetto's own trace processor is a binary that the package `perfetto` downloads from a server out of reach here; these
tests hold the file against the format's description instead (Google, "Trace Event Format").
"""

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest

from superpod.pages import step_timeline, trace
from tests.cli.planning.small_plans import printed
from tests.pages.planning import job

RUNS = [{"tp": 2}, {"tp": 2, "pp": 4, "sp": True}, {"tp": 2, "pp": 4, "vp": 4, "sp": True}, {"sharding": "zero3"}]


def traced(run):
    step = step_timeline.simulate_step(run)
    return step, json.loads(trace.render_trace(run, step, title="a <run>", command="recipes explain"))


def slices(document, category):
    tracks = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == category:
            tracks[event["tid"]].append(event)
    return tracks


@pytest.mark.parametrize("layout", RUNS, ids=str)
def test_tracks_cover_the_step_without_gaps(layout):
    step, document = traced(job(**layout))
    tracks = slices(document, "step")
    assert sorted(tracks) == list(range(step.ranks))
    for events in tracks.values():
        assert events[0]["ts"] == 0
        for one, after in pairwise(events):
            assert one["ts"] + one["dur"] == pytest.approx(after["ts"], abs=1e-3)
        assert sum(event["dur"] for event in events) == pytest.approx(step.step_s * 1e6, rel=1e-9)
    assert document["otherData"]["step_time_s"] == step.step_s
    assert document["otherData"]["step_time_s_of_the_plan"] == step.plan_s


@pytest.mark.parametrize("layout", RUNS, ids=str)
def test_the_terms_of_a_pass_fill_it(layout):
    _, document = traced(job(**layout))
    inner = slices(document, "pass")
    for rank, events in slices(document, "step").items():
        passes = [event for event in events if event["name"].split()[0] in ("forward", "backward")]
        assert sum(e["dur"] for e in passes) == pytest.approx(sum(e["dur"] for e in inner[rank]), rel=1e-9)
        parts = iter(inner[rank])
        part = next(parts)
        for event in passes:  # Perfetto nests slices only if they lie within each other
            end = event["ts"] + event["dur"]
            while part is not None and part["ts"] < end - 1e-6:
                assert event["ts"] - 1e-6 <= part["ts"]
                assert part["ts"] + part["dur"] <= end + 1e-6
                part = next(parts, None)
        assert part is None


def test_the_file_has_the_documented_format():
    _, document = traced(job(tp=2, pp=4, vp=2, sp=True))
    assert set(document) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M", "s", "f")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert names[0] == "pipeline rank 0: GPUs 0-15, layers 0-3, 16-19"
    assert len(names) == 4


def test_arrows_connect_the_right_passes():
    step, document = traced(job(tp=2, pp=4, vp=2, sp=True))
    ends = defaultdict(dict)
    for event in document["traceEvents"]:
        if event["ph"] in ("s", "f"):
            ends[event["id"]][event["ph"]] = event
    assert len(ends) == 2 * (4 * 2 - 1) * (128 // 8)  # every pass but the first, forward, and the last, backward
    passes = slices(document, "step")

    def at(event):
        return next(p for p in passes[event["tid"]] if p["ts"] <= event["ts"] <= p["ts"] + p["dur"])

    for pair in ends.values():
        source, target = at(pair["s"]), at(pair["f"])
        assert source["name"] == target["name"]
        assert source["ts"] + source["dur"] <= target["ts"] + 1e-3
        assert pair["f"]["bp"] == "e"
        assert abs(pair["s"]["tid"] - pair["f"]["tid"]) in (1, step.ranks - 1)


def test_explain_writes_a_plain_or_compressed_trace(recipes_cli, tmp_path):
    words = ("explain", "llama3_8b", "--gpu", "h100", "--gpus", "16", "--gbs", "64", "--layout", "tp=2,pp=2,vp=2,sp")
    printed(recipes_cli, *words, "--trace", "step.json", cwd=tmp_path)
    printed(recipes_cli, *words, "--trace", "step.json.gz", cwd=tmp_path)
    plain = json.loads((tmp_path / "step.json").read_text())
    packed = json.loads(gzip.decompress((tmp_path / "step.json.gz").read_bytes()))
    assert plain["traceEvents"] == packed["traceEvents"]
    assert len(plain["traceEvents"]) > 100
    assert "--trace step.json" in plain["otherData"]["command"]
