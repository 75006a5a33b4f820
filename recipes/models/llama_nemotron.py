"""Llama-Nemotron: NVIDIA's derivatives of Llama 3.1 and 3.3, two of them with layers of different widths.

They were distilled and tuned, not pretrained: learning rates and steps are those of NeMo 2.7.3 for their shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    import nemo_run as run

SHAPED = {"seq": 8192, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 2000, "max_steps": 1_168_251}


@model(**SHAPED, hf="nvidia/Llama-3.1-Nemotron-Nano-8B-v1")
def llama31_nemotron_nano_8b() -> run.Config:
    """Llama 3.1 Nemotron Nano 8B: Llama 3.1 8B's shape."""
    return nemo("LlamaNemotronModel", "Llama31NemotronNano8BConfig")


@model(**SHAPED, hf="nvidia/Llama-3.1-Nemotron-70B-Instruct-HF")
def llama31_nemotron_70b() -> run.Config:
    """Llama 3.1 Nemotron 70B: Llama 3.1 70B's shape."""
    return nemo("LlamaNemotronModel", "Llama31Nemotron70BConfig")


@model(**SHAPED, hf="nvidia/Llama-3_3-Nemotron-Super-49B-v1")
def llama33_nemotron_super_49b() -> run.Config:
    """Llama 3.3 Nemotron Super 49B: 80 layers of different widths, some without attention."""
    return nemo("LlamaNemotronModel", "Llama33NemotronSuper49BConfig")


@model(**SHAPED, hf="nvidia/Llama-3_1-Nemotron-Ultra-253B-v1")
def llama31_nemotron_ultra_253b() -> run.Config:
    """Llama 3.1 Nemotron Ultra 253B: 162 layers of different widths, some without attention."""
    return nemo("LlamaNemotronModel", "Llama31NemotronUltra253BConfig")
