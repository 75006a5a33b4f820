"""Llama 3, 3.1 and 3.2.

Learning rates: The Llama 3 Herd of Models (arXiv:2407.21783), table 3 and section 3.4.1. Steps: its 15.6 trillion
tokens at the recipe's global batch of 8,192-token samples. The 1B and 3B models were distilled; theirs are the 8B's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.recipes.registry import model

if TYPE_CHECKING:
    import nemo_run as run

TRAINED = {"vocab_size": 128_256, "seq": 8192}
SMALL = TRAINED | {"lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 2000, "max_steps": 3_719_330}


@model(**SMALL, hf="meta-llama/Meta-Llama-3-8B")
def llama3_8b() -> run.Config:
    """Llama 3 8B: dense, GQA with 8 groups, untied embeddings."""
    return _llama("Llama3Config8B")


@model(**SMALL | {"lr": 1.5e-4, "min_lr": 1.5e-5}, hf="meta-llama/Meta-Llama-3-70B")
def llama3_70b() -> run.Config:
    """Llama 3 70B: dense, GQA with 8 groups, 80 layers."""
    return _llama("Llama3Config70B")


@model(**TRAINED, lr=8e-5, min_lr=8e-7, warmup_steps=8000, max_steps=1_200_000, hf="meta-llama/Llama-3.1-405B")
def llama31_405b() -> run.Config:
    """Llama 3.1 405B: dense, GQA with 8 groups, 126 layers."""
    return _llama("Llama31Config405B")


@model(**SMALL, hf="meta-llama/Llama-3.2-1B")
def llama32_1b() -> run.Config:
    """Llama 3.2 1B: dense, tied embeddings."""
    return _llama("Llama32Config1B")


@model(**SMALL, hf="meta-llama/Llama-3.2-3B")
def llama32_3b() -> run.Config:
    """Llama 3.2 3B: dense, tied embeddings."""
    return _llama("Llama32Config3B")


def _llama(config: str) -> run.Config:
    import nemo_run as run
    from nemo.collections import llm

    return run.Config(llm.LlamaModel, config=run.Config(getattr(llm, config)))
