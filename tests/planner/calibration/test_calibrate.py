"""What `recipes calibrate` makes of measured runs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from superpod.errors import UserError
from superpod.planner import explain, hardware, models, predict, search
from superpod.planner.calibration import calibration_file, corrections
from superpod.planner.calibration.calibrate import Calibration, MeasuredRun, apply_corrections, calibrate
from superpod.planner.hardware import hardware_file
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob

NODE = hardware.node("h100")
FABRIC = hardware.builtin().fabric_of(NODE)


def job(model: str, gpus: int, seq: int = 8192, **layout: Any) -> PlannedJob:
    laid = Layout(sp=layout.get("tp", 1) > 1, mbs=1, **layout)
    return PlannedJob(models.find(model), NODE, FABRIC, gpus, seq, "bf16", laid)


FIVE = [
    job("llama3_8b", 16, tp=2, gbs=128),
    job("llama3_8b", 32, 2048, pp=4, gbs=128),
    job("llama32_1b", 64, 1024, pp=4, gbs=512),
    job("llama3_70b", 64, tp=4, pp=4, vp=5, gbs=128),
    job("llama3_70b", 128, tp=4, pp=4, vp=5, gbs=128),
]


def planted(job: PlannedJob) -> PlannedJob:
    """The same run on a quarter of the bandwidth, three times the latency between nodes, gradients not overlapped."""
    slow = replace(FABRIC, gbps=FABRIC.gbps / 4, latency_us=FABRIC.latency_us * 3)
    return job.replace(fabric=slow, options=replace(job.options, overlap_grads=False))


def seconds(job: PlannedJob) -> float:
    taken = predict.one(job).step_time_s
    assert taken is not None
    return taken


@pytest.mark.parametrize("digits", [pytest.param(12, marks=pytest.mark.slow), 5])
@pytest.mark.slow
def test_a_planted_network_is_found_within_a_tenth(digits):
    runs = [MeasuredRun(str(i), run, float(f"{seconds(planted(run)):.{digits}g}")) for i, run in enumerate(FIVE)]
    fitted = calibrate(runs)
    assert fitted.values["far_bandwidth"] == pytest.approx(0.25, rel=0.1)
    assert fitted.values["far_latency"] == pytest.approx(3.0, rel=0.1)
    assert fitted.values["overlap_grads"] < 0.1
    changed = set(calibration_file.changed_values(fitted))
    assert changed <= {"far_bandwidth", "far_latency", "overlap_grads"}
    assert fitted.error(fitted.default_times) > 0.05 > 0.001 > fitted.error(fitted.held_out_times)


def noisy(jobs: list[PlannedJob], values: dict[str, float], scatter: float = 0.02) -> list[MeasuredRun]:
    drawn = np.random.default_rng(1).normal(0, scatter, len(jobs))
    return [MeasuredRun(str(i), run, seconds(apply_corrections(run, values)) * float(np.exp(d)))
            for i, (run, d) in enumerate(zip(jobs, drawn, strict=True))]  # fmt: skip


def test_three_rows_already_help():
    truth = {"general": 1.3, "far_bandwidth": 0.4}
    fitted = calibrate(noisy([FIVE[0], FIVE[3], FIVE[4]], truth))
    unseen = [job("llama3_70b", 256, tp=4, pp=4, vp=5, gbs=128), job("llama3_8b", 128, tp=2, gbs=128)]
    for run in unseen:
        real = seconds(apply_corrections(run, truth))
        before, after = (abs(seconds(at) / real - 1) for at in (run, apply_corrections(run, fitted.values)))
        assert after < 0.7 * before


@pytest.mark.slow
def test_a_row_that_is_far_off_bends_nothing():
    jobs = [job("llama3_8b", gpus, tp=tp, gbs=128) for gpus in (16, 32, 64, 128) for tp in (1, 2, 4, 8)]
    runs = noisy(jobs, {"general": 1.25})
    odd = [replace(run, seconds=run.seconds * 40) if i in (3, 9) else run for i, run in enumerate(runs)]
    clean, bent = calibrate(runs), calibrate(odd)
    others = [i for i in range(len(jobs)) if i not in (3, 9)]
    assert np.abs(bent.calibrated_times[others] / clean.measured[others] - 1).max() < 0.08


def test_tensor_parallelism_between_nodes_has_a_latency_of_its_own():
    jobs = [job("llama2_7b", gpus, 2048, tp=tp, gbs=64) for gpus in (16, 32) for tp in (4, 8, 16)]
    fitted = calibrate(noisy(jobs, {"tp_latency": 20.0}, 0))
    product = fitted.values["tp_latency"] * fitted.values["far_latency"]
    assert product == pytest.approx(20, rel=0.1)
    unseen = job("llama2_7b", 32, 2048, tp=32, gbs=64)
    real = seconds(apply_corrections(unseen, {"tp_latency": 20.0}))
    assert seconds(apply_corrections(unseen, fitted.values)) == pytest.approx(real, rel=0.05)
    assert seconds(unseen) < 0.7 * real


def roomy_to_full() -> list[PlannedJob]:
    """Pipelines and none, whose fullest rank takes from a third to nearly all of a GPU."""
    laid = [(pp, mbs) for pp in (1, 2, 4) for mbs in (1, 2, 4, 8)]
    jobs = [job("llama32_1b", gpus, 4096, pp=pp, gbs=128) for gpus in (8, 16) for pp, _ in laid]
    return [run.replace(layout=run.layout.replace(mbs=mbs)) for run, (_, mbs) in zip(jobs, laid * 2, strict=True)]


FULL = {"alloc_retries": 0.8, "full_from": 0.6}


def share(run: PlannedJob) -> float:
    """Of what a GPU may take, what its fullest rank reserves."""
    one = predict.one(run)
    assert one.reserved_gib_max is not None
    return one.reserved_gib_max / one.limit_gib


def test_a_pipeline_waits_for_memory_where_it_is_nearly_full():
    """Rises from nothing to `alloc_retries` seconds for each micro-batch, and not without a pipeline."""
    for run in roomy_to_full():
        fast, slow = seconds(run), seconds(apply_corrections(run, FULL))
        pp = run.layout.pp
        if pp == 1 or share(run) < 0.5:
            assert slow == pytest.approx(fast, rel=1e-3)
        elif share(run) > 0.65:
            passes = run.micro_batches + pp - 1  # the pipeline fills and drains at that pace too
            assert slow - fast == pytest.approx(0.8 * (1 - 1 / pp) * passes, rel=0.02)


@pytest.mark.slow
def test_memory_that_is_waited_for_is_found_in_the_runs():
    runs = roomy_to_full()
    fitted = calibrate(noisy(runs, {"general": 1.2} | FULL))
    assert fitted.values["alloc_retries"] == pytest.approx(0.8, rel=0.1)
    shares = [share(run) for run in runs if run.layout.pp > 1]
    roomy, full = max(s for s in shares if s < 0.6), min(s for s in shares if s > 0.6)
    assert roomy < fitted.values["full_from"] < full
    assert fitted.error(fitted.calibrated_times) < 0.05 < fitted.error(fitted.default_times)
    lines = calibration_file.summarize(fitted)
    assert any(line.startswith("full_from 0.") and line.endswith("%") for line in lines)


def test_a_cap_on_a_run_fills_no_gpu():
    run = apply_corrections(job("llama32_1b", 16, 4096, pp=4, gbs=128), FULL)
    capped = run.replace(options=replace(run.options, memory_cap=share(run) * 80))
    assert seconds(capped) == pytest.approx(seconds(run), rel=1e-12)


def test_a_wait_for_memory_is_named_with_the_way_round():
    waits = hardware_file.add(written({"alloc_retries": 0.8, "full_from": 0.5}), "mine.toml", hardware.builtin())
    result = search.search(job("llama32_1b", 16, 8192, gbs=128).replace(node=waits.node("h100")))
    full = (result.fields["pp"] > 1) & (result.reserved > 0.55 * result.cap) & result.fits
    sentences = " ".join(explain.explain_layout(result, int(np.flatnonzero(full)[0])))
    assert "a pipeline spends 0.8 s per micro-batch on allocation retries" in sentences
    assert "expandable_segments:True" in sentences
    roomy = (result.fields["pp"] == 1) & result.fits
    assert "allocation retries" not in " ".join(explain.explain_layout(result, int(np.flatnonzero(roomy)[0])))


def test_a_search_avoids_memory_that_is_waited_for():
    waits = hardware_file.add(written(FULL), "mine.toml", hardware.builtin()).node("h100")
    run = job("llama32_1b", 16, 8192, gbs=128)
    shipped, slow = search.search(run), search.search(run.replace(node=waits))
    pipelines = shipped.fields["pp"] > 1
    longer = slow.seconds / shipped.seconds - 1
    assert longer[pipelines & (shipped.reserved > 0.65 * shipped.cap) & shipped.fits].min() > 0.01
    assert np.abs(longer[~pipelines | (shipped.reserved < 0.5 * shipped.cap)]).max() < 2e-3


def test_one_run_moves_the_general_time_most():
    fitted = calibrate(noisy([job("llama3_8b", 8, gbs=64)], {"general": 1.4}, scatter=0.0))
    assert fitted.error(fitted.calibrated_times) < 0.1
    assert fitted.values["far_bandwidth"] == pytest.approx(1, abs=0.05)


def test_undetermined_corrections_are_reported_and_left_out():
    within = [job("llama3_8b", 8, tp=tp, gbs=64) for tp in (2, 4, 8)]
    fitted = calibrate(noisy(within, {"near_bandwidth": 0.6}))
    unmeasured = {"far_bandwidth", "far_latency", "late_senders", "overlap_pp"}
    assert unmeasured <= set(fitted.undetermined)
    assert not unmeasured & set(calibration_file.changed_values(fitted))

    times = [np.ones(1)] * 4
    one = Calibration(
        "h100", {"general": 1.3}, ["a"], *times, noise=0.03, ranges={"general": (1.2, 1.4)}, undetermined=["experts"]
    )
    lines = calibration_file.summarize(one)
    assert any(line.startswith("general 1.3 (80 %: 1.2 to 1.4): ") for line in lines)
    assert lines[-1].endswith("left at the default: experts")


def test_a_slow_link_that_may_be_a_missing_overlap_is_said_to_be_inseparable():
    truth = {"near_bandwidth": 0.7}
    fitted = calibrate(noisy([job("llama3_8b", 8, tp=8, gbs=64), job("llama3_8b", 8, tp=8, gbs=128)], truth))
    assert any({"near_bandwidth", "overlap_tp"} <= set(group) for group in fitted.groups)


def test_a_calibration_that_has_been_applied_is_not_applied_twice():
    runs = noisy(FIVE[:2], {"general": 1.3}, 0)
    calibrated = [replace(run, job=apply_corrections(run.job, {"general": 1.3})) for run in runs]
    assert calibrate(calibrated).values["general"] == pytest.approx(calibrate(runs).values["general"])


@pytest.mark.parametrize("kind", ["allocated_gib", "reserved_gib"])
def test_measured_memory_makes_plans_need_as_much(kind):
    runs = noisy(FIVE[:2], {}, 0)
    shipped = [getattr(predict.one(run.job), f"{kind}_max") for run in runs]
    fitted = calibrate([replace(run, **{kind: 1.2 * gib}) for run, gib in zip(runs, shipped, strict=True)])
    assert fitted.values["allocated"] == pytest.approx(1.2, rel=0.05)
    assert fitted.values["general"] == pytest.approx(1, abs=0.02)
    needs = getattr(predict.one(apply_corrections(runs[0].job, fitted.values)), f"{kind}_max")
    assert needs == pytest.approx(1.2 * shipped[0], rel=0.05)
    assert "allocated = 1.1" in calibration_file.format_toml([fitted], "two runs")


def test_what_is_refused():
    with pytest.raises(UserError, match="no measured runs"):
        calibrate([])
    with pytest.raises(UserError, match="greater than 0 s, not 0"):
        calibrate([MeasuredRun("a", FIVE[0], 0.0)])
    other = FIVE[0].replace(node=hardware.node("b200"))
    with pytest.raises(UserError, match="several GPU types: b200, h100"):
        calibrate([MeasuredRun("a", FIVE[0], 1.0), MeasuredRun("b", other, 1.0)])


def written(values: dict[str, float]) -> str:
    none = np.ones(1)
    whole = {c.name: c.default for c in corrections.CORRECTIONS} | values
    return calibration_file.format_toml(
        [Calibration("h100", whole, ["a"], none, none, none, none, 0.1)], 'runs of "a\\b"'
    )


def test_the_file_applies_to_the_gpus_own_name_and_to_all_its_nodes():
    values = {"general": 1.2, "far_bandwidth": 0.5, "overlap_grads": 0.0, "late_senders": 0.4}
    facts = hardware_file.add(written(values), "mine.toml", hardware.builtin())
    mine = facts.node("h100")
    assert mine.gpu.name == "h100"
    assert mine.gpu == facts.gpu("h100")
    run = FIVE[4]
    assert seconds(run.replace(node=mine)) == pytest.approx(seconds(apply_corrections(run, values)))
    assert seconds(run.replace(node=mine)) > 1.1 * seconds(run)
    assert facts.gpu("h200") == hardware.gpu("h200")


def test_a_calibration_of_a_gpu_like_another_keeps_the_others_constants():
    like = '[gpu.mine]\nlike = "h100"\n\n[calibration.mine]\ngeneral = 2.0\n'
    gpu = hardware_file.add(like, "mine.toml", hardware.builtin()).gpu("mine")
    assert corrections.decode(gpu.calibrated_as) == ("h100", {"general": 2.0})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[calibration.h101]\ngeneral = 1", "there is no GPU 'h101'"),
        ("[calibration.h100]\ngenral = 1", "there is no correction 'genral'"),
        ("[calibration.h100]\noverlap_tp = 2", "overlap_tp must be a number between 0 and 1, not 2"),
        ("[calibration.h100]\ngeneral = true", "general must .*True"),
        ("[calibration.h100]\ngeneral = nan", "general must .*nan"),
    ],
)
def test_a_calibration_that_means_nothing_is_refused(text, words):
    with pytest.raises(UserError, match=words):
        hardware_file.add(text, "mine.toml", hardware.builtin())


def test_a_networks_latency_counts_beside_the_shipped_one():
    run = FIVE[2]
    far = run.replace(fabric=replace(FABRIC, latency_us=FABRIC.latency_us * 3))
    assert seconds(far) == pytest.approx(seconds(apply_corrections(run, {"far_latency": 3.0})))
    assert seconds(far) > seconds(run)


def test_only_amounts_of_seconds_are_described_in_seconds():
    seconds_of = [c.about for c in corrections.CORRECTIONS_BY_NAME.values() if c.about.startswith("seconds")]
    assert seconds_of == [corrections.CORRECTIONS_BY_NAME["alloc_retries"].about]
    assert corrections.CORRECTIONS_BY_NAME["fixed"].about.startswith("factor ")


@pytest.mark.parametrize("gib", [1e-4, 1e7])
def test_bytes_in_another_unit_leave_a_factor_that_a_hardware_file_takes(gib):
    fitted = calibrate([replace(run, allocated_gib=gib) for run in noisy(FIVE, {})])
    corrections.validate({"allocated": fitted.values["allocated"]}, "here")
