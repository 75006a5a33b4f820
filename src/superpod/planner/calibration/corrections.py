"""The corrections that `recipes calibrate` fits to a user's own machines: `[calibration.h100]` in a hardware file.

Each correction changes constants of `calibration.py` for one GPU; 1 keeps the default. They are stored in
`Gpu.calibrated_as`, such as `h100?far_bandwidth=0.5`, so that every plan with the GPU uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from superpod.errors import UserError, did_you_mean

GROUPS = ("tp", "cp", "ep", "send", "dp")
FAR_LATENCIES = ("tp_hops", "cp_hops", "ep_hops", "send_far_s", "dp_step_s")
"""Constants that are latencies between nodes."""

EXPERTS = ("expert", "expert_cast", "expert_kernels", "sorting")
"""Constants for the work of routed experts."""
MEMORY = ("main_grads", "stream", "scores", "loss")
"""Constants for memory-bound operations."""


LIMITS = {"share": (0.0, 1.0), "amount": (0.0, 5.0), "level": (0.5, 1.0)}
"""Kind of correction that is not a factor -> limits of its value."""


@dataclass(frozen=True)
class Correction:
    """A correction to fit. It multiplies `constants`, or divides them if its kind is `speed`."""

    name: str
    about: str
    width: float
    """Standard deviation of the prior: of the log of a factor, of any other value itself."""
    constants: tuple[str, ...] = ()
    kind: Literal["time", "speed", "share", "amount", "level", "bytes"] = "time"
    """time, speed, bytes: a factor; share: a fraction of the default overlap, 0 to 1; amount: an addition, default 0;
    level: a fraction of the memory that a rank may use."""
    slowest: float = 100.0
    """Factor beyond which no real machine is expected; launches and latencies 25 times slower have been measured."""

    @property
    def default(self) -> float:
        """The value that leaves the prediction unchanged: 0 for an amount, else 1."""
        return 0.0 if self.kind == "amount" else 1.0

    @property
    def limits(self) -> tuple[float, float]:
        """The minimum and maximum valid value."""
        return LIMITS.get(self.kind, (0.01, 200.0))


CORRECTIONS = (
    Correction("general", "time of all GPU computation", 0.4, ("software",), slowest=4),
    Correction("attention", "additional factor on the time of fused attention", 0.4, ("attention",), slowest=5),
    Correction("experts", "additional factor on the time of routed experts", 0.4, EXPERTS, slowest=5),
    Correction("memory", "additional factor on the time of memory-bound kernels", 0.5, MEMORY, slowest=5),
    Correction("launches", "CPU time of a kernel launch", 1.5, ("kernels", "expert_kernels")),
    Correction("queueing", "exponent of the smooth maximum of CPU launch time and GPU time", 0.5, ("queue",)),
    Correction(
        "near_bandwidth", "bandwidth within a node", 0.5, tuple(f"{g}_near" for g in GROUPS), "speed", slowest=0.02
    ),
    Correction(
        "far_bandwidth", "bandwidth between nodes", 1.0, tuple(f"{g}_far" for g in GROUPS), "speed", slowest=0.02
    ),
    Correction("near_latency", "latency within a node", 0.7, ("tp_steps", "cp_steps", "ep_steps", "send_near_s")),
    Correction("far_latency", "latency between nodes", 1.0, FAR_LATENCIES),
    Correction("tp_latency", "additional factor on the latency of tensor parallelism between nodes", 1.0, ("tp_hops",)),
    Correction("fixed", "factor on the constant overhead of a step", 1.0, ("step_s", "tensor_s")),
    Correction("optimizer", "time of the optimizer's step", 0.7, ("states", "grads", "copies"), slowest=20),
    Correction("late_ranks", "delay of a TP group caused by its slowest CPU", 1.0, ("jitter",)),
    Correction(
        "late_senders", "additional delay of a TP group if pipeline stages send between nodes", 0.5, kind="amount"
    ),
    Correction(
        "alloc_retries",
        "seconds of allocation retries per micro-batch in a pipeline whose memory is full",
        0.5,
        kind="amount",
    ),
    Correction("full_from", "fraction of the memory above which it counts as full", 0.1, kind="level"),
    Correction("overlap_grads", "fraction of the default overlap of gradient reduction", 0.6, kind="share"),
    Correction("overlap_params", "fraction of the default overlap of parameter gathering", 0.6, kind="share"),
    Correction("overlap_tp", "fraction of the default overlap of tensor parallelism", 0.6, kind="share"),
    Correction("overlap_pp", "fraction of the default overlap of pipeline sends", 0.6, kind="share"),
)
"""Corrections of step times, in the order of the table in a hardware file."""
ALLOCATED = Correction("allocated", "bytes that a rank allocates", 0.1, kind="bytes")
CORRECTIONS_BY_NAME = {correction.name: correction for correction in (*CORRECTIONS, ALLOCATED)}
NOTES = ("source", "runs")
"""Keys of the table that contain text."""


def validate(table: Mapping[str, object], where: str) -> dict[str, float]:
    """Return correction -> value from a `[calibration.GPU]` table; error messages begin with `where`.

    Raises:
        UserError: a key is not a correction, or a value is not a number within the limits of its correction.
    """
    values: dict[str, float] = {}
    for key, value in table.items():
        if key in NOTES:
            continue
        if key not in CORRECTIONS_BY_NAME:
            raise UserError(
                f"{where}: there is no correction {key!r}",
                did_you_mean(key, list(CORRECTIONS_BY_NAME)) or ", ".join(CORRECTIONS_BY_NAME),
            )
        minimum, maximum = CORRECTIONS_BY_NAME[key].limits
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
        if not minimum <= number <= maximum:
            raise UserError(f"{where}: {key} must be a number between {minimum:g} and {maximum:g}, not {value!r}")
        values[key] = number
    return values


def encode(gpu: str, values: Mapping[str, float]) -> str:
    """Format a GPU's name and its corrections as a value of `Gpu.calibrated_as`; omit defaults."""
    changed = [f"{key}={value!r}" for key, value in values.items() if value != CORRECTIONS_BY_NAME[key].default]
    return f"{gpu}?{'&'.join(changed)}" if changed else gpu


