"""Gemma 1, 2 and 3 (text models), all with tied embeddings.

Their learning rates are not published. Learning rates and steps are those of NeMo 2.7.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    import nemo_run as run

GEMMA = {"seq": 8192, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 2000, "max_steps": 1_168_251}
GEMMA2 = GEMMA | {"seq": 4096, "warmup_steps": 500}


@model(**GEMMA, hf="google/gemma-2b")
def gemma_2b() -> run.Config:
    """Gemma 2B: dense, one query group, head size 256."""
    return nemo("GemmaModel", "GemmaConfig2B")


@model(**GEMMA, hf="google/gemma-7b")
def gemma_7b() -> run.Config:
    """Gemma 7B: dense, head size 256."""
    return nemo("GemmaModel", "GemmaConfig7B")


@model(**GEMMA2, hf="google/gemma-2-2b")
def gemma2_2b() -> run.Config:
    """Gemma 2 2B: sliding window in every other layer, soft-capped attention, norms before and after."""
    return nemo("Gemma2Model", "Gemma2Config2B")


@model(**GEMMA2, hf="google/gemma-2-9b")
def gemma2_9b() -> run.Config:
    """Gemma 2 9B: sliding window in every other layer, soft-capped attention, norms before and after."""
    return nemo("Gemma2Model", "Gemma2Config9B")


@model(**GEMMA2, hf="google/gemma-2-27b")
def gemma2_27b() -> run.Config:
    """Gemma 2 27B: sliding window in every other layer, soft-capped attention, norms before and after."""
    return nemo("Gemma2Model", "Gemma2Config27B")


NO_COS_SIN = (
    "Megatron-Core 0.15 calls attention with rotary_pos_cos_sin (transformer_layer.py:506), but NeMo 2.7.3's "
    "Gemma3SelfAttention.forward (gemma3.py) does not accept it: the first step fails with a TypeError"
)
FIX_COS_SIN = "use gemma3_1b_fixed of examples/gemma3: `recipes --recipes examples/gemma3 list gemma3_1b_fixed`"


@model(**GEMMA, hf="google/gemma-3-1b-pt", broken=NO_COS_SIN, workaround=FIX_COS_SIN)
def gemma3_1b() -> run.Config:
    """Gemma 3 1B: sliding window in five of six layers. NeMo 2.7.3's does not train with Megatron-Core 0.15.3."""
    return nemo("Gemma3Model", "Gemma3Config1B")
