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

from superpod.node.heartbeat import Heartbeat

PLACES = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "data_parallel")
FED_STEPS = 2
"""Steps of which a rank keeps the tokens that it was fed."""
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

    def setup(self, *_: Any, **__: Any) -> None:
        """The rank is there."""
        folder = self.path.parent / "heartbeat"
        folder.mkdir(exist_ok=True)
        self.heart = Heartbeat(folder, int(os.environ["RANK"]), every_s=0.0)
        self.heart.begin()
        self.heart.beat(0, "start")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The model is there, and its weights are loaded."""
        if self.weights:
            trainer.save_checkpoint(Path(self.weights))
        for each in trainer.lr_scheduler_configs if self.resharded else ():
            each.scheduler.base_lrs = each.scheduler.base_lrs[: len(each.scheduler.optimizer.param_groups)]
        model = trainer.strategy.megatron_parallel
        self.seen |= {"started": time.time(), "first_step": trainer.global_step, "layers": layers(model), "fed": []}
        watch_input(model, self.seen["fed"])

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Adapters are there from the first epoch's start on."""
        if "before" not in self.seen:
            self.seen["before"] = digests(trainer.strategy.megatron_parallel)
        self.seen["fed"].append([])
        self.heart.beat(trainer.global_step, "train")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """A step is done."""
        metrics = trainer.callback_metrics
        self.seen["losses"].append(float(metrics["reduced_train_loss"]))
        if "grad_norm" in metrics:
            self.seen["grad_norms"].append(float(metrics["grad_norm"]))
        self.seen["step_ends"].append(time.time())

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """All is done but the last checkpoint."""
        from superpod.rehearsal.settings import dropped

        gather(trainer.strategy.megatron_parallel)
        self.seen["after"] = digests(trainer.strategy.megatron_parallel)
        self.seen["fed"] = self.seen["fed"][:FED_STEPS]
        self.seen["place"] = place()
        self.seen["dropped"] = {name: str(value) for name, value in sorted(dropped.items())}
        self.path.write_text(json.dumps(self.seen))
        self.heart.beat(trainer.global_step, "done")
        self.heart.end()


def place() -> dict[str, int]:
    """This rank's place in Megatron's grids."""
    from megatron.core import parallel_state

    return {name: getattr(parallel_state, f"get_{name}_rank")() for name in (*PLACES, *EXPERT_PLACES)}


def gather(model: Any) -> None:
    """Have every rank take the newest parameters, which an overlapped gather leaves to the next forward pass."""
    for chunk in model:
        if chunk.module.ddp_config.overlap_param_gather:
            chunk.module.start_param_sync(force_sync=True)


def layers(model: Any) -> list[int]:
    """Numbers of the decoder layers that this rank holds, from 1; those of multi-token prediction are none of them."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    named = [(name, each) for name, each in model.named_modules() if isinstance(each, TransformerLayer)]
    return [each.layer_number for name, each in named if ".mtp." not in name]


def watch_input(model: Any, fed: list[list[Any]]) -> None:
    """Append each micro-batch that enters the model here, [tokens, positions], to the newest list of `fed`."""
    from megatron.core.models.gpt import GPTModel

    def enters(_: Any, args: tuple[Any, ...], kw: dict[str, Any]) -> None:
        named = dict(zip(("input_ids", "position_ids"), args, strict=False)) | kw
        if fed and len(fed) <= FED_STEPS:
            fed[-1].append([named[name].tolist() for name in ("input_ids", "position_ids")])

    for module in model.modules():
        if isinstance(module, GPTModel) and module.pre_process:
            module.register_forward_pre_hook(enters, with_kwargs=True)


def digests(model: Any) -> dict[str, list[Any]]:
    """Of every parameter: a hash of its bits, whether tensor parallelism shards it, whether it is an expert's, and
    whether it is an embedding that several stages hold."""
    import torch

    found = {}
    for name, parameter in model.named_parameters():
        raw = parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
        sharded = bool(getattr(parameter, "tensor_model_parallel", False))
        expert = not getattr(parameter, "allreduce", True)
        tied = bool(getattr(parameter, "shared_embedding", False))
        found[name] = [hashlib.sha1(raw).hexdigest()[:16], sharded, expert, tied]
    return found
