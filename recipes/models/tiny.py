"""Models that are small enough to train on CPUs, with the classes of the large models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model

if TYPE_CHECKING:
    import nemo_run as run


def _shorten_intervals(partial: run.Partial) -> None:
    """Let a recipe log every step, and validate and save often, for runs of one or two minutes."""
    partial.trainer.log_every_n_steps = 1
    partial.trainer.val_check_interval = 20
    partial.trainer.limit_val_batches = 4
    partial.trainer.limit_test_batches = 1
    partial.log.ckpt.every_n_train_steps = 10


@model(seq=256, lr=3e-3, min_lr=3e-4, warmup_steps=10, max_steps=60, tune=_shorten_intervals)
def tiny_llama3() -> run.Config:
    """Llama 3 with 4 layers and hidden size 192: 3 million parameters, for two ranks on any machine."""
    import nemo_run as run
    from nemo.collections import llm
    from nemo.collections.llm.gpt.model.llama import Llama3Config

    config = run.Config(
        Llama3Config,
        num_layers=4,
        hidden_size=192,
        ffn_hidden_size=512,
        num_attention_heads=6,
        num_query_groups=2,
        init_method_std=0.02,
    )
    return run.Config(llm.LlamaModel, config=config)
