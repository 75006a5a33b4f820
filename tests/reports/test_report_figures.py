"""Figures of reports, held against sums made here from the files themselves and against the planner."""

import json
from dataclasses import replace
from itertools import pairwise
from statistics import median

import numpy as np
import pytest

from superpod.planner import predict
from superpod.planner.timing import steptime
from superpod.reports import report, report_figures, report_text
from superpod.reports.runs import run_record
from superpod.reports.runs.run_record import OWN, Rank, Record, Span, Step
from superpod.runtime.rank import nsys
from tests.reports.report_cases import KILLED_TWICE, ON_SLURM, copied, job, known, lines_of, made_up


@pytest.mark.parametrize("name", [KILLED_TWICE, ON_SLURM])
def test_goodput_is_the_time_of_steps_that_count_over_the_wall_time(name, tmp_path):
    run = copied(name, tmp_path)
    figures = report_figures.compute_figures(run_record.read_run(run))
    results = [json.loads((a.path / "result.json").read_text()) for a in run.attempts]
    wall = results[-1]["ended"] - results[0]["started"]
    last = {line["step"]: line["step_time_s"] for line in lines_of(run)}
    assert figures.wall_s == pytest.approx(wall, abs=0.01)
    assert figures.goodput == pytest.approx(sum(last.values()) / wall, rel=1e-6)
    between = sum(after["started"] - before["ended"] for before, after in pairwise(results))
    assert figures.time_s["between attempts"] == pytest.approx(between)
    assert figures.time_s["repeated steps"] > 0
    assert sum(figures.time_s.values()) == pytest.approx(wall, abs=0.01)


