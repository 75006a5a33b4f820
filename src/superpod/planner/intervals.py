"""The 80 % intervals of predictions, from the errors on models and sources that the fit of the constants left out.

A job belongs to a class: what it trains, and whether published runs of its model and software exist. The interval of a
class is a conformal interval: quantiles of measured over predicted time of runs that were left out of the fit, because
of their source if the model is known, or because of their model. `benchmarks/left_out.py --write` writes
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
"""Power to which the factors of an interval are raised beyond the sizes of all published runs: twice as wide. There is
nothing to calibrate it with."""


@dataclass(frozen=True)
class Interval:
    """The interval that contains 80 % of the measurements, as two factors of the prediction."""

    name: str
    """The class, such as `experts, unknown model`."""
    time: tuple[float, float]
    memory: tuple[float, float]
    """Of allocated memory."""
    largest_gpus: int
    """Number of GPUs of the largest run that was fitted."""
    beyond: str
    """What no run that was fitted reaches, such as `more than 16,384 GPUs`; "" = nothing."""
    is_wide: bool
    """Whether the sequence or the GPU is beyond what was fitted: the interval is wide with any number of GPUs."""

    def time_factors(self, gpus: Number) -> tuple[Array, Array]:
        """Return the factors of the step time for numbers of GPUs."""
        power = np.where(self.is_extrapolated(gpus), EXTRAPOLATION, 1.0)
        return self.time[0] ** power, self.time[1] ** power

    def is_extrapolated(self, gpus: Number) -> Flags:
        """Return whether runs on numbers of GPUs are larger than those that were fitted."""
        return (np.asarray(gpus) > self.largest_gpus) | self.is_wide


def from_job(job: PlannedJob) -> Interval:
    """Return the interval of the predictions for a job."""
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
    """Warn of a run that is larger than those that the planner's constants were fitted to; "" = it is not."""
    beyond = from_job(job).beyond
    if not beyond:
        return ""
    return f"extrapolated: no published run of the fit has {beyond}; the interval is twice as wide as that of its class"


def class_name(job: PlannedJob, known: bool) -> str:
    """Return the class of a job; `known` = runs of its model were fitted."""
    if job.options.framework != "megatron":
        return "other software"
    kind = "fine-tuning" if job.task != "pretrain" else "experts" if job.model.is_moe else "dense"
    return f"{kind}, {'known' if known else 'unknown'} model"


@cache
def _tables() -> dict[str, Any]:
    return config_files.read_toml(FILE)


def text(seconds: float, low: float, high: float, unit: str = " s") -> str:
    """Return a time with its interval, to three digits of the time: `14.4 s (13.1-16.2)`."""
    return f"{seconds:.{_digits(seconds)}f}{unit} ({range_text(seconds, low, high)})"


def range_text(seconds: float, low: float, high: float) -> str:
    """Return the interval of a time, with as many digits as `text` gives the time: `13.1-16.2`."""
    digits = _digits(seconds)
    return f"{low:.{digits}f}-{high:.{digits}f}"


def _digits(seconds: float) -> int:
    """Return the number of digits after the decimal point that gives a time three digits."""
    return max(0, 2 - int(np.floor(np.log10(seconds)))) if seconds > 0 else 0
