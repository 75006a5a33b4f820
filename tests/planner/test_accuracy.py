"""The planner's error against published and measured runs stays within the bounds that the benchmarks state."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

REFERENCE = ROOT / "benchmarks" / "reference"


@pytest.mark.parametrize("name", ["accuracy_memory", "accuracy_time"])
def test_errors_stay_within_their_bounds(name, capsys):
    assert load(name).main(REFERENCE) == 0, capsys.readouterr().out


def load(name: str):
    path: Path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
