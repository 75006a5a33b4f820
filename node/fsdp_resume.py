"""Has NeMo 2.7.3 resume Megatron-FSDP with all of Adam's moments. Standard library only."""

from __future__ import annotations

from typing import Any


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
