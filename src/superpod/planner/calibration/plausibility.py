"""Refuse fitted corrections that no machine can have."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from superpod.errors import UserError
from superpod.planner.calibration import calibration
from superpod.planner.calibration.corrections import CORRECTIONS, Correction

Array = NDArray[np.float64]
TOLERANCE = 1.01
"""Factor by which a value may exceed its bound."""
MAX_MEDIAN_RATIO = 2.0
"""Median of measured to calibrated step times, or its inverse, above which the corrections explain nothing."""
HINT = (
    "check the unit (seconds, not ms; tokens/s of one GPU, not of all, not samples/s), gpu, precision, gbs and seq "
    "of the rows"
)


def check(values: Mapping[str, float], constants: Mapping[str, Array], ratios: Array) -> None:
    """Check that fitted corrections are physically possible and explain the runs.

    Args:
        values: correction -> fitted value.
        constants: constant of `calibration` -> its uncorrected value for each run.
        ratios: measured step time / calibrated step time of each run.

    Raises:
        UserError: a correction is outside its physical bounds, or the median ratio is far from 1.
    """
    for correction in CORRECTIONS:
        value = values[correction.name]
        least, most = bounds(correction, constants, values["general"])
        if value < least / TOLERANCE:
            raise UserError(_explain(correction, value, f"below its bound {least:.3g}"), HINT)
        if value > most * TOLERANCE:
            raise UserError(_explain(correction, value, f"above its bound {most:.3g}"), HINT)

    ratio = float(np.median(ratios))
    if not 1 / MAX_MEDIAN_RATIO < ratio < MAX_MEDIAN_RATIO:
        raise UserError(
            f"with every correction within its physical bounds, the runs still take {ratio:.3g} times the predicted "
            f"time (median; {1 / MAX_MEDIAN_RATIO:g} to {MAX_MEDIAN_RATIO:g} is accepted)",
            HINT,
        )


def bounds(correction: Correction, constants: Mapping[str, Array], general: float) -> tuple[float, float]:
    """Return the minimum and maximum plausible value of a correction.

    The hardware's peak speed is one bound, `Correction.slowest` the other. `general` is the value of the correction
    that slows down all computation; other corrections of computation may be lower by that factor.
    """
    if correction.kind not in ("time", "speed"):
        return correction.limits
    is_general = "software" in correction.constants
    names = calibration.COMPUTE if is_general else correction.constants
    bounded = [name for name in names if calibration.BOUNDS.get(name)]
    if correction.kind == "speed":
        return correction.slowest, max(float((constants[n] / calibration.BOUNDS[n]).max()) for n in bounded)
    fastest = min((float((calibration.BOUNDS[n] / constants[n]).min()) for n in bounded), default=correction.limits[0])
    if not is_general and set(bounded) & set(calibration.COMPUTE):
        fastest /= general
    return fastest, correction.slowest


def _explain(correction: Correction, value: float, bound: str) -> str:
    """Return the message for an impossible correction; `bound` is a phrase such as `above its bound 4`."""
    return f"{correction.name} would be {value:.3g}, {bound}: no machine differs that much in {correction.about}"
