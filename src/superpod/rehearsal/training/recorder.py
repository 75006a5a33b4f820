"""Records losses, times, inputs, layers and parameters of a rehearsal, in one file per rank.

Imports Lightning: nemo_run builds `Recorder` from the recipe's callbacks in each rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from superpod.rehearsal.training.rank_record import Digest, MicroBatch, RankRecord
from superpod.runtime.heartbeat.heartbeat import Heartbeat
from superpod.runtime.rank import optimizer_resume

if TYPE_CHECKING:
    import torch
    from nemo.lightning.megatron_parallel import MegatronParallel

GRIDS = (
    "tensor_model_parallel",
    "pipeline_model_parallel",
    "context_parallel",
    "data_parallel",
    "expert_model_parallel",
    "expert_tensor_parallel",
)
"""Grids of ranks for which Megatron's `parallel_state` has a function `get_{name}_rank`."""
INPUT_STEPS = 2
"""Number of steps whose input tokens a rank records."""


class Recorder(pl.Callback):
    """Writes `{folder}/{rank}.json`, a `RankRecord`, when training ends.

    Args:
        folder: folder of the record.
        weights: folder in which the weights are saved before the first step; "" = do not save them.
        resharded: the checkpoint has a different layout, in which experts may have separate parameter groups.
    """

    def __init__(self, folder: str, weights: str = "", resharded: bool = False) -> None:
        self.path = Path(folder) / f"{os.environ['RANK']}.json"
        self.weights, self.resharded = weights, resharded
        self.record: RankRecord = {
            "losses": [],
            "grad_norms": [],
            "built": time.time(),
            "started": 0.0,
            "step_ends": [],
            "first_step": 0,
            "layers": [],
            "inputs": [],
            "before": {},
            "after": {},
            "place": {},
            "dropped": {},
        }

    def setup(self, trainer: Any, *_: object, **__: object) -> None:
        """Start the heartbeat, and apply the same fixes to the optimizer as in an attempt."""
        optimizer_resume.prepare(trainer.strategy)
        folder = self.path.parent / "heartbeat"
        folder.mkdir(exist_ok=True)
        self.heart = Heartbeat(folder, int(os.environ["RANK"]), every_s=0.0)
        self.heart.begin()
        self.heart.beat(0, "start")

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Save the initial weights, record the layers, and start to record inputs."""
        if self.weights:
            trainer.save_checkpoint(Path(self.weights))
        for configured in trainer.lr_scheduler_configs if self.resharded else ():
            scheduler = configured.scheduler
            scheduler.base_lrs = scheduler.base_lrs[: len(scheduler.optimizer.param_groups)]
        model = trainer.strategy.megatron_parallel
        self.record["started"], self.record["first_step"] = time.time(), trainer.global_step
        self.record["layers"] = list_decoder_layers(model)
        record_inputs(model, self.record["inputs"])

    def on_train_batch_start(self, trainer: Any, *_: object) -> None:
        """Record the parameters before the first step."""
        if not self.record["before"]:  # not in `on_train_start`, after which NeMo adds adapters
            self.record["before"] = hash_parameters(trainer.strategy.megatron_parallel)
        self.record["inputs"].append([])
        self.heart.beat(trainer.global_step, "train")

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        """Record the loss, the gradient norm and the end of a step."""
        metrics = trainer.callback_metrics
        self.record["losses"].append(float(metrics["reduced_train_loss"]))
        if "grad_norm" in metrics:
            self.record["grad_norms"].append(float(metrics["grad_norm"]))
        self.record["step_ends"].append(time.time())

    def on_train_end(self, trainer: Any, *_: object) -> None:
        """Record the parameters after the last step, and write the record."""
        from superpod.rehearsal.patches.gpu_settings import dropped

        model = trainer.strategy.megatron_parallel
        gather_parameters(model)
        self.record["after"] = hash_parameters(model)
        self.record["inputs"] = self.record["inputs"][:INPUT_STEPS]
        self.record["place"] = get_grid_ranks()
        self.record["dropped"] = {name: str(value) for name, value in sorted(dropped.items())}
        self.path.write_text(json.dumps(self.record))
        self.heart.beat(trainer.global_step, "done")
        self.heart.end()


def get_grid_ranks() -> dict[str, int]:
    """Return this rank's index in each of Megatron's grids."""
    from megatron.core import parallel_state

    return {name: getattr(parallel_state, f"get_{name}_rank")() for name in GRIDS}


def gather_parameters(model: Iterable[Any]) -> None:
    """Gather the updated parameters of all chunks, which `overlap_param_gather` defers to the next forward pass."""
    from megatron.core.distributed import FullyShardedDataParallel

    for chunk in model:
        if isinstance(chunk.module, FullyShardedDataParallel):  # each forward pass gathers again
            continue
        if chunk.module.ddp_config.overlap_param_gather:
            chunk.module.start_param_sync(force_sync=True)


def list_decoder_layers(model: MegatronParallel) -> list[int]:
    """Return the numbers, from 1, of the decoder layers on this rank, without those of multi-token prediction."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, TransformerLayer)]
    return [layer.layer_number for name, layer in layers if ".mtp." not in name]


def record_inputs(model: MegatronParallel, inputs: list[list[MicroBatch]]) -> None:
    """Register hooks that append each input micro-batch of this rank to the last list of `inputs`."""
    from megatron.core.models.gpt import GPTModel

    names = ("input_ids", "position_ids")

    def append(_: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        tensors = dict(zip(names, args, strict=False)) | kwargs
        if inputs and len(inputs) <= INPUT_STEPS:
            inputs[-1].append([tensors[name].tolist() for name in names])

    for module in model.modules():
        if isinstance(module, GPTModel) and module.pre_process:
            module.register_forward_pre_hook(append, with_kwargs=True)


def hash_parameters(model: MegatronParallel) -> dict[str, Digest]:
    """Return the digest of every parameter of this rank by name; with Megatron-FSDP, of the unsharded parameter."""
    by_name: dict[str, Digest] = {}
    for name, parameter in model.named_parameters():
        raw = _read_bytes(parameter.detach())
        is_sharded = bool(getattr(parameter, "tensor_model_parallel", False))
        # Megatron marks parameters of experts, which are not reduced over all data-parallel ranks.
        expert = not getattr(parameter, "allreduce", True)
        is_tied = bool(getattr(parameter, "shared_embedding", False))
        by_name[name] = (hashlib.sha1(raw).hexdigest()[:16], is_sharded, expert, is_tied)
    return by_name


def _read_bytes(parameter: torch.Tensor) -> bytes:
    """Return the bits of a parameter; shards of a DTensor, other than TP's, are gathered."""
    import torch
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return parameter.contiguous().view(torch.uint8).numpy().tobytes()
    mesh, raw = parameter.device_mesh, _read_bytes(parameter.to_local())
    for name, placement in reversed([*zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)]):
        if placement.is_shard() and name != "tp":  # `replica_check` compares the shards of tensor parallelism
            group = mesh.get_group(name)
            shards: list[bytes] = [b""] * group.size()
            torch.distributed.all_gather_object(shards, raw, group=group)
            raw = b"".join(shards)
    return raw
