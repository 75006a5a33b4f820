"""Llama 2, 3, 3.1, 3.2 and 4.

Learning rates: Llama 2 (arXiv:2307.09288, section 2.2); The Llama 3 Herd of Models (arXiv:2407.21783), table 3 and
section 3.4.1. Steps: the 2 and 15.6 trillion tokens of these papers at the recipe's global batch. The 1B and 3B models
were distilled, so they have the values of the 8B model. Those of Llama 4 are not published; they are NeMo 2.7.3's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    import nemo_run as run

LLAMA2 = {"seq": 4096, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 2000, "max_steps": 476_837}
LLAMA2_70B = LLAMA2 | {"lr": 1.5e-4, "min_lr": 1.5e-5}
LLAMA3 = {"seq": 8192, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 2000, "max_steps": 3_719_330}
LLAMA3_70B = LLAMA3 | {"lr": 1.5e-4, "min_lr": 1.5e-5}
LLAMA3_405B = LLAMA3 | {"lr": 8e-5, "min_lr": 8e-7, "warmup_steps": 8000, "max_steps": 1_200_000}
LLAMA4 = LLAMA3 | {"max_steps": 1_168_251}


@model(**LLAMA2, hf="meta-llama/Llama-2-7b-hf")
def llama2_7b() -> run.Config:
    """Llama 2 7B: dense, no GQA."""
    return nemo("LlamaModel", "Llama2Config7B")


@model(**LLAMA2, hf="meta-llama/Llama-2-13b-hf")
def llama2_13b() -> run.Config:
    """Llama 2 13B: dense, no GQA."""
    return nemo("LlamaModel", "Llama2Config13B")


@model(**LLAMA2_70B, hf="meta-llama/Llama-2-70b-hf")
def llama2_70b() -> run.Config:
    """Llama 2 70B: dense, GQA with 8 groups, 80 layers."""
    return nemo("LlamaModel", "Llama2Config70B")


@model(**LLAMA3, hf="meta-llama/Meta-Llama-3-8B")
def llama3_8b() -> run.Config:
    """Llama 3 8B: dense, GQA with 8 groups, untied embeddings."""
    return nemo("LlamaModel", "Llama3Config8B")


@model(**LLAMA3_70B, hf="meta-llama/Meta-Llama-3-70B")
def llama3_70b() -> run.Config:
    """Llama 3 70B: dense, GQA with 8 groups, 80 layers."""
    return nemo("LlamaModel", "Llama3Config70B")


@model(**LLAMA3, hf="meta-llama/Llama-3.1-8B")
def llama31_8b() -> run.Config:
    """Llama 3.1 8B: Llama 3's shape, context extended to 128k."""
    return nemo("LlamaModel", "Llama31Config8B")


@model(**LLAMA3_70B, hf="meta-llama/Llama-3.1-70B")
def llama31_70b() -> run.Config:
    """Llama 3.1 70B: Llama 3's shape, context extended to 128k."""
    return nemo("LlamaModel", "Llama31Config70B")


@model(**LLAMA3_405B, hf="meta-llama/Llama-3.1-405B")
def llama31_405b() -> run.Config:
    """Llama 3.1 405B: dense, GQA with 8 groups, 126 layers."""
    return nemo("LlamaModel", "Llama31Config405B")


@model(**LLAMA3, hf="meta-llama/Llama-3.2-1B")
def llama32_1b() -> run.Config:
    """Llama 3.2 1B: dense, tied embeddings."""
    return nemo("LlamaModel", "Llama32Config1B")


@model(**LLAMA3, hf="meta-llama/Llama-3.2-3B")
def llama32_3b() -> run.Config:
    """Llama 3.2 3B: dense, tied embeddings."""
    return nemo("LlamaModel", "Llama32Config3B")


@model(**LLAMA4, hf="meta-llama/Llama-4-Scout-17B-16E-Instruct")
def llama4_scout() -> run.Config:
    """Llama 4 Scout: 16 experts, one routed and one shared, chunked attention; the text model."""
    return nemo("LlamaModel", "Llama4Experts16Config")


@model(**LLAMA4, hf="meta-llama/Llama-4-Maverick-17B-128E-Instruct")
def llama4_maverick() -> run.Config:
    """Llama 4 Maverick: 128 experts in every other layer, chunked attention; the text model."""
    return nemo("LlamaModel", "Llama4Experts128Config")