def decode(calibrated_as: str) -> tuple[str, dict[str, float]]:
    """Split a value of `Gpu.calibrated_as` into the name of the GPU whose constants apply, and correction -> value."""
    gpu, _, text = calibrated_as.partition("?")
    pairs = (part.partition("=") for part in text.split("&") if part)
    return gpu, {key: float(value) for key, _, value in pairs}


def factors(values: Mapping[str, float]) -> dict[str, float]:
    """Return constant -> factor for the constants of `calibration` that the corrections change."""
    result: dict[str, float] = {}
    for key, value in values.items():
        factor = 1 / value if CORRECTIONS_BY_NAME[key].kind == "speed" else value
        result |= {name: result.get(name, 1.0) * factor for name in CORRECTIONS_BY_NAME[key].constants}
    return result


def additions(values: Mapping[str, float]) -> dict[str, float]:
    """Return the corrections that are not factors; `steptime.price` uses them as additional constants."""
    return {key: value for key, value in values.items() if CORRECTIONS_BY_NAME[key].kind in LIMITS}


def includes_retries(calibrated_as: str) -> bool:
    """Return whether `Gpu.calibrated_as` includes time spent on allocation retries when memory is full."""
    return decode(calibrated_as)[1].get("alloc_retries", 0.0) > 0 if "?" in calibrated_as else False


def memory_factor(calibrated_as: str) -> float:
    """Return the factor by which `Gpu.calibrated_as` multiplies the predicted memory of a rank; 1 = not calibrated."""
    return decode(calibrated_as)[1].get(ALLOCATED.name, 1.0) if "?" in calibrated_as else 1.0
