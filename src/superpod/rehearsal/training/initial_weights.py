"""Loads the initial weights of a model before Megatron-FSDP shards it: NeMo 2.7.3 cannot load them later.

Imports Lightning: nemo_run builds `InitialWeights` from the recipe's callbacks in each rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class InitialWeights(pl.Callback):
    """Loads the weights of a checkpoint as soon as the model is built.

    Args:
        checkpoint: path of the checkpoint, whose folder `weights` is in Megatron's own format (torch_dist).
    """

    def __init__(self, checkpoint: str) -> None:
        self.weights = Path(checkpoint) / "weights"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace the model's `configure_model` so that it also loads the weights, before Megatron-FSDP shards them."""
        build = pl_module.configure_model

        def build_and_load() -> None:
            is_built = hasattr(pl_module, "module")
            build()
            if not is_built:
                self._load(pl_module.module)

        pl_module.configure_model = build_and_load

    def _load(self, module: Any) -> None:
        from megatron.core import dist_checkpointing

        prefix = "module."  # as in NeMo's checkpoints
        state = module.sharded_state_dict(prefix=prefix)
        loaded = dist_checkpointing.load(state, str(self.weights))
        module.load_state_dict({name.removeprefix(prefix): loaded[name] for name in state})
