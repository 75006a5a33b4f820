"""Read the constants of the step-time model from `data/calibration.toml`: times relative to kernels and bandwidths.

The file has `[constants]`, and tables `[factors."..."]` that multiply some of them for a GPU generation, a precision, a
release of the software, or a class of runs. No constant is specific to one run, model or GPU.
`benchmarks/fit_steptime.py` writes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from superpod.planner.arrays import Array
from superpod.planner.calibration import corrections, releases
from superpod.planner.formats import config_files
from superpod.planner.hardware import Gpu
from superpod.planner.planned_job import PlannedJob

FILE = Path(__file__).parents[1] / "data" / "calibration.toml"
Value = TypeVar("Value", float, Array)
NOMINAL_LATENCY_US = 5.0
"""`latency_us` of the fabrics on which the constants were fitted; latencies of other networks scale with it."""

KERNELS = ("matmul", "plain", "router", "expert", "fill", "attention", "unfused", "scan", "delta")
TRAFFIC = ("main_grads", "stream", "scores", "loss", "cast", "expert_cast", "sorting")
COMPUTE = (*KERNELS, *TRAFFIC, "misaligned", "gap")
"""Constants that `software` multiplies: all computation of a GPU."""
TIERS = tuple(f"{group}_{tier}" for group in ("tp", "cp", "ep", "send", "dp") for tier in ("near", "far"))
BOUNDS = {
    **dict.fromkeys(KERNELS, 1.0),  # the kernel measured alone
    **dict.fromkeys(TRAFFIC, 1.0),  # HBM's bandwidth
    **dict.fromkeys(("states", "grads"), 1.0),
    **dict.fromkeys(TIERS, 1.0),  # the links' bandwidth
    "misaligned": 0.0,
    "gap": 0.0,
}
"""Constant -> lower bound. No factor, release or user's calibration makes anything faster than the hardware."""
UPPER_BOUNDS = {
    **dict.fromkeys(("tp_hidden", "cp_hidden", "send_hidden"), 0.95),
    **dict.fromkeys(("dp_under", "ep_under"), 1.0),
    "queue": 12.0,
}
"""Part of communication never overlaps, computation hides at most as much as it takes, and powers do not overflow."""

W_PER_TFLOPS = 0.48
"""GB200's power per peak BF16 TFLOP/s, at which the factors of `power` are 1."""


@cache
def power(gpu: Gpu) -> float:
    """Return the log of a GPU's power per peak TFLOP/s, relative to GB200: the exponent of the factors of `power`.

    A GPU that trains reaches its power limit, and lowers its clock; kernels that are timed alone do not. A100 has
    1.28 W per TFLOP/s, H100 0.71, B200 0.44 and GB300 0.56.
    """
    return float(np.log(gpu.power_w / max(gpu.bf16_tflops, gpu.fp16_tflops) / W_PER_TFLOPS))


@cache
def power_factor(gpu: Gpu, constant: str) -> float:
    """Return the factor of a constant for the GPU's power."""
    return float(_tables()["factors"]["power"].get(constant, 1.0) ** power(gpu))


def selectors(job: PlannedJob) -> tuple[str, ...]:
    """Return the names of the `[factors]` tables that apply to a job."""
    release, framework = job.options.release, job.options.framework
    gpu = job.node.gpu
    names = [f"generation {gpu.fitted_as or gpu.generation}", f"precision {job.precision}"]
    names.append(f"software {releases.software(release, framework)}")
    if job.task != "pretrain" and framework == "megatron":
        names.append(f"task {job.task}")
    if job.options.deepep:
        names.append("deepep")
    if job.options.cuda_graphs:
        names.append("graphs")
    if fuses_experts(job):
        names.append("fused experts")
    return tuple(names)


def fuses_experts(job: PlannedJob) -> bool:
    """Return whether a job runs its gated experts as one fused MXFP8 kernel."""
    m = job.model
    fused = job.options.fused_grouped_mlp and job.node.gpu.fuses_mxfp8_experts
    return m.is_moe and m.gated and job.precision == "mxfp8" and fused


def constants(job: PlannedJob) -> dict[str, float]:
    """Return name -> constant for a job, with bounds and a user's corrections applied."""
    _, own = corrections.decode(job.node.gpu.calibrated_as or job.node.gpu.name)
    values = unbounded(job)
    for name, factor in corrections.factors(own).items():
        values[name] *= factor
    return {name: float(value) for name, value in bounded(values).items()} | corrections.additions(own)


def unbounded(job: PlannedJob) -> dict[str, float]:
    """Return name -> constant for a job, without bounds and a user's corrections."""
    values = dict(_product(selectors(job)))
    latency = job.fabric.latency_us / NOMINAL_LATENCY_US
    for name in corrections.FAR_LATENCIES:
        values[name] *= latency
    for name in _tables()["factors"]["power"]:
        values[name] *= power_factor(job.node.gpu, name)
    return values


@cache
def _product(chosen: tuple[str, ...]) -> dict[str, float]:
    """Return name -> constant, multiplied by the factors of the chosen tables."""
    tables = _tables()
    values = {key: float(value) for key, value in tables["constants"].items()}
    for name in chosen:
        for key, factor in tables["factors"].get(name, {}).items():
            values[key] *= factor
    return with_hops(values)


def with_hops(values: Mapping[str, Value]) -> dict[str, Value]:
    """Add the latencies between nodes (`*_hops`), which are fitted together with those within a node (`*_steps`)."""
    return {**values, **{f"{group}_hops": values[f"{group}_steps"] for group in ("tp", "cp", "ep")}}


def bounded(values: Mapping[str, Value]) -> dict[str, Any]:
    """Return the constants with those of computation multiplied by `software`, and limited to their bounds."""
    result: dict[str, Any] = dict(values)
    software = result.pop("software")
    for name in COMPUTE:
        result[name] = result[name] * software
    for name, least in BOUNDS.items():
        result[name] = np.maximum(result[name], least)
    for name, most in UPPER_BOUNDS.items():
        result[name] = np.minimum(result[name], most)
    return result


@cache
def _tables() -> dict[str, Any]:
    """Return the tables of `data/calibration.toml`."""
    return config_files.read_toml(FILE)
