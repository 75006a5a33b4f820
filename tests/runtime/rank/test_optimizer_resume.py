"""The optimizer keeps the states that NeMo would take out, gets tensors alone, and common.pt may name its classes."""

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.runtime.rank import optimizer_resume


class Strategy:
    """Prepares states as NeMo 2.7.3 and Megatron-Core 0.15.3 do."""

    def __init__(self, save_ckpt_format: str) -> None:
        self.save_ckpt_format = save_ckpt_format

    def _get_fsdp_dtensor_state_dict(self, raw: dict[str, Any]) -> dict[str, Any]:
        prepared = raw.copy()
        if "optimizer_states" in prepared:
            states = prepared["optimizer_states"].copy()["state"]
            states["linear_fc1.weight_w"] = states.pop("linear_fc1.weight")
        return prepared


@pytest.mark.parametrize(
    ("form", "left"), [("fsdp_dtensor", "linear_fc1.weight"), ("torch_dist", "linear_fc1.weight_w")]
)
def test_the_states_that_the_optimizer_gets_are_under_their_own_names(form, left):
    strategy = Strategy(form)
    optimizer_resume.copy_optimizer_states(strategy)
    raw = {"model": {}, "optimizer_states": {"state": {"linear_fc1.weight": "moments"}, "param_to_group_meta": {}}}
    prepared = strategy._get_fsdp_dtensor_state_dict(raw)
    assert raw["optimizer_states"]["state"] == {left: "moments"}
    assert prepared["optimizer_states"]["state"] == {"linear_fc1.weight_w": "moments"}


def test_a_checkpoint_without_an_optimizer_is_prepared_too():
    strategy = Strategy("fsdp_dtensor")
    optimizer_resume.copy_optimizer_states(strategy)
    assert strategy._get_fsdp_dtensor_state_dict({"model": {}}) == {"model": {}}


class FusedAdam:
    """A class of an optimizer that PyTorch does not know."""


@pytest.mark.nemo
@pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning")
def test_a_checkpoint_that_names_the_optimizers_classes_can_be_read(tmp_path, monkeypatch):
    import torch

    saved = {"param_groups": [{"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": FusedAdam}]}
    torch.save(saved, tmp_path / "common.pt")
    torch.serialization.clear_safe_globals()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "common.pt")
    optimizers = SimpleNamespace(Adam=FusedAdam, SGD=torch.optim.SGD, CPUAdam=torch.optim.AdamW, CPUSGD=torch.optim.SGD)
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer", optimizers)
    with torch.serialization.safe_globals([]):  # forgotten at the end
        optimizer_resume.allow_optimizer_classes()
        assert torch.load(tmp_path / "common.pt") == saved


def test_what_only_fills_up_a_bucket_is_no_state_of_the_optimizer(monkeypatch):
    class DistributedOptimizer:
        def __init__(self) -> None:
            self.given: list[tuple[str, dict[str, Any]]] = []

        def _set_main_param_and_optimizer_states(self, parameter: str, states: dict[str, Any]) -> None:
            self.given.append((parameter, states))

    module = SimpleNamespace(DistributedOptimizer=DistributedOptimizer)
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer.distrib_optimizer", module)
    for _ in range(2):  # two attempts in one process
        optimizer_resume.load_tensors_only()
    optimizer = DistributedOptimizer()
    saved = {"param": "weights", "exp_avg": "moments", "padding": False}
    optimizer._set_main_param_and_optimizer_states("w", saved)
    assert optimizer.given == [("w", {"param": "weights", "exp_avg": "moments"})]
    assert "padding" in saved, "Megatron still reads it"
