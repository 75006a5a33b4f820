"""A stock recipe, shrunk until it trains in a second, and its rehearsal."""

from __future__ import annotations

import ctypes
import os
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from nemo_run import Config, Partial
    from torch.utils.data import DataLoader, Dataset

VOCAB, SEQUENCE, BATCH = 64, 16, 4

MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": SEQUENCE,
    "vocab_size": VOCAB,  # else padded to a multiple of 128 x TP: other losses with TP
}
DATA = {
    "seq_length": SEQUENCE,
    "micro_batch_size": 1,
    "global_batch_size": BATCH,
    "num_train_samples": 1000,
    "num_val_samples": 8,
    "num_test_samples": 8,
}
TRAINER = {"val_check_interval": 100, "limit_val_batches": 0, "log_every_n_steps": 1}


def tiny(
    folder: Path, *, steps: int, precision: str = "32", overlap: bool = False, experts: int = 0, **changes: Any
) -> Partial:
    """Stock llama3_8b, shrunk; ``changes`` are of the strategy; ``recompute_*``, ``num_*``, ``add_*`` of the model."""
    import nemo_run as run
    import torch
    from nemo.collections.llm.recipes import llama3_8b
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint
    from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

    recipe = llama3_8b.pretrain_recipe(dir=str(folder), name="run")
    shrink(recipe)
    if precision == "32":
        in_fp32(recipe.trainer)
    if experts:
        mixtral(recipe, experts)
    strategy = recipe.trainer.strategy
    strategy.context_parallel_size = 1
    strategy.pipeline_dtype = torch.float32 if precision == "32" else torch.bfloat16
    strategy.ckpt_optim_fully_reshardable = True  # so that TP and PP may change; not NeMo's default
    for name, value in changes.items():
        setattr(recipe.model.config if name.startswith(("recompute", "num_", "add_")) else strategy, name, value)
    recipe.trainer.callbacks = [run.Config(losses_callback)]
    if overlap:
        recipe.trainer.callbacks += [
            run.Config(MegatronCommOverlapCallback, defer_embedding_wgrad_compute=True),
            run.Config(late_callback),
        ]
    recipe.trainer.max_steps = steps
    recipe.log.tensorboard = None
    recipe.log.ckpt = run.Config(
        ModelCheckpoint, every_n_train_steps=100, save_last=False, monitor="reduced_train_loss", filename="{step}"
    )
    recipe.optim.config.lr = recipe.optim.lr_scheduler.min_lr = 1e-2
    recipe.optim.lr_scheduler.warmup_steps = recipe.optim.lr_scheduler.constant_steps = 0
    return recipe


def shrink(recipe: Partial) -> None:
    import fiddle as fdl
    import nemo_run as run
    from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer

    fdl.update_callable(recipe.data, resumable_mock_data())
    recipe.data.tokenizer = run.Config(NullTokenizer, vocab_size=VOCAB - 1)
    for part, values in ((recipe.model.config, MODEL), (recipe.data, DATA), (recipe.trainer, TRAINER)):
        for name, value in values.items():
            setattr(part, name, value)


def in_fp32(trainer: Config) -> None:
    import nemo_run as run
    import torch
    from nemo.lightning import MegatronMixedPrecision

    trainer.plugins = run.Config(
        MegatronMixedPrecision, precision="32", params_dtype=torch.float32, pipeline_dtype=torch.float32
    )


def mixtral(recipe: Partial, experts: int) -> None:
    """Put a mixture of experts of the same size in the place of the dense model."""
    import fiddle as fdl
    from nemo.collections.llm import MixtralConfig8x7B, MixtralModel

    fdl.update_callable(recipe.model, MixtralModel)
    fdl.update_callable(recipe.model.config, MixtralConfig8x7B)
    recipe.model.config.num_moe_experts = experts
    recipe.model.config.moe_grouped_gemm = True


@cache
def resumable_mock_data() -> type:
    """NeMo's mock data starts from its first sample after a resume; this one continues, as the real one does."""
    from nemo.collections.llm.gpt.data import MockDataModule, PreTrainingDataModule

    class Data(MockDataModule):
        init_global_step = 0
        state_dict = PreTrainingDataModule.state_dict
        load_state_dict = PreTrainingDataModule.load_state_dict

        def _create_dataloader(self, dataset: Dataset, **kw: Any) -> DataLoader:
            self.init_global_step = self.data_sampler.init_global_step = self.trainer.global_step  # type: ignore[union-attr]
            return super()._create_dataloader(dataset, **kw)

    return Data


def losses_callback() -> Callback:
    import lightning.pytorch as pl

    class Losses(pl.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            self.losses.append(float(trainer.callback_metrics["reduced_train_loss"]))

    return Losses()


def late_callback() -> Callback:
    """Exposes memory that is freed before it is sent: the receiver is late, and malloc overwrites freed memory."""
    import lightning.pytorch as pl

    class Late(pl.Callback):
        def on_train_batch_start(self, *_: object) -> None:
            m_perturb = -6  # malloc.h
            ctypes.CDLL(None).mallopt(m_perturb, 0xA5)

        def on_megatron_microbatch_start(self, *_: object, **__: object) -> None:
            if os.environ["RANK"] != "0":
                time.sleep(0.05)

    return Late()


def train(folder: Path, recipe: Partial, without: frozenset[str]) -> dict[str, Any]:
    """Run the rehearsal of ``recipe`` as this rank: its losses, and the names and a digest of its parameters."""
    import fiddle as fdl
    from torch.distributed import FileStore  # type: ignore[reportPrivateImportUsage]

    from superpod.rehearsal import install, rehearse

    install(without=without)
    rehearsal, _ = rehearse(recipe, devices=int(os.environ["WORLD_SIZE"]))
    call = fdl.build(rehearsal)
    # The ranks meet at a file: a free port may be taken before rank 0 listens on it.
    call.keywords["trainer"].strategy.store = FileStore(str(folder / "store"), int(os.environ["WORLD_SIZE"]))
    call()
    from superpod.rehearsal.patches.gpu_settings import dropped

    trainer, parameters = call.keywords["trainer"], dict(call.keywords["model"].named_parameters())
    return {
        "losses": next(callback.losses for callback in trainer.callbacks if hasattr(callback, "losses")),
        "names": sorted(parameters),
        "digest": sum(getattr(p, "_local_tensor", p).double().abs().sum().item() for p in parameters.values()),
        "dropped": {name: str(value) for name, value in dropped.items()},
    }
