"""Defaults that depend on the software release and are not in published tables, and the factors of its step times.

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
SOFTWARE = (
    *((24.99, "NeMo 24"), (25.08, "NeMo 25.0"), (25.99, "NeMo 25.1")),
    *((26.05, "NeMo 26.0"), (99.0, "NeMo 26.1")),
)
"""(last NeMo release as year.month, name) of each group of releases whose runs share a time factor."""
PINNED = "NeMo 25.1"
"""The group of the pinned versions (NeMo 2.7.3, megatron-core 0.15.3), and of jobs without a release."""
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
    """Whether runs recompute as much as they need to fit in memory if the table does not specify recomputation."""
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
    # from 26.06 on, gated experts in MXFP8 are one kernel (scripts/performance/configs: cutedsl_fused_grouped_mlp)
    r"NeMo 26\.(0[6-9]|1)|container 26\.(0[6-9]|1)": Release(
        PERFORMANCE | {"fused_grouped_mlp": True},
        {"etp": 1},
        tuned=True,
    ),
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
    """Return the default options and layout of a framework's release; `PLAIN` if the release is unknown."""
    text = f"{framework} {release}"
    return next((known for pattern, known in RELEASES.items() if re.search(pattern, text, re.I)), PLAIN)


@cache
def normalize(release: str) -> str:
    """Convert the `release` cell of a table to the form of `Options.release`, such as `NeMo 25.09`."""
    text = release.strip()
    number = re.search(r"(?:NeMo|container|tag v)\s*(\d\d\.\d\d)", text)
    return f"NeMo {number[1]}" if number else text


@cache
def fp8_kind(release: str) -> str:
    """Return `fp8cs` for NeMo releases from 25.04 on, else `fp8ds`: the scaling of rows that only specify `fp8`."""
    is_late = re.search(r"NeMo 2(5\.(0[4-9]|1)|6)|container 2[56]", release)
    return "fp8cs" if is_late else "fp8ds"


@cache
def software(release: str, framework: str) -> str:
    """Return the name of the time factor for a job's software: a group of NeMo releases, a framework or a benchmark."""
    if framework != "megatron":
        return framework
    if release.startswith("MLPerf"):
        return " ".join(release.split()[:2])
    if release in ("SC21", "Korthikanti22"):
        return "Megatron-LM 2021"
    number = re.match(r"NeMo\s*(\d\d\.\d\d)", release)
    return next(name for last, name in SOFTWARE if float(number[1]) <= last) if number else PINNED
