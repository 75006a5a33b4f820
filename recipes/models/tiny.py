"""Models small enough to train where there is no GPU: the same classes as the large ones, other numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.recipes.registry import model

if TYPE_CHECKING:
    import nemo_run as run


def _short(partial: run.Partial) -> None:
    """A run of a minute or two: look at the loss every step, validate and checkpoint often."""
    partial.trainer.log_every_n_steps = 1
    partial.trainer.val_check_interval = 20
    partial.trainer.limit_val_batches = 4
    partial.trainer.limit_test_batches = 1
    partial.log.ckpt.every_n_train_steps = 10


@model(seq=256, lr=3e-3, min_lr=3e-4, warmup_steps=10, max_steps=60, tune=_short)
def tiny_llama3() -> run.Config:
    """Llama 3 with 4 layers of 192: 3 million parameters, for two ranks of any machine."""
    import nemo_run as run
    from nemo.collections import llm
    from nemo.collections.llm.gpt.model.llama import Llama3Config

    size = {"num_layers": 4, "hidden_size": 192, "ffn_hidden_size": 512, "num_attention_heads": 6}
    config = run.Config(Llama3Config, **size, num_query_groups=2, init_method_std=0.02)
    return run.Config(llm.LlamaModel, config=config)
