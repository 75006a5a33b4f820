"""Patches of NeMo's trainer and data."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

from superpod.rehearsal.patches.registry import patch, rebind, replace

if TYPE_CHECKING:
    import torch


@patch(
    "gloo-timers",
    target="nemo ProgressPrinter.log_megatron_timers",
    reason="only rank 0 formats Megatron's timers, which gathers over WORLD: harmless with NCCL, but with gloo, the "
    "ranks call different collectives and hang",
)
def _patch_timers() -> None:
    from nemo.lightning.pytorch.callbacks.progress_printer import ProgressPrinter

    replace(ProgressPrinter, log_megatron_timers=lambda self, timers: None)


@patch(
    "checkpoint-device",
    target="nemo.lightning.io.pl._fix_tensors_device",
    reason="after loading, it asserts that CUDA is initialized and moves tensors to the current GPU",
)
def _patch_checkpoint_device() -> None:
    from nemo.lightning.io import pl

    rebind(pl, "_fix_tensors_device", lambda checkpoint: checkpoint)


@patch(
    "model-parallel-seed",
    target="nemo.lightning.megatron_init._set_random_seed",
    reason="NeMo seeds the model-parallel generators only when device_count() > 0",
)
def _patch_seed() -> None:
    import torch
    from nemo.lightning import megatron_init

    original = megatron_init._set_random_seed

    def seed(value: int) -> None:
        with mock.patch.object(torch.cuda, "device_count", return_value=1):
            original(value)

    rebind(megatron_init, "_set_random_seed", seed)


@patch(
    "attention-mask",
    target="nemo.collections.llm.gpt.model.base.get_batch_on_this_cp_rank",
    reason="without TE, NeMo requires a mask of sequence x sequence in every batch (and its MockDataModule passes the "
    "flag that requests one as the seed of the data set); the attention patch creates the causal mask itself",
)
def _patch_attention_mask() -> None:
    from nemo.collections.llm.gpt.model import base

    original = base.get_batch_on_this_cp_rank

    def without_mask(batch: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        return {**original({**batch, "attention_mask": None}), "attention_mask": None}

    replace(base, get_batch_on_this_cp_rank=without_mask)
