"""The 80 % intervals of predictions."""

from __future__ import annotations

import pytest

from superpod.planner import intervals, models, predict
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from tests.planner.test_physical_bounds import FACTS, job


def h100(model: str, **changes: object) -> PlannedJob:
    return job(models.find(model), FACTS.node("h100"), "bf16").replace(**changes)


def test_a_known_model_and_an_unknown_one_have_their_own_class():
    assert intervals.from_job(h100("llama3_8b")).name == "dense, known model"
    assert intervals.from_job(h100("phi3_4b" if "phi3_4b" in models.names() else "gemma2_9b")).name.startswith("dense")
    assert intervals.from_job(h100("mixtral_8x7b")).name == "experts, known model"
    assert intervals.from_job(h100("deepseek_v2_lite")).name == "experts, unknown model"
    assert intervals.from_job(h100("llama3_8b", task="lora")).name == "fine-tuning, known model"


def test_predictions_carry_an_interval_around_them():
    prediction = predict.one(h100("llama3_8b", layout=Layout(tp=2, mbs=1, gbs=128, sp=True)))
    times = [prediction.step_time_low_s or 0.0, prediction.step_time_s or 0.0, prediction.step_time_high_s or 0.0]
    sizes = [prediction.allocated_low_gib or 0.0, prediction.allocated_high_gib or 0.0]
    assert times == sorted(times)
    assert sizes == sorted(sizes)


def test_beyond_the_largest_published_run_the_interval_is_twice_as_wide():
    small, large = h100("llama3_8b"), h100("llama3_8b", gpus=100_000)
    assert intervals.from_job(small).beyond == ""
    assert "GPUs" in intervals.from_job(large).beyond
    low, high = intervals.from_job(large).time_factors(100_000)
    assert float(low) == pytest.approx(intervals.from_job(small).time[0] ** 2)
    assert float(high) == pytest.approx(intervals.from_job(small).time[1] ** 2)


def test_a_gpu_of_which_no_run_was_fitted_is_an_extrapolation():
    vr200 = h100("llama3_8b").replace(node=FACTS.node("vr200"))
    assert "the generation rubin (the constants are those of blackwell)" in intervals.from_job(vr200).beyond
    low, high = intervals.from_job(vr200).time_factors(8)
    assert float(low) == pytest.approx(intervals.from_job(h100("llama3_8b")).time[0] ** 2)
    assert float(high) == pytest.approx(intervals.from_job(h100("llama3_8b")).time[1] ** 2)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(14.44, "14.4 s (13.0-15.9)"), (0.0824, "0.0824 s (0.0742-0.0906)"), (130, "130 s (117-143)")],
)
def test_a_time_is_shown_to_three_digits(seconds, shown):
    assert intervals.text(seconds, 0.9 * seconds, 1.1 * seconds) == shown
