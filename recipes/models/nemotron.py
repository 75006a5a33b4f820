"""Nemotron 3 and 4.

Learning rates: Nemotron-4 15B (arXiv:2402.16819), Nemotron-4 340B (arXiv:2406.11704). The other learning rates, and all
steps, are those of NeMo 2.7.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    import nemo_run as run

NEMOTRON3 = {"seq": 4096, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 500, "max_steps": 300_000}


@model(**NEMOTRON3, hf="nvidia/Minitron-4B-Base")
def nemotron3_4b() -> run.Config:
    """Nemotron 3 4B: dense, squared ReLU, GQA with 8 groups."""
    return nemo("NemotronModel", "Nemotron3Config4B")


@model(**NEMOTRON3, hf="thhaus/nemotron3-8b")
def nemotron3_8b() -> run.Config:
    """Nemotron 3 8B: dense, squared ReLU, no GQA."""
    return nemo("NemotronModel", "Nemotron3Config8B")


@model(**NEMOTRON3 | {"lr": 1e-4, "min_lr": 1e-5}, hf="thhaus/nemotron3-22b-hf")
def nemotron3_22b() -> run.Config:
    """Nemotron 3 22B: dense, squared ReLU, 40 layers."""
    return nemo("NemotronModel", "Nemotron3Config22B")


@model(**NEMOTRON3 | {"lr": 4.5e-5, "min_lr": 4.5e-7}, hf="thhaus/nemotron4-15b-base-hf")
def nemotron4_15b() -> run.Config:
    """Nemotron 4 15B: dense, squared ReLU, GQA with 8 groups."""
    return nemo("NemotronModel", "Nemotron4Config15B")


@model(**NEMOTRON3 | {"lr": 1e-4, "min_lr": 1e-5}, hf="mgoin/Nemotron-4-340B-Base-hf")
def nemotron4_340b() -> run.Config:
    """Nemotron 4 340B: dense, squared ReLU, 96 layers, hidden size 18,432."""
    return nemo("NemotronModel", "Nemotron4Config340B")
