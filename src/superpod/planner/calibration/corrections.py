"""What `recipes calibrate` finds of a user's own machines, as a table `[calibration.h100]` of a hardware file.

Each number corrects constants of `calibration.py` for one GPU: 1 is what this project ships, whatever the constant.
They travel in `Gpu.calibrated_as`, as `h100?far_bandwidth=0.5`, so that all that plans with the GPU is corrected.
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

MEMORY = ("main_grads", "stream", "scores", "loss")
"""Constants of bytes that pass through a GPU's memory."""


LIMITS = {"share": (0.0, 1.0), "amount": (0.0, 5.0), "level": (0.5, 1.0)}
"""Of kinds that are no factors."""


@dataclass(frozen=True)
class Correction:
    """A number to find. `constants` are those that it multiplies, or divides where it is a `speed`."""

    name: str
    about: str
    width: float
    """How far it may well be from what is shipped, before any run is seen: of its log, or of a share itself."""
    constants: tuple[str, ...] = ()
    kind: Literal["time", "speed", "share", "amount", "level", "bytes"] = "time"
    """time, speed and bytes: factors. share: of what is shipped as hidden, 0 to 1. amount: 0 is shipped. level: of the
    memory that a rank may take."""

    @property
    def shipped(self) -> float:
        """The value that changes nothing."""
        return 0.0 if self.kind == "amount" else 1.0

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest value."""
        return LIMITS.get(self.kind, (0.01, 200.0))


CORRECTIONS = (
    Correction("general", "time of everything that a GPU computes", 0.4, ("software",)),
    Correction("attention", "additional factor on the time of fused attention", 0.4, ("attention",)),
    Correction("memory", "additional factor on the time of memory-bound kernels", 0.5, MEMORY),
    Correction("launches", "CPU time to start a kernel", 1.5, ("kernels", "expert_kernels")),
    Correction("queueing", "exponent of the smooth maximum of CPU launch time and GPU time", 0.5, ("queue",)),
    Correction("near_bandwidth", "bandwidth inside a node", 0.5, tuple(f"{g}_near" for g in GROUPS), "speed"),
    Correction("far_bandwidth", "bandwidth between nodes", 1.0, tuple(f"{g}_far" for g in GROUPS), "speed"),
    Correction("near_latency", "latency inside a node", 0.7, ("tp_steps", "cp_steps", "ep_steps", "send_near_s")),
    Correction("far_latency", "latency between nodes", 1.0, FAR_LATENCIES),
    Correction("tp_latency", "additional factor on the latency of tensor parallelism between nodes", 1.0, ("tp_hops",)),
    Correction("fixed", "factor on the constant overhead of a step", 1.0, ("step_s", "tensor_s")),
    Correction("optimizer", "time of the optimizer's step", 0.7, ("states", "grads", "copies")),
    Correction("late_ranks", "delay of a TP group by its slowest CPU", 1.0, ("jitter",)),
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
"""Those of times, in the order of a hardware file's table."""
ALLOCATED = Correction("allocated", "bytes that a rank allocates", 0.1, kind="bytes")
BY_NAME = {correction.name: correction for correction in (*CORRECTIONS, ALLOCATED)}
NOTES = ("source", "runs")
"""Keys of the table that hold words."""


def validate(table: Mapping[str, object], where: str) -> dict[str, float]:
    """The numbers of a table; `where` opens the message.

    Raises:
        UserError: a key or value that is none.
    """
    values: dict[str, float] = {}
    for key, value in table.items():
        if key in NOTES:
            continue
        if key not in BY_NAME:
            raise UserError(
                f"{where}: no correction is called {key!r}", did_you_mean(key, list(BY_NAME)) or ", ".join(BY_NAME)
            )
        least, most = BY_NAME[key].limits
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
        if not least <= number <= most:
            raise UserError(f"{where}: {key} must be a number between {least:g} and {most:g}, not {value!r}")
        values[key] = number
    return values


def encode(gpu: str, values: Mapping[str, float]) -> str:
    """A GPU's `calibrated_as` with corrections in it; those that change nothing are left out."""
    changed = [f"{key}={value!r}" for key, value in values.items() if value != BY_NAME[key].shipped]
    return f"{gpu}?{'&'.join(changed)}" if changed else gpu


def decode(calibrated_as: str) -> tuple[str, dict[str, float]]:
    """The GPU whose calibration it is, and the corrections."""
    gpu, _, text = calibrated_as.partition("?")
    pairs = (part.partition("=") for part in text.split("&") if part)
    return gpu, {key: float(value) for key, _, value in pairs}


def factors(values: Mapping[str, float]) -> dict[str, float]:
    """What corrections multiply constants of `calibration` by, by the constants' names."""
    result: dict[str, float] = {}
    for key, value in values.items():
        factor = 1 / value if BY_NAME[key].kind == "speed" else value
        result |= {name: result.get(name, 1.0) * factor for name in BY_NAME[key].constants}
    return result


def additions(values: Mapping[str, float]) -> dict[str, float]:
    """Corrections that are constants of their own: shares and amounts (`steptime.price`)."""
    return {key: value for key, value in values.items() if BY_NAME[key].kind in LIMITS}


def retries(calibrated_as: str) -> bool:
    """Whether a GPU's calibration says that full memory takes time."""
    return decode(calibrated_as)[1].get("alloc_retries", 0.0) > 0 if "?" in calibrated_as else False


def memory_factor(calibrated_as: str) -> float:
    """What a GPU's calibration multiplies the predicted bytes of a rank by."""
    return decode(calibrated_as)[1].get(ALLOCATED.name, 1.0) if "?" in calibrated_as else 1.0
