"""What a rank of a rehearsal saw and did, written to its own file: losses, times, its place, its parameters.

Imports Lightning: nemo_run builds `Witness` from the recipe's callbacks in each rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

PLACES = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "data_parallel")
EXPERT_PLACES = ("expert_model_parallel", "expert_tensor_parallel")


class Witness(pl.Callback):
    """Writes `{folder}/{rank}.json` when training ends.

    Args:
        folder: where.
        weights: where to save the weights before the first step; "" = nowhere.
        resharded: the schedule was saved in another layout, in which experts may have parameter groups of their own.
    """

    def __init__(self, folder: str, weights: str = "", resharded: bool = False) -> None:
        self.path = Path(folder) / f"{os.environ['RANK']}.json"
        self.weights, self.resharded = weights, resharded
        self.seen: dict[str, Any] = {"losses": [], "grad_norms": [], "built": time.time(), "step_ends": []}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The model is there, and its weights are loaded."""
        if self.weights:
            trainer.save_checkpoint(Path(self.weights))
        for each in trainer.lr_scheduler_configs if self.resharded else ():
            each.scheduler.base_lrs = each.scheduler.base_lrs[: len(each.scheduler.optimizer.param_groups)]
        self.seen |= {"started": time.time(), "first_step": trainer.global_step}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Adapters are there from the first epoch's start on."""
        if "before" not in self.seen:
            self.seen["before"] = digests(pl_module)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """A step is done."""
        metrics = trainer.callback_metrics
        self.seen["losses"].append(float(metrics["reduced_train_loss"]))
        if "grad_norm" in metrics:
            self.seen["grad_norms"].append(float(metrics["grad_norm"]))
        self.seen["step_ends"].append(time.time())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """All is done but the last checkpoint."""
        from superpod.launchers.rehearsal.settings import dropped

        self.seen["after"] = digests(pl_module)
        self.seen["place"] = place()
        self.seen["dropped"] = {name: str(value) for name, value in sorted(dropped.items())}
        self.path.write_text(json.dumps(self.seen))


def place() -> dict[str, int]:
    """This rank's place in Megatron's grids."""
    from megatron.core import parallel_state

    return {name: getattr(parallel_state, f"get_{name}_rank")() for name in (*PLACES, *EXPERT_PLACES)}


def digests(model: Any) -> dict[str, list[Any]]:
    """Of every parameter: a hash of its bits, whether tensor parallelism shards it, whether it is an expert's, and
    whether it is trained."""
    import torch

    found = {}
    for name, parameter in model.named_parameters():
        raw = parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
        sharded = bool(getattr(parameter, "tensor_model_parallel", False))
        expert = not getattr(parameter, "allreduce", True)
        found[name] = [hashlib.sha1(raw).hexdigest()[:16], sharded, expert, parameter.requires_grad]
    return found
