"""What runs of a software's release have in common that a table of them does not print: options, and FP8's kind.

A table's `release` and `framework` columns choose; its `options`, `layout` and `recompute` columns win over all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

UNFUSED = {"attention": "unfused", "impl": "local", "fused_loss": False, "overlap_tp": False}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
NO_OVERLAP = {"overlap_grads": False, "overlap_params": False}


@dataclass(frozen=True)
class Release:
    """What holds for runs of a release, where a row does not say otherwise."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Options`."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Layout`."""
    tuned: bool = False
    """Its runs recompute what does not fit, and their tables do not print it."""
    by_cost: bool = False
    """Layers are partitioned by their parameters: `stages.partition_by_cost`."""


PERFORMANCE = {"fp8_params": True, "grads": "bf16", "loss_impl": "te", "lora_targets": ("linear_qkv",)}
"""scripts/performance of NeMo and Megatron-Bridge: fp8_param_gather, grad_reduce_in_fp32 off, the loss of Transformer
Engine (set_primary_perf_configs), LoRA of queries, keys and values only (llama3_70b_lora_config)."""
PLAIN = Release()
RELEASES = {
    # Megatron-DeepSpeed of 2023: dropout, and no flash attention
    r"DeepSpeed|vTrain": Release(
        {**UNFUSED, **DROPOUT, **NO_OVERLAP, "framework": "deepspeed"}, {"sp": False}, tuned=True
    ),
    # PyTorch's FSDP2: torchtitan, NeMo Automodel
    r"torchtitan|Automodel|FSDP2": Release(
        {"framework": "fsdp2", "fused_loss": False}, {"sharding": "zero3"}, tuned=True
    ),
    # training_results_v5.0, NVIDIA's llama31_405b and llama2_70b_lora: FP8 parameters, gradients reduced in BF16, LoRA
    # of rank 16 on attention only
    r"MLPerf": Release(
        {
            **{"fp8_params": True, "grads": "bf16", "loss_impl": "te"},
            **{"lora_rank": 16, "lora_dropout": 0.1, "lora_targets": ("linear_qkv", "linear_proj")},
        },
        tuned=True,
    ),
    # Megatron-LM of 2021 and 2022 (arXiv:2104.04473, 2205.05198), before flash attention
    r"SC21|Korthikanti22": Release({**UNFUSED, **DROPOUT, **NO_OVERLAP}, tuned=True),
    # Hugging Face's nanotron: pipeline stages by the parameters of their blocks
    r"nanotron": Release({"fused_loss": False}, by_cost=True),
    # from 25.09 on expert_tensor_parallel_size 1 in every preset
    r"NeMo 2(5\.(09|1)|6)|verification card|Megatron-Bridge": Release(
        PERFORMANCE,
        {"etp": 1},
        tuned=True,
    ),
    r"NeMo|tag v": Release(PERFORMANCE, tuned=True),
}
"""Pattern of a row's framework and release -> what holds for it. The first that matches counts."""


@cache
def find(framework: str, release: str) -> Release:
    """What holds for a framework's release; `PLAIN` where nothing is known of it."""
    text = f"{framework} {release}"
    return next((known for pattern, known in RELEASES.items() if re.search(pattern, text, re.I)), PLAIN)


@cache
def normalize(release: str, fine_tunes: bool) -> str:
    """A row's release as `Options.release` has it; verification cards are of runs that nobody tuned."""
    text = release.strip()
    if "MLPerf" in text:
        return f"era {text.lower()}"
    if text in ("SC21", "Korthikanti22"):
        return "era 2021"
    number = re.search(r"(?:NeMo|container|tag v)\s*(\d\d\.\d\d)", text)
    short = f"NeMo {number[1]}" if number else text
    return f"{short}, functional" if "verification card" in text and fine_tunes else short


@cache
def fp8_kind(release: str) -> str:
    """Which FP8 a row that only says `fp8` means: NeMo scaled by delayed maxima before mid-2025, as MLPerf still does,
    and by the current one later.
    """
    late = re.search(r"NeMo 2(5\.(0[4-9]|1)|6)|container 2[56]", release)
    return "fp8cs" if late else "fp8ds"
