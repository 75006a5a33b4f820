"""Gemma 3 1B as a model of one's own: what the shipped one lacks is in `modules/gemma3_attention.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model

if TYPE_CHECKING:
    import nemo_run as run


@model(seq=8192, lr=3e-4, min_lr=3e-5, warmup_steps=2000, max_steps=1_168_251, hf="google/gemma-3-1b-pt")
def gemma3_1b_mended() -> run.Config:
    """Gemma 3 1B that trains on Megatron-Core 0.15: five layers with a window to one without."""
    import nemo_run as run
    from gemma3_attention import CosSinConfig1B
    from nemo.collections import llm

    return run.Config(llm.Gemma3Model, config=run.Config(CosSinConfig1B))
