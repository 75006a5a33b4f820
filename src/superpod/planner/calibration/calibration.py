"""The constants of the time model, from `data/calibration/*.toml`: what hardware and software reach of the nominal.

A GPU's file holds its `[constants]`, and `[factors."..."]` that multiply some of them: for a precision, for a software
era, for mixtures of experts in that era. A GPU without a file takes `generic.toml`. No constant belongs to one run or
one model. `benchmarks/fit_steptime.py` writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from superpod.planner.arrays import Array
from superpod.planner.calibration import corrections
from superpod.planner.formats import files
from superpod.planner.planned_job import PlannedJob

FOLDER = Path(__file__).parents[1] / "data" / "calibration"

ERAS = ((24.99, "24"), (25.08, "25.0"), (25.99, "25.1"), (26.05, "26.0"), (99.0, "26.1"))
"""NeMo releases up to a number (year.month), and the name of their era."""
Value = TypeVar("Value", float, Array)
NOMINAL_LATENCY_US = 5.0
"""`latency_us` of the fabrics that the constants were fitted on: those of another network are longer in proportion."""
PINNED = "25.1"
"""The era of what this project installs (NeMo 2.7.3, megatron-core 0.15.3), and of a job that names no release."""


def era(job: PlannedJob) -> str:
    """The software's era: of NeMo by the number of its release, of another framework its name."""
    release, framework = job.options.release, job.options.framework
    if framework != "megatron":
        return framework
    if release.startswith("era "):
        return release.removeprefix("era ")
    number = re.match(r"NeMo\s*(\d\d\.\d\d)", release)
    return next((name for most, name in ERAS if float(number[1]) <= most), ERAS[-1][1]) if number else PINNED


def selectors(job: PlannedJob) -> tuple[str, ...]:
    """The factors that apply to a job, by name: their keys in a GPU's file."""
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
    """Whether gated experts run as one fused MXFP8 kernel: Blackwell from 26.06 on (`cutedsl_fused_grouped_mlp` of
    Megatron-Bridge's scripts/performance/configs)."""
    m = job.model
    return (
        m.is_moe and m.gated and era(job) == "26.1"
        and job.precision == "mxfp8" and job.node.gpu.fuses_mxfp8_experts
    )  # fmt: skip


def constants(job: PlannedJob) -> dict[str, float]:
    """The constants for a job, by name, with what a user's own calibration corrects."""
    gpu, own = corrections.decode(job.node.gpu.calibrated_as or job.node.gpu.name)
    latency = job.fabric.latency_us / NOMINAL_LATENCY_US
    if latency != 1:
        own["far_latency"] = own.get("far_latency", 1.0) * latency
    values = dict(_resolved(gpu, selectors(job)))
    for name, factor in corrections.factors(own).items():
        values[name] *= factor
    return values | corrections.additions(own)


@cache
def _resolved(gpu: str, chosen: tuple[str, ...]) -> dict[str, float]:
    return resolve(_tables(gpu), chosen)


def resolve(tables: Mapping[str, Any], chosen: tuple[str, ...]) -> dict[str, float]:
    """The constants of a file's tables with the chosen factors multiplied in; each within its limits."""
    values = {key: float(value) for key, value in tables["constants"].items()}
    for name in chosen:
        for key, factor in tables.get("factors", {}).get(name, {}).items():
            values[key] *= factor
    least = tables.get("least", {})
    return with_hops({key: min(max(value, least.get(key, 0.0)), upper_limit(key)) for key, value in values.items()})


def with_hops(values: Mapping[str, Value]) -> dict[str, Value]:
    """The constants with latencies between nodes, which are fitted as one with those inside."""
    return {**values, **{f"{group}_hops": values[f"{group}_steps"] for group in ("tp", "cp", "ep")}}


def upper_limit(name: str) -> float:
    """Upper limit of a constant: hidden shares stay below 1, and powers of seconds below overflow."""
    return 0.95 if name.endswith("_hidden") else 12.0 if name == "queue" else float("inf")


@cache
def _tables(gpu: str) -> dict[str, Any]:
    path = FOLDER / f"{gpu}.toml"
    return files.read_toml(path if path.exists() else FOLDER / "generic.toml")