def test_percentiles_are_numpys():
    seconds = [0.5, 0.9, 0.7, 3.0, 0.6, 0.8, 0.55]
    of = report_figures.compute_percentiles(seconds)
    assert [of["p50"], of["p90"], of["p99"]] == pytest.approx(np.percentile(seconds, [50, 90, 99]))
    assert report_figures.compute_percentiles([2.0]) == {"p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert report_figures.compute_percentiles([]) == {}


def test_measured_stands_beside_planned(tmp_path):
    run = made_up(tmp_path, slower=1.25)
    figures = report_figures.compute_figures(run_record.read_run(run))
    expected = predict.one(job())
    assert figures.planned is not None
    assert sum(figures.planned.terms_s.values()) == pytest.approx(expected.step_time_s)
    assert figures.step_s["p50"] == pytest.approx(known(expected.step_time_s) * 1.25)
    assert figures.mfu == pytest.approx(steptime.mfu(job(), figures.step_s["p50"]))
    assert figures.hfu == pytest.approx(figures.mfu)  # nothing is recomputed
    assert figures.planned.measured_stages_gib == [52.0, 47.0]
    assert max(figures.planned.stages_gib) == pytest.approx(expected.allocated_gib_max)
    assert figures.published is not None
    assert figures.published.recipe == "llama3_8b_pretrain_h100_bf16"
    assert "25% slower than planned" in figures.next
    shown = dict(report_text.build_rows(run_record.read_run(run), figures))
    assert "+25%" in shown["planned step"]
    assert shown["planned step"].startswith(expected.step_time)  # with its interval
    assert "989 TFLOP/s, the dense bf16 peak of the h100" in figures.flops_formula


def test_full_recomputation_counts_for_hfu_alone(tmp_path):
    record = run_record.read_run(made_up(tmp_path))
    assert record.job is not None
    recomputed = replace(record, job=record.job.replace(layout=record.job.layout.replace(recompute="full")))
    plain, full = report_figures.compute_figures(record), report_figures.compute_figures(recomputed)
    assert full.mfu == pytest.approx(plain.mfu)
    assert known(full.hfu) > 1.25 * known(plain.hfu)


def of_steps(seconds: list[float], **more: object) -> Record:
    steps = tuple(Step(i, "001", t=100.0 + i, seconds=s, loss=1.0) for i, s in enumerate(seconds, 1))
    return replace(Record("run", __file__, OWN, steps=steps), **more)  # pyright: ignore[reportArgumentType]


def test_drift_is_that_of_the_last_quarter():
    seconds = [9.0, *[1.0] * 10, *[1.3] * 10]
    assert report_figures.compute_figures(of_steps(seconds)).drift == pytest.approx(0.3)
    assert report_figures.compute_figures(of_steps(seconds[:5])).drift is None
    assert "30% slower" in report_figures.compute_figures(of_steps(seconds)).next


def test_slow_ranks_are_named_by_score_or_by_the_step_that_they_came_to():
    scored = tuple(Rank(i, f"n{i}", 9, "train", score=s) for i, s in enumerate([1.0, 0.7, 0.97, 0.9]))
    assert report_figures.compute_figures(of_steps([1.0], ranks=scored)).slow_ranks == (
        "rank 1 on n1: 70% of the fastest rank's speed",
        "rank 3 on n3: 90% of the fastest rank's speed",
    )
    behind = (Rank(0, "n0", 9, "train"), Rank(1, "n1", 7, "train"))
    assert report_figures.compute_figures(of_steps([1.0], ranks=behind)).slow_ranks == (
        "rank 1 on n1: at step 7 of 9 (train)",
    )


def test_times_that_contradict_each_other_give_no_goodput():
    back = (Span("001", 1000.0, 900.0),)
    assert report_figures.compute_figures(of_steps([1.0, 1.0], spans=back)).goodput is None
    short = (Span("001", 100.0, 101.0),)
    assert report_figures.compute_figures(of_steps([5.0, 5.0], spans=short)).goodput is None


def test_a_failed_run_is_sent_to_why_and_a_nan_to_its_lines():
    assert report_figures.compute_figures(of_steps([1.0], state="failed")).next.startswith("`recipes why ")
    losses = tuple(Step(i, "001", loss=2.0 if i < 30 else 9.0) for i in range(1, 60))
    rising = Record("run", __file__, OWN, steps=losses)  # pyright: ignore[reportArgumentType]
    assert "the loss" in report_figures.compute_figures(rising).next


def test_nothing_known_is_nothing_said():
    figures = report_figures.compute_figures(of_steps([]))
    assert (figures.steps, figures.mfu, figures.goodput, figures.step_s, figures.next) == (0, None, None, {}, "")
    assert "None" not in str(report_text.build_rows(of_steps([]), figures))
    assert report_text.build_comparison_rows([(of_steps([]), figures)])[0][2:] == ["0", *"-" * 8]


def test_the_steady_median_is_the_rate(tmp_path):
    record = run_record.read_run(copied(KILLED_TWICE, tmp_path))
    rates = [known(step.rate) for step in record.steady]
    assert report_figures.compute_figures(record).rate == median(rates)
    assert len(rates) == 57


def test_a_profile_in_the_folder_tells_the_step_by_term(tmp_path):
    """A trace of one step that was written by hand: a matrix product of 3 s, a reduction of 1 s beside nothing."""
    run = made_up(tmp_path)
    folder = run.path / nsys.FOLDER / "rank-0" / "device"
    folder.mkdir(parents=True)
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#10", "ts": 0, "dur": 4e6, "pid": 1, "tid": 1},
        kernel("nvjet_tst_128x256", 0, 3e6),
        kernel("ncclDevKernel_ReduceScatter_Sum_f32", 3e6, 1e6),
    ]
    trace = {"traceEvents": events, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
    (folder / "rank-0.json").write_text(json.dumps(trace))
    figures = report_figures.compute_figures(run_record.read_run(run))
    assert figures.planned is not None
    measured = {name: own for name, _, own in figures.planned.profiled}
    assert sum(measured.values()) == pytest.approx(4.0, rel=0.01)
    assert 3.0 in [pytest.approx(own, rel=0.01) for own in measured.values()]
    planned = sum(value for _, value, _ in figures.planned.profiled)
    assert planned == pytest.approx(figures.planned.step_s, rel=0.01)
    assert "by term" in dict(report_text.build_rows(run_record.read_run(run), figures))


def kernel(name: str, start: float, length: float) -> dict:
    args = {"device": 0, "stream": 7, "correlation": int(start) + 1}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "pid": 0, "tid": 7, "args": args}


def test_a_run_that_is_faster_than_its_plan_is_sent_to_calibrate_once(tmp_path):
    run = made_up(tmp_path, slower=0.8)
    record = run_record.read_run(run)
    shown = [
        *report.build_rows(report.summary(run)),
        *report_text.build_rows(record, report_figures.compute_figures(record)),
    ]
    assert sum("recipes calibrate" in words for _, words in shown) == 1
    assert dict(shown)["next"].startswith("faster than planned")


@pytest.mark.parametrize(
    ("idle_s", "slower", "says"),
    [
        (3000.0, 1.2, "of the time was lost (starting), about 14 GPU hours: "),
        (3000.0, 4.0, "300% slower than planned, about "),
        (0.0, 1.2, "20% slower than planned, about "),
    ],
)
def test_the_loss_that_costs_more_gpu_hours_is_the_next_move(idle_s, slower, says, tmp_path):
    run = made_up(tmp_path, slower=slower, steps=200)
    record = run_record.read_run(run)
    (span,) = record.spans
    assert span.began is not None
    waited = replace(record, spans=(replace(span, began=span.began - idle_s),))
    assert says in report_figures.compute_figures(waited).next


def test_waiting_for_data_names_the_cause_of_slow_steps(tmp_path):
    record = run_record.read_run(made_up(tmp_path, slower=1.5, steps=200))
    assert report_figures.compute_figures(replace(record, waiting=0.3)).next.startswith(
        "30% of a step is spent waiting for data, about "
    )
