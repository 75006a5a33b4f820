"""The 80 % intervals of predictions, from the errors on models and sources that were held out of the fit.

A job belongs to a class: its training task, and whether published runs of its model and software exist. The interval
of a class is a conformal interval: quantiles of measured / predicted time of runs that were held out of the fit
together with their source (if the model is known) or with their model. `benchmarks/left_out.py --write` writes
`data/intervals.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from superpod.planner.arrays import Array, Flags, Number
from superpod.planner.formats import config_files
from superpod.planner.planned_job import PlannedJob

FILE = Path(__file__).parent / "data" / "intervals.toml"
EXTRAPOLATION = 2.0
"""Exponent of an interval's factors beyond the sizes of all published runs: twice as wide. No runs exist to calibrate
this value."""


@dataclass(frozen=True)
class Interval:
    """The interval that contains 80 % of the measurements, as two factors on the prediction."""

    name: str
    """The class, such as `experts, unknown model`."""
    time: tuple[float, float]
    memory: tuple[float, float]
    """Factors on allocated memory."""
    largest_gpus: int
    """Number of GPUs of the largest run in the fit."""
    beyond: str
    """How the job exceeds all runs in the fit, such as `more than 16,384 GPUs`; "" = it does not."""
    is_wide: bool
    """Whether no run in the fit has this sequence length or GPU; the interval is then wide for any number of GPUs."""

    def time_factors(self, gpus: Number) -> tuple[Array, Array]:
        """Return (low, high) factors on the step time for each number of GPUs."""
        power = np.where(self.is_extrapolated(gpus), EXTRAPOLATION, 1.0)
        return self.time[0] ** power, self.time[1] ** power

    def is_extrapolated(self, gpus: Number) -> Flags:
        """Return, for each number of GPUs, whether the run is outside the range of the fit."""
        return (np.asarray(gpus) > self.largest_gpus) | self.is_wide


def from_job(job: PlannedJob) -> Interval:
    """Return the 80 % interval of the predictions for a job."""
    tables = _tables()
    name = class_name(job, job.model.name in tables["models"])
    largest = tables["largest"]
    beyond = []
    if job.gpus > largest["gpus"]:
        beyond.append(f"more than {largest['gpus']:,} GPUs")
    if job.seq > largest["seq"]:
        beyond.append(f"sequences of more than {largest['seq']:,} tokens")
    gpu = job.node.gpu
    if gpu.fitted_as:
        beyond.append(f"a GPU of the generation {gpu.generation} (the constants are those of {gpu.fitted_as})")
    is_wide = job.seq > largest["seq"] or bool(gpu.fitted_as)
    software = "megatron" if job.options.framework == "megatron" else "other software"
    time, memory = tables["time"][name], tables["memory"][software]
    return Interval(
        name=name,
        time=(time["low"], time["high"]),
        memory=(memory["low"], memory["high"]),
        largest_gpus=largest["gpus"],
        beyond=" and ".join(beyond),
        is_wide=is_wide,
    )


def extrapolation(job: PlannedJob) -> str:
    """Return a warning if the run is outside the range of the runs to which the planner was fitted, else ""."""
    beyond = from_job(job).beyond
    if not beyond:
        return ""
    return f"extrapolated: no published run of the fit has {beyond}; the interval is twice as wide as that of its class"


def class_name(job: PlannedJob, known: bool) -> str:
    """Return the class of a job, such as `dense, known model`; `known`: whether runs of its model are in the fit."""
    if job.options.framework != "megatron":
        return "other software"
    kind = "fine-tuning" if job.task != "pretrain" else "experts" if job.model.is_moe else "dense"
    return f"{kind}, {'known' if known else 'unknown'} model"


@cache
def _tables() -> dict[str, Any]:
    """Return the tables of `data/intervals.toml`."""
    return config_files.read_toml(FILE)


def text(seconds: float, low: float, high: float, unit: str = " s") -> str:
    """Format a time with its interval, to three significant digits of the time: `14.4 s (13.1-16.2)`."""
    return f"{seconds:.{_digits(seconds)}f}{unit} ({range_text(seconds, low, high)})"


def range_text(seconds: float, low: float, high: float) -> str:
    """Format the interval of a time with as many decimals as the time has in `text`: `13.1-16.2`."""
    digits = _digits(seconds)
    return f"{low:.{digits}f}-{high:.{digits}f}"


def _digits(seconds: float) -> int:
    """Return the number of decimals that shows a time with three significant digits."""
    return max(0, 2 - int(np.floor(np.log10(seconds)))) if seconds > 0 else 0
