"""Defaults of software releases that published tables do not show: options, and the type of FP8 scaling.

The `release` and `framework` columns of a table select a release; its `options`, `layout` and `recompute` columns take
precedence.
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
    """Defaults for runs of a release."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Options`."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Layout`."""
    tuned: bool = False
    """Whether the runs recompute as much as necessary to fit, without a value in the table."""
    by_cost: bool = False
    """Whether layers are partitioned by parameters (`stages.partition_by_cost`)."""


PERFORMANCE = {"fp8_params": True, "grads": "bf16", "loss_impl": "te", "lora_targets": ("linear_qkv",)}
"""Options in scripts/performance of NeMo and Megatron-Bridge: fp8_param_gather, no grad_reduce_in_fp32, the loss of
Transformer Engine (set_primary_perf_configs), LoRA only on queries, keys and values (llama3_70b_lora_config)."""
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
    # from 25.09 on, expert_tensor_parallel_size is 1 in all presets
    r"NeMo 2(5\.(09|1)|6)|verification card|Megatron-Bridge": Release(
        PERFORMANCE,
        {"etp": 1},
        tuned=True,
    ),
    r"NeMo|tag v": Release(PERFORMANCE, tuned=True),
}
"""Regular expression for framework and release -> defaults. The first match applies."""


@cache
def find(framework: str, release: str) -> Release:
    """Return the defaults of a framework's release; `PLAIN` if it is unknown."""
    text = f"{framework} {release}"
    return next((known for pattern, known in RELEASES.items() if re.search(pattern, text, re.I)), PLAIN)


@cache
def normalize(release: str, fine_tunes: bool) -> str:
    """Return a row's release in the form of `Options.release`; runs on verification cards were not tuned."""
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
    """Return the precision of a row with `fp8`: delayed scaling in NeMo before mid-2025 and in MLPerf, else current."""
    is_late = re.search(r"NeMo 2(5\.(0[4-9]|1)|6)|container 2[56]", release)
    return "fp8cs" if is_late else "fp8ds"
