"""Qwen2, Qwen2.5 and Qwen3, dense and mixture of experts.

Their learning rates are not published. Learning rates and steps are those of NeMo 2.7.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    import nemo_run as run

QWEN = {"seq": 4096, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 500, "max_steps": 300_000}


@model(**QWEN, hf="Qwen/Qwen2-0.5B")
def qwen2_500m() -> run.Config:
    """Qwen2 0.5B: dense, GQA, QKV biases, tied embeddings."""
    return nemo("Qwen2Model", "Qwen2Config500M")


@model(**QWEN, hf="Qwen/Qwen2-1.5B")
def qwen2_1p5b() -> run.Config:
    """Qwen2 1.5B: dense, GQA, QKV biases, tied embeddings."""
    return nemo("Qwen2Model", "Qwen2Config1P5B")


@model(**QWEN, hf="Qwen/Qwen2-7B")
def qwen2_7b() -> run.Config:
    """Qwen2 7B: dense, GQA, QKV biases."""
    return nemo("Qwen2Model", "Qwen2Config7B")


@model(**QWEN, hf="Qwen/Qwen2-72B")
def qwen2_72b() -> run.Config:
    """Qwen2 72B: dense, GQA, QKV biases."""
    return nemo("Qwen2Model", "Qwen2Config72B")


@model(**QWEN, hf="Qwen/Qwen2.5-0.5B")
def qwen25_500m() -> run.Config:
    """Qwen2.5 0.5B: dense, GQA, QKV biases, tied embeddings."""
    return nemo("Qwen2Model", "Qwen25Config500M")


@model(**QWEN, hf="Qwen/Qwen2.5-1.5B")
def qwen25_1p5b() -> run.Config:
    """Qwen2.5 1.5B: dense, GQA, QKV biases, tied embeddings."""
    return nemo("Qwen2Model", "Qwen25Config1P5B")


@model(**QWEN, hf="Qwen/Qwen2.5-3B")
def qwen25_3b() -> run.Config:
    """Qwen2.5 3B: dense, GQA with 2 groups, QKV biases, tied embeddings."""
    return nemo("Qwen2Model", "Qwen25Config3B")


@model(**QWEN, hf="Qwen/Qwen2.5-7B")
def qwen25_7b() -> run.Config:
    """Qwen2.5 7B: dense, GQA, QKV biases."""
    return nemo("Qwen2Model", "Qwen25Config7B")


@model(**QWEN, hf="Qwen/Qwen2.5-14B")
def qwen25_14b() -> run.Config:
    """Qwen2.5 14B: dense, GQA, QKV biases."""
    return nemo("Qwen2Model", "Qwen25Config14B")


@model(**QWEN, hf="Qwen/Qwen2.5-32B")
def qwen25_32b() -> run.Config:
    """Qwen2.5 32B: dense, GQA, QKV biases."""
    return nemo("Qwen2Model", "Qwen25Config32B")


@model(**QWEN, hf="Qwen/Qwen2.5-72B")
def qwen25_72b() -> run.Config:
    """Qwen2.5 72B: dense, GQA, QKV biases."""
    return nemo("Qwen2Model", "Qwen25Config72B")


@model(**QWEN, hf="Qwen/Qwen3-0.6B")
def qwen3_600m() -> run.Config:
    """Qwen3 0.6B: dense, GQA, QK norm, tied embeddings."""
    return nemo("Qwen3Model", "Qwen3Config600M")


@model(**QWEN, hf="Qwen/Qwen3-1.7B")
def qwen3_1p7b() -> run.Config:
    """Qwen3 1.7B: dense, GQA, QK norm, tied embeddings."""
    return nemo("Qwen3Model", "Qwen3Config1P7B")


@model(**QWEN, hf="Qwen/Qwen3-4B")
def qwen3_4b() -> run.Config:
    """Qwen3 4B: dense, GQA, QK norm, tied embeddings."""
    return nemo("Qwen3Model", "Qwen3Config4B")


@model(**QWEN, hf="Qwen/Qwen3-8B")
def qwen3_8b() -> run.Config:
    """Qwen3 8B: dense, GQA, QK norm."""
    return nemo("Qwen3Model", "Qwen3Config8B")


@model(**QWEN, hf="Qwen/Qwen3-14B")
def qwen3_14b() -> run.Config:
    """Qwen3 14B: dense, GQA, QK norm."""
    return nemo("Qwen3Model", "Qwen3Config14B")


@model(**QWEN, hf="Qwen/Qwen3-32B")
def qwen3_32b() -> run.Config:
    """Qwen3 32B: dense, GQA, QK norm."""
    return nemo("Qwen3Model", "Qwen3Config32B")


@model(**QWEN, hf="Qwen/Qwen3-30B-A3B")
def qwen3_30b_a3b() -> run.Config:
    """Qwen3 30B-A3B: 128 experts, 8 active, QK norm."""
    return nemo("Qwen3Model", "Qwen3Config30B_A3B")


@model(**QWEN, hf="Qwen/Qwen3-235B-A22B")
def qwen3_235b_a22b() -> run.Config:
    """Qwen3 235B-A22B: 94 layers, 128 experts, 8 active."""
    return nemo("Qwen3Model", "Qwen3Config235B_A22B")
