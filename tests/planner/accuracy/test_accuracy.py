"""The planner's error against published and measured runs stays within the bounds that the benchmarks state."""

import csv
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

REFERENCE = ROOT / "benchmarks" / "reference"
FAST, SLOW = ("accuracy_memory", "accuracy_time"), ("unseen_runs", "accuracy_calibration")


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_errors_stay_within_their_bounds(name, capsys):
    assert load(name).main(REFERENCE) == 0, capsys.readouterr().out


def test_no_fitted_row_has_a_twin_in_the_hold_out():
    held_out = load("held_out")
    sides, rows = {}, table("step_time")
    for row in rows:
        sides.setdefault(held_out.configuration(row), set()).add(row["held_out"])
    assert not [side for side in sides.values() if {"", "yes"} <= side]
    assert sum(row["held_out"] == held_out.TWIN for row in rows) == 12


def test_a_configuration_is_the_same_in_every_spelling():
    held_out = load("held_out")
    row = next(row for row in table("step_time") if row["precision"] == "fp8-mx" and row["tp"] == "1")
    same = {**row, "precision": "mxfp8", "tp": "", "etp": "1", "release": "another"}
    assert held_out.configuration(same) == held_out.configuration(row)
    assert held_out.configuration({**row, "precision": "bf16"}) != held_out.configuration(row)


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
@pytest.mark.parametrize("gone", [lambda row: row["release"] == "vTrain", lambda row: "MLPerf" in row["release"]])
@pytest.mark.slow
def test_a_group_that_is_gone_is_past_its_bound(gone, tmp_path):
    write(tmp_path / "step_time.csv", [row for row in table("step_time") if not gone(row)])
    assert load("accuracy_time").main(tmp_path) == 1


@pytest.mark.slow
def test_a_fitted_row_that_is_called_untuned_is_missed(tmp_path):
    rows = table("step_time")
    worst = next(row for row in rows if row["release"].startswith("NeMo 25.11") and not row["held_out"])
    worst["notes"] += " not tuned"
    write(tmp_path / "step_time.csv", rows)
    assert load("accuracy_time").main(tmp_path) == 1


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
@pytest.mark.slow
def test_rows_that_contradict_themselves_are_missed(tmp_path):
    """They are not scored: with all of them gone, every mean is NaN, and none is too large."""
    rows = [row for i, row in enumerate(table("step_time")) if row["release"] != "vTrain" or i % 8 == 0]
    broken = [{**row, "gbs": "0"} if row["release"] != "vTrain" else row for row in rows]
    write(tmp_path / "step_time.csv", broken)
    assert load("accuracy_time").main(tmp_path) == 1


@pytest.mark.parametrize("gone", ["MLPerf", "Megatron-LM CI"])
def test_a_group_of_memory_that_is_gone_is_past_its_bound(gone, tmp_path):
    memory = load("accuracy_memory")
    write(tmp_path / "memory.csv", [row for row in table("memory") if gone not in memory.group(row)])
    shutil.copy(REFERENCE / "step_time.csv", tmp_path)
    assert memory.main(tmp_path) == 1


def test_no_measured_kernel_beats_the_peak_and_each_gpu_has_its_kinds():
    kernels = load("kernels")
    rows = kernels.read()
    ratios = {(row["gpu"], row["kind"], row["precision"]): [] for row in rows}
    for row in rows:
        ideal, modelled = kernels.modelled(row)
        assert modelled > ideal
        ratios[row["gpu"], row["kind"], row["precision"]].append(float(row["us"]) / 1e6 / ideal)
    assert {gpu for gpu, *_ in ratios} == set(kernels.GPUS)
    assert all(len(times) == kernels.SAMPLED for times in ratios.values())
    assert min(map(min, ratios.values())) > 1


def table(name: str) -> list[dict[str, str]]:
    with (REFERENCE / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def load(name: str):
    path: Path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
