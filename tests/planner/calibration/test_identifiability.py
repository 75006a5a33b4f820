"""Planted machines: `recipes calibrate` names the planted cause, or says which causes the runs cannot tell apart."""

from typing import Any

import numpy as np
import pytest

from superpod.errors import UserError
from superpod.planner import predict
from superpod.planner.calibration import calibration_file
from superpod.planner.calibration.calibrate import MeasuredRun, apply_corrections, calibrate
from superpod.planner.planned_job import PlannedJob
from tests.planner.calibration.test_calibrate import job, noisy, seconds


def sized(model: str, gpus: int, seq: int, mbs: int, **layout: Any) -> PlannedJob:
    run = job(model, gpus, seq, **layout)
    return run.replace(layout=run.layout.replace(mbs=mbs))


RUNS = [
    job("llama3_8b", 8, gbs=64),
    job("llama3_8b", 8, tp=2, gbs=64),
    job("llama3_8b", 16, tp=4, gbs=128),
    job("llama3_8b", 32, 2048, tp=2, pp=2, gbs=128),
    job("llama3_8b", 32, pp=4, gbs=128),
    job("llama3_8b", 64, 32768, tp=2, cp=2, gbs=64),
    job("llama3_8b", 128, 2048, pp=4, gbs=128),
    job("llama3_70b", 64, tp=4, pp=4, vp=5, gbs=128),
    job("llama3_70b", 128, tp=8, pp=4, vp=5, gbs=128),
    job("llama2_7b", 16, 2048, tp=16, gbs=64),
    job("llama2_7b", 128, 2048, pp=8, gbs=128),
    sized("llama32_1b", 8, 2048, 4, gbs=128),
    job("llama32_1b", 8, 1024, gbs=64),
    job("llama32_1b", 8, 2048, tp=4, gbs=64),
    job("llama32_1b", 16, 1024, tp=2, gbs=128),
    job("llama32_1b", 64, 1024, pp=4, gbs=512),
]
EXPERTS = [
    job("mixtral_8x7b", 64, 4096, pp=4, ep=8, gbs=256),
    job("mixtral_8x7b", 32, 4096, tp=2, pp=2, ep=4, gbs=128),
    job("qwen3_30b_a3b", 16, 4096, ep=8, gbs=128),
    job("qwen3_30b_a3b", 32, 4096, tp=2, ep=8, gbs=128),
]
MACHINES = {
    "launches": 4.0,
    "far_bandwidth": 0.5,
    "far_latency": 3.0,
    "attention": 1.5,
    "experts": 1.5,
    "general": 1.3,
}


@pytest.mark.parametrize("cause", [pytest.param(c, marks=pytest.mark.slow) if c != "launches" else c for c in MACHINES])
def test_a_planted_cause_is_found_or_said_to_be_inseparable(cause):
    planted = MACHINES[cause]
    jobs = RUNS + (EXPERTS if cause == "experts" else [])
    fitted = calibrate(noisy(jobs, {cause: planted}))
    if cause in fitted.ranges:
        low, high = fitted.ranges[cause]
        assert low <= planted <= high
    else:
        assert any(cause in group for group in fitted.groups)
    assert set(fitted.ranges) <= {cause}, "another cause alone"
    grouped = {name for group in fitted.groups for name in group}
    assert set(calibration_file.changed_values(fitted)) <= {cause, *grouped}


def test_one_layout_on_few_nodes_tells_causes_of_a_slow_network_apart_from_nothing():
    """Launches of four times the time are not reported as a slow network, where runs cannot tell them apart."""
    jobs = [job("llama32_1b", gpus, 1024, tp=2, gbs=128) for gpus in (16, 32, 64)]
    fitted = calibrate(noisy(jobs, {"launches": 4.0}))
    assert set(fitted.ranges) <= {"launches"}
    assert "launches" in fitted.ranges or any("launches" in group for group in fitted.groups)


def test_runs_that_need_no_correction_get_none():
    fitted = calibrate(noisy(RUNS, {}))
    assert calibration_file.changed_values(fitted) == {}
    assert fitted.ranges == {}
    assert fitted.groups == []
    assert "experts" in fitted.undetermined
    lines = calibration_file.summarize(fitted)
    assert "no correction: the default constants explain these runs best" in lines
    assert any(line.startswith("not determined by these runs") and "experts" in line for line in lines)


@pytest.mark.parametrize("factor", [8.0, 1000.0, 1 / 8])
def test_times_that_no_machine_has_are_refused(factor):
    """Rates of the whole cluster, milliseconds, samples instead of tokens."""
    runs = [MeasuredRun(str(i), run, seconds(run) * factor) for i, run in enumerate(RUNS[:6])]
    with pytest.raises(UserError, match=r"bound") as refused:
        calibrate(runs)
    assert "tokens/s of one GPU, not of all, not samples/s" in refused.value.hint


def test_a_value_beyond_its_bound_is_refused_with_both():
    runs = [MeasuredRun(str(i), run, seconds(run) * 8) for i, run in enumerate(RUNS[:3])]
    with pytest.raises(UserError, match=r"general would be \d\.\d+, above its bound 4: no machine"):
        calibrate(runs)


@pytest.mark.slow
def test_predictions_of_a_group_are_as_good_as_those_of_a_cause():
    jobs = [job("llama3_8b", 16, tp=tp, gbs=128) for tp in (1, 2, 4, 8)]
    values = {"far_bandwidth": 0.4}
    fitted = calibrate(noisy(jobs, values, 0.005))
    unseen = job("llama3_8b", 32, tp=2, gbs=128)
    real = predict.one(apply_corrections(unseen, values)).step_time_s
    assert seconds(apply_corrections(unseen, fitted.values)) == pytest.approx(real, rel=0.05)


def test_a_group_is_one_sentence_and_a_remark_in_the_file(fitted_pair):
    sentences = [line for line in calibration_file.summarize(fitted_pair) if "cannot tell apart" in line]
    assert sentences == [
        "these runs cannot tell apart: far_bandwidth, launches; one choice that explains them: far_bandwidth 0.7"
    ]
    assert not any(line.startswith("far_bandwidth") for line in calibration_file.summarize(fitted_pair))
    text = calibration_file.format_toml([fitted_pair], "runs")
    assert "far_bandwidth = 0.7" in text
    assert "not told apart from launches" in text


@pytest.fixture
def fitted_pair():
    """A calibration whose runs cannot tell a slow network from slow launches."""
    from superpod.planner.calibration.calibrate import Calibration

    times = [np.ones(1)] * 4
    return Calibration(
        "h100", {"far_bandwidth": 0.7}, ["a"], *times, noise=0.03, groups=[("far_bandwidth", "launches")]
    )


def test_three_runs_that_are_all_slower_get_a_correction():
    jobs_and_factors = zip((RUNS[4], RUNS[6], RUNS[7]), (1.42, 1.49, 1.55), strict=True)
    runs = [MeasuredRun(str(i), one, seconds(one) * factor) for i, (one, factor) in enumerate(jobs_and_factors)]
    fitted = calibrate(runs)
    errors = [np.median(np.abs(np.log(t / fitted.measured))) for t in (fitted.calibrated_times, fitted.default_times)]
    assert errors[0] < 0.5 * errors[1]
