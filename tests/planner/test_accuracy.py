"""The planner's error against published and measured runs stays within the bounds that the benchmarks state."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

REFERENCE = ROOT / "benchmarks" / "reference"


@pytest.mark.parametrize("name", ["accuracy_memory", "accuracy_time", "unseen_runs", "accuracy_calibration"])
def test_errors_stay_within_their_bounds(name, capsys):
    assert load(name).main(REFERENCE) == 0, capsys.readouterr().out


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


def load(name: str):
    path: Path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
