"""Test that ranks of NeMo-Run cannot start experiments."""

import sys
from importlib.machinery import ModuleSpec

import pytest

from superpod.collection import ranks
from superpod.errors import UserError


@pytest.fixture
def as_rank(monkeypatch):
    """Make this process look like a rank of NeMo-Run."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(ranks.RUNNER, None))


def test_script_is_not_a_rank():
    assert not ranks.is_rank()


def test_runner_is_a_rank(as_rank):
    assert ranks.is_rank()


@pytest.mark.nemo
@pytest.mark.filterwarnings("ignore:.*")
def test_refuses_experiments_in_ranks_only(monkeypatch):
    from nemo_run.run.experiment import Experiment

    monkeypatch.setattr(Experiment, "__init__", Experiment.__init__)  # is put back after the test
    before = Experiment.__init__
    ranks.refuse_experiments()
    assert Experiment.__init__ is before
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(ranks.RUNNER, None))
    ranks.refuse_experiments()
    with pytest.raises(UserError, match="NeMo-Run imports it in every rank") as refused:
        Experiment("mine")
    assert "__main__" in refused.value.hint


@pytest.mark.nemo
@pytest.mark.filterwarnings("ignore:.*")
def test_runner_is_nemo_runs_module():
    from nemo_run.core.runners import fdl_runner

    assert fdl_runner.__name__ == ranks.RUNNER
