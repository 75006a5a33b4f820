"""Gemma 3 1B in a user collection, with a fixed attention in `modules/gemma3_attention.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model

if TYPE_CHECKING:
    import nemo_run as run


@model(seq=8192, lr=3e-4, min_lr=3e-5, warmup_steps=2000, max_steps=1_168_251, hf="google/gemma-3-1b-pt")
def gemma3_1b_fixed() -> run.Config:
    """Gemma 3 1B that trains with Megatron-Core 0.15: sliding window in five of six layers."""
    import nemo_run as run
    from gemma3_attention import CosSinConfig1B
    from nemo.collections import llm

    return run.Config(llm.Gemma3Model, config=run.Config(CosSinConfig1B))
