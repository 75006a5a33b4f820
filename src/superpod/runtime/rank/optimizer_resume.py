"""What NeMo 2.7.3 and Megatron-Core 0.15.3 need to resume with the optimizer that was saved.

Standard library only; Megatron's classes are taken from the modules that the training has loaded.
"""

from __future__ import annotations

import sys
from typing import Any


def prepare(strategy: Any) -> None:
    """Called in every rank before a checkpoint is read."""
    keep_moments(strategy)
    allow_optimizer_classes()
    load_tensors_only()


def allow_optimizer_classes() -> None:
    """Let `torch.load` read the optimizer classes that a checkpoint names.

    Megatron's optimizer on the host (HybridDeviceOptimizer) has the classes of its two halves among the settings of
    each parameter group, which are saved in common.pt. Megatron reads that file without naming the classes, and from
    PyTorch 2.6 on `torch.load` then refuses it: no such run could resume. A name is allowed, and no code with it.
    """
    optimizers = sys.modules.get("megatron.core.optimizer")
    if optimizers is None:
        return
    from torch.serialization import add_safe_globals

    add_safe_globals([getattr(optimizers, name) for name in ("Adam", "SGD", "CPUAdam", "CPUSGD")])


def load_tensors_only() -> None:
    """Give a precision-aware optimizer the tensors of a checkpoint alone.

    Among a parameter's states Megatron-Core 0.15.3 saves whether they only fill up a bucket (`padding`, a bool), and
    hands that to Transformer Engine's optimizer as a tensor: no run with such an optimizer could resume in the default
    format. Mended in later versions (Megatron-LM, pull request 2576).
    """
    module = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    if module is None:
        return
    load = module.DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(load, "tensors_only", False):
        return

    def load_tensors(self: Any, parameter: Any, states: dict[str, Any]) -> None:
        load(self, parameter, {name: state for name, state in states.items() if name != "padding"})

    load_tensors.tensors_only = True  # type: ignore[attr-defined]
    module.DistributedOptimizer._set_main_param_and_optimizer_states = load_tensors


def keep_moments(strategy: Any) -> None:
    """Give NeMo's strategy a copy of the optimizer's states to prepare for a checkpoint.

    For gated MLPs, Megatron replaces the states of `linear_fc1.weight` by those of its two halves, in the mapping that
    it is given (core/transformer/fsdp_dtensor_checkpoint.py). NeMo copies the mapping around that one only
    (MegatronStrategy._get_fsdp_dtensor_state_dict), and gives the optimizer what is left once the halves are loaded:
    the moments of `linear_fc1.weight` begin again at zero, silently.
    """
    if getattr(strategy, "save_ckpt_format", None) != "fsdp_dtensor":
        return
    prepare = strategy._get_fsdp_dtensor_state_dict

    def prepare_copy(raw: dict[str, Any], **names: Any) -> Any:
        states = raw.get("optimizer_states")
        if states and "state" in states:
            raw = {**raw, "optimizer_states": {**states, "state": dict(states["state"])}}
        return prepare(raw, **names)

    strategy._get_fsdp_dtensor_state_dict = prepare_copy
