"""Mistral and Mixtral.

Their learning rates are not published. Learning rates and steps are those of NeMo 2.7.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    import nemo_run as run

MISTRAL = {"seq": 4096, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 2000, "max_steps": 1_168_251}
LONGER = MISTRAL | {"seq": 8192}


@model(**MISTRAL, hf="mistralai/Mistral-7B-v0.3")
def mistral_7b() -> run.Config:
    """Mistral 7B: dense, GQA with 8 groups."""
    return nemo("MistralModel", "MistralConfig7B")


@model(**LONGER, hf="mistralai/Mistral-Nemo-Base-2407")
def mistral_nemo_12b() -> run.Config:
    """Mistral NeMo 12B: dense, hidden size 5,120, head size 128."""
    return nemo("MistralModel", "MistralNeMoConfig12B")


SMALL3 = ("nemo_toolkit", "2.7", "", "MistralSmall3Config24B, missing in the NeMo of the image nemo:25.09")


@model(**LONGER, hf="mistralai/Mistral-Small-24B-Base-2501", needs=(SMALL3,))
def mistral_small3_24b() -> run.Config:
    """Mistral Small 3 24B: dense, hidden size 5,120, head size 128."""
    return nemo("MistralModel", "MistralSmall3Config24B")


@model(**MISTRAL, hf="mistralai/Mixtral-8x7B-v0.1")
def mixtral_8x7b() -> run.Config:
    """Mixtral 8x7B: 8 experts, 2 active."""
    return nemo("MixtralModel", "MixtralConfig8x7B")


@model(**MISTRAL, hf="mistralai/Mixtral-8x22B-v0.1")
def mixtral_8x22b() -> run.Config:
    """Mixtral 8x22B: 56 layers, 8 experts, 2 active."""
    return nemo("MixtralModel", "MixtralConfig8x22B")
