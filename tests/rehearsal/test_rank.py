"""One rank of a Slurm job without GPUs: which calls it makes, without Slurm or NeMo."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from superpod import rehearsal
from superpod.rehearsal import rank
from superpod.runtime.rank import rank as node_rank


@pytest.mark.parametrize(("number", "printed"), [("0", "data.num_workers: 8 -> 0  (few cores)"), ("3", "")])
def test_the_recipe_keeps_its_nodes_and_ranks(number, printed, monkeypatch, capsys):
    requested = []

    def rehearse(partial, *, devices):
        requested.append(devices)
        on_one_node = SimpleNamespace(trainer=SimpleNamespace(num_nodes=1, devices=devices))
        return on_one_node, [rehearsal.Change("data.num_workers", 8, 0, "few cores")]

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    monkeypatch.setenv("RANK", number)
    written: Any = SimpleNamespace(trainer=SimpleNamespace(num_nodes=2, devices=4))
    partial = rank.convert(written)
    assert requested == [8]
    assert (partial.trainer.num_nodes, partial.trainer.devices) == (2, 4)
    assert capsys.readouterr().out.strip() == printed


def test_the_node_runs_it_with_the_patches_first(monkeypatch):
    calls = []
    monkeypatch.setattr(node_rank, "main", lambda recipe, **hooks: calls.append((recipe, hooks)))
    monkeypatch.setattr(sys, "argv", ["rank", "code/recipe.py"])
    monkeypatch.delitem(sys.modules, rank.__name__)  # else runpy warns that it runs an imported module
    runpy.run_module(rank.__name__, run_name="__main__")
    ((recipe, hooks),) = calls
    assert recipe == Path("code/recipe.py")
    assert hooks["before"] is rehearsal.install
    assert hooks["change"].__name__ == "convert"
