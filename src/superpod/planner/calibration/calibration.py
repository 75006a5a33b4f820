"""The constants of the step-time model, from `data/calibration/*.toml`: achieved relative to nominal performance.

A GPU's file has its `[constants]`, and `[factors."..."]` that multiply some of them: for a precision, for a software
era, or for MoE models in that era. GPUs without a file use `generic.toml`. No constant is specific to one run or one
model. `benchmarks/fit_steptime.py` writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from superpod.planner.arrays import Array
from superpod.planner.calibration import corrections
from superpod.planner.formats import config_files
from superpod.planner.planned_job import PlannedJob

FOLDER = Path(__file__).parents[1] / "data" / "calibration"

ERAS = ((24.99, "24"), (25.08, "25.0"), (25.99, "25.1"), (26.05, "26.0"), (99.0, "26.1"))
"""Last NeMo release (year.month) of each software era, and the name of the era."""
Value = TypeVar("Value", float, Array)
NOMINAL_LATENCY_US = 5.0
"""`latency_us` of the fabrics on which the constants were fitted; latencies of other networks scale with it."""
PINNED = "25.1"
"""The era of the versions pinned by this project (NeMo 2.7.3, megatron-core 0.15.3), and of jobs without a release."""


def era(job: PlannedJob) -> str:
    """Return the software era of a job: for NeMo based on its release, for other frameworks their name."""
    release, framework = job.options.release, job.options.framework
    if framework != "megatron":
        return framework
    if release.startswith("era "):
        return release.removeprefix("era ")
    number = re.match(r"NeMo\s*(\d\d\.\d\d)", release)
    return next((name for most, name in ERAS if float(number[1]) <= most), ERAS[-1][1]) if number else PINNED


def selectors(job: PlannedJob) -> tuple[str, ...]:
    """Return the names of the factors that apply to a job, which are keys in a GPU's file."""
    kind = "moe" if job.model.is_moe else "dense"
    when = era(job)
    names = [f"precision {job.precision}", f"era {when}", f"era {when} {kind}"]
    if job.task != "pretrain":
        names.append(f"task {job.task}")
    if job.options.release.endswith(", functional"):
        names.append(f"functional {kind}")
    if job.options.deepep:
        names.append("deepep")
    if fused_experts(job):
        names.append("fused experts")
    return tuple(names)


def fused_experts(job: PlannedJob) -> bool:
    """Whether gated experts run as one fused MXFP8 kernel: on Blackwell from release 26.06 on.

    Source: `cutedsl_fused_grouped_mlp` in Megatron-Bridge's scripts/performance/configs.
    """
    m = job.model
    return (
        m.is_moe and m.gated and era(job) == "26.1"
        and job.precision == "mxfp8" and job.node.gpu.fuses_mxfp8_experts
    )  # fmt: skip


def constants(job: PlannedJob) -> dict[str, float]:
    """Return name -> constant for a job, including the corrections of a user's own calibration."""
    gpu, own = corrections.decode(job.node.gpu.calibrated_as or job.node.gpu.name)
    latency = job.fabric.latency_us / NOMINAL_LATENCY_US
    if latency != 1:
        own["far_latency"] = own.get("far_latency", 1.0) * latency
    values = dict(_resolve_tables(gpu, selectors(job)))
    for name, factor in corrections.factors(own).items():
        values[name] *= factor
    return values | corrections.additions(own)


@cache
def _resolve_tables(gpu: str, chosen: tuple[str, ...]) -> dict[str, float]:
    return resolve(_tables(gpu), chosen)


def resolve(tables: Mapping[str, Any], chosen: tuple[str, ...]) -> dict[str, float]:
    """Return the constants in a file's tables, multiplied by the chosen factors and clipped to their limits."""
    values = {key: float(value) for key, value in tables["constants"].items()}
    for name in chosen:
        for key, factor in tables.get("factors", {}).get(name, {}).items():
            values[key] *= factor
    least = tables.get("least", {})
    return with_hops({key: min(max(value, least.get(key, 0.0)), upper_limit(key)) for key, value in values.items()})


def with_hops(values: Mapping[str, Value]) -> dict[str, Value]:
    """Add the latencies between nodes, which are fitted together with those inside a node."""
    return {**values, **{f"{group}_hops": values[f"{group}_steps"] for group in ("tp", "cp", "ep")}}


def upper_limit(name: str) -> float:
    """Return the upper limit of a constant: overlapped fractions stay below 1, powers do not overflow."""
    return 0.95 if name.endswith("_hidden") else 12.0 if name == "queue" else float("inf")


@cache
def _tables(gpu: str) -> dict[str, Any]:
    path = FOLDER / f"{gpu}.toml"
    return config_files.read_toml(path if path.exists() else FOLDER / "generic.toml")
