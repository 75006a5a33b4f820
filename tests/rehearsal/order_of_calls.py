"""order_of_calls.py OUT CASES: three steps of NeMo's loop with the flags of GPU runs, on gloo ranks.

CASES is a JSON list of rows of `gpu_flags.json`. For each, NeMo's own trainer, strategy and optimizer module, and
Megatron's own data parallelism and optimizer, train a tiny model on two data-parallel ranks (times two interleaved
stages where the flags belong to them), with the DDP configuration, precision plugin, optimizer and overlap callback of
the recipe. OUT tells, for each: the flags that Megatron had, losses, weights in every forward pass, and replicas. The
reference is one rank in fp32 from the same weights.

Faked: devices and streams (superpod.rehearsal.patches), and which tensors are Transformer Engine's MXFP8 ones. A CPU
has none of FP8's values: this shows who copies, gathers and scales, not what rounding does. Tensors of delayed and
current scaling are BF16 here, so their own way into Megatron's buffers is not shown.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import superpod.rehearsal.entry  # noqa: F401 - the patches, before NeMo

sys.path.insert(0, str(Path(__file__).parent))

import gpu_flags
import nemo_run as run
import torch
from nemo import lightning as nl
from tiny_recipe import VOCAB, tiny
from weight_watch import Watch

from superpod.rehearsal.comparison import replica_check
from superpod.rehearsal.training import forked_run
from superpod.rehearsal.training.cpu_recipe import rehearse
from superpod.rehearsal.training.recorder import Recorder

STEPS = 3
MODEL = {"hidden_size": 128}
"""Sizes of the model that a case may change."""
RESTORED = ("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")
"""Fields of the precision plugin that a rehearsal drops, and that these runs keep."""


def tiny_model(folder: Path, **changes: Any) -> Any:
    """`tiny`, on NeMo's own mock data."""
    import fiddle as fdl
    from nemo.collections.llm.gpt.data import MockDataModule

    partial = tiny(folder, steps=STEPS, ckpt_optim_fully_reshardable=False, **changes)
    fdl.update_callable(partial.data, MockDataModule)
    for name, value in MODEL.items():
        setattr(partial.model.config, name, value)
    partial.optim.config.lr = partial.optim.lr_scheduler.min_lr = 1e-3
    return partial


def laid_out(row: dict[str, Any], folder: Path) -> Any:
    """The tiny model with what a GPU run of the row's recipe gives NeMo, on few ranks; `old` as before the fix."""
    from superpod.recipes import build

    of_gpu = build(row["recipe"], row["nodes"])
    stages = 2 if "align_param_gather" in row["flags"]["ddp"] else 1
    partial = tiny_model(folder, precision="bf16", pipeline_model_parallel_size=stages)
    for name, value in MODEL.items():
        setattr(partial.model.config, name, row.get(name, value))
    partial.model.config.calculate_per_token_loss = of_gpu.model.config.calculate_per_token_loss
    partial.trainer.strategy.virtual_pipeline_model_parallel_size = 2 if stages > 1 else None
    partial.trainer.strategy.ddp = copy.deepcopy(of_gpu.trainer.strategy.ddp)
    partial.trainer.plugins = copy.deepcopy(of_gpu.trainer.plugins)
    partial.trainer.strategy.pipeline_dtype = partial.trainer.plugins.pipeline_dtype
    for name, value in of_gpu.optim.config.__arguments__.items():
        if name not in gpu_flags.VALUES:
            setattr(partial.optim.config, name, value)
    overlap = [c for c in of_gpu.trainer.callbacks if hasattr(c, "tp_comm_overlap")]
    partial.trainer.callbacks = copy.deepcopy(overlap)
    for callback in partial.trainer.callbacks:
        callback.tp_comm_overlap, callback.tp_comm_overlap_cfg = False, None
    if row.get("old"):
        partial.trainer.plugins.fp8_param_gather = partial.trainer.plugins.reuse_grad_buf_for_mxfp8_param_ag = True
        partial.trainer.strategy.ddp.overlap_param_gather = True
        for callback in partial.trainer.callbacks:
            callback.overlap_param_gather = None
    return partial


