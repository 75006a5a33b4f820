"""Work around bugs of NeMo 2.7.3 and Megatron-Core 0.15.3 when a run resumes with a saved optimizer.

Standard library only. Megatron's classes come from modules that are already imported.
"""

from __future__ import annotations

import sys
from typing import Any


def prepare(strategy: Any) -> None:
    """Apply all workarounds; `strategy` is NeMo's strategy. Call it on every rank before a checkpoint is loaded."""
    copy_optimizer_states(strategy)
    allow_optimizer_classes()
    load_tensors_only()


def allow_optimizer_classes() -> None:
    """Allow `torch.load` to read the optimizer classes in a checkpoint.

    Megatron's CPU-offloaded optimizer (HybridDeviceOptimizer) stores the classes of its two parts in the settings of
    each parameter group, which are saved in common.pt. Megatron does not declare them as safe, so `torch.load` rejects
    the file since PyTorch 2.6, and such a run could not be resumed. Only these names are allowed, not arbitrary code.
    """
    optimizers = sys.modules.get("megatron.core.optimizer")
    if optimizers is None:
        return
    from torch.serialization import add_safe_globals

    add_safe_globals([getattr(optimizers, name) for name in ("Adam", "SGD", "CPUAdam", "CPUSGD")])


def load_tensors_only() -> None:
    """Make Megatron's distributed optimizer ignore the saved state `padding`, which is not a tensor.

    Megatron-Core 0.15.3 saves a bool `padding` with the states of each parameter, and passes it to Transformer Engine's
    optimizer as a tensor, so a run with such an optimizer could not be resumed in the default format. Fixed in later
    versions (Megatron-LM, pull request 2576).
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


def copy_optimizer_states(strategy: Any) -> None:
    """Make NeMo's strategy prepare a checkpoint from a copy of the optimizer states.

    For gated MLPs, Megatron replaces the states of `linear_fc1.weight` with those of its two halves, in place
    (core/transformer/fsdp_dtensor_checkpoint.py). NeMo copies only the enclosing mapping
    (MegatronStrategy._get_fsdp_dtensor_state_dict), and passes the changed mapping to the optimizer after loading: the
    moments of `linear_fc1.weight` would silently restart at zero.
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