def ranks_of(row: dict[str, Any]) -> int:
    """Two copies of the model where the recipe has several, of two stages where its stages interleave."""
    ddp = row["flags"]["ddp"]
    return (2 if "bucket_size" in ddp or "use_distributed_optimizer" not in ddp else 1) * (
        2 if "align_param_gather" in ddp else 1
    )


def conduct(name: str, partial: Any, folder: Path, ranks: int, *, weights: Path, save: bool = False) -> dict[str, Any]:
    """Train, and say what came of it."""
    where = folder / name
    partial.log.explicit_log_dir, partial.log.ckpt.dirpath = str(where), str(where / "checkpoints")
    partial.resume = run.Config(nl.AutoResume)
    if not save:
        partial.resume.restore_config = run.Config(
            nl.RestoreConfig, path=str(weights), load_optim_state=False, load_artifacts=False
        )
    records = str(where / "ranks")
    callbacks = [run.Config(Recorder, folder=records, weights=str(weights) if save else ""), run.Config(Watch, records)]
    partial.trainer.callbacks = [*partial.trainer.callbacks, *callbacks]
    plugin = copy.deepcopy(partial.trainer.plugins)
    rehearsal, _ = rehearse(partial, devices=ranks)
    for field in RESTORED:
        if getattr(plugin, field, None):
            setattr(rehearsal.trainer.plugins, field, getattr(plugin, field))
    done = forked_run.run(name, rehearsal, Path(records), ranks)
    if done.error:
        return {"error": done.error}
    far = [_far(torch.load(Path(records, f"weights-{rank}.pt")), folder) for rank in range(ranks)]
    watches = [json.loads(Path(records, f"watch-{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "error": "",
        "losses": done.losses,
        "flags": watches[0]["flags"],
        "passes": [len(watch["passes"]) for watch in watches],
        "bad": sorted({weight for watch in watches for weights in watch["passes"] for weight in weights}),
        "far": max(far),
        "replicas": [vars(check) for check in replica_check.check_replicas(done)],
        "unchanged": [
            rank for rank, record in enumerate(done.ranks) if not replica_check.find_changed_parameters(record)
        ],
    }


def _far(weights: dict[str, torch.Tensor], folder: Path) -> float:
    """The largest relative distance of a parameter of the layers from the reference's."""
    reference = torch.load(folder / "one" / "ranks" / "weights-0.pt")
    return max(float((w - reference[name]).norm() / reference[name].norm()) for name, w in weights.items())


@contextlib.contextmanager
def stand_ins(partial: Any) -> Iterator[None]:
    """Inside, what Transformer Engine would bring: its MXFP8 tensors, where the plugin keeps parameters so, are the
    layers' matrices.
    """
    from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer

    def is_mxfp8(tensor: torch.Tensor) -> bool:
        return getattr(tensor, "dim", lambda: 0)() == 2 and tensor.shape[0] != VOCAB  # TE's layers; not the embeddings

    with contextlib.ExitStack() as patches:
        if getattr(partial.trainer.plugins, "reuse_grad_buf_for_mxfp8_param_ag", False):
            patches.enter_context(mock.patch.object(param_and_grad_buffer, "is_mxfp8tensor", is_mxfp8))
            # a buffer of their own
            patches.enter_context(mock.patch.object(distributed_data_parallel, "is_float8tensor", is_mxfp8))
        yield


def main(out: str, cases: str) -> None:
    """The command."""
    rows = json.loads(Path(cases).read_text())
    with tempfile.TemporaryDirectory(prefix="order-") as temporary:
        folder = Path(temporary)
        weights = folder / "start"
        one = tiny_model(folder)
        one.trainer.callbacks = []
        answer = {"one": conduct("one", one, folder, 1, weights=weights, save=True)}
        for number, row in enumerate(rows):
            partial = laid_out(row, folder)
            with stand_ins(partial):
                answer[str(number)] = conduct(str(number), partial, folder, ranks_of(row), weights=weights)
    Path(out).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
