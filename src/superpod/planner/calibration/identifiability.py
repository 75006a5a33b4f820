"""Which corrections do measured runs determine, and which explain them equally well?

Two standard methods, applied to the posterior of the fit (runs and prior):

- Laplace's approximation: the inverse of the information matrix at the optimum is the covariance of the corrections
  (Tarantola, Inverse Problem Theory, 2005, section 3.2). A correction whose standard deviation stays close to that of
  its prior is not determined by the runs.
- Profile likelihood (Raue et al., Bioinformatics 25, 2009): a correction is established if the runs cannot be explained
  without it, whatever the values of all others. This holds also where effects are far from linear: launches have no
  effect while the GPU is the slower one. What changes instead of the correction is what it cannot be told apart from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from superpod.planner.calibration.corrections import CORRECTIONS

if TYPE_CHECKING:
    from superpod.planner.calibration.calibrate import Fit

Array = NDArray[np.float64]
MIN_SCATTER = 0.01
"""Smallest relative scatter of measured step times: a repeated run seldom agrees more closely."""
ESTABLISHED = 6.63
"""Increase of the cost without a correction from which it is established: the 99 % quantile of chi-squared (1)."""
PREDICTIVE = 0.5
"""Median error of held-out runs, relative to that of the defaults, below which the runs need corrections.

Three runs that are all slower by half cost too little to establish one, because large residuals are weighted down.
"""
MIN_RUNS = 3
"""Number of runs from which scatter can be told from causes; fewer establish nothing."""
Z80 = 1.2816
"""Half the width of an 80 % interval, in standard deviations."""
MAX_POSTERIOR = 0.5
"""Standard deviation relative to the prior above which the runs do not determine a correction."""
MIN_SHARE = 0.2
"""Effect of a correction, relative to the largest, from which it takes part in an alternative explanation."""


@dataclass(frozen=True)
class Identified:
    """What the runs say about each correction; every correction that is in no field is determined, as its default."""

    x: Array
    """The vector, without corrections that the runs do not need."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Established correction -> 80 % interval."""
    groups: list[tuple[str, ...]] = field(default_factory=list)
    """Corrections that these runs cannot tell apart: each group explains the runs, none of its members is certain."""
    undetermined: list[str] = field(default_factory=list)
    """Corrections that these runs do not determine; they keep their defaults."""


def identify(fit: Fit, x: Array, left_out: Array, is_fewest: bool) -> Identified:
    """Return what the runs determine, given a fit and the logs of the step times that it predicts for held-out runs.

    `is_fewest`: the fit already has the fewest corrections that explain the runs.
    """
    if len(fit.y) < MIN_RUNS:
        return _identify_nothing(fit, x)
    held_out_error = float(np.median(np.abs(left_out - fit.y)))
    scatter = max(MIN_SCATTER, 1.4826 * held_out_error)
    if not is_fewest:
        needs_corrections = held_out_error < PREDICTIVE * _median_error(fit, fit.start())
        x = _drop_unneeded(fit, x, scatter, max_error=scatter if needs_corrections else np.inf)
    deviation = _deviations(fit, x, scatter)
    best_cost = fit.misfit(fit.refit(x, scatter), scatter)
    alternatives: dict[int, set[int]] = {}
    established: list[int] = []
    for i in map(int, np.flatnonzero(x != fit.start())):
        other = fit.refit(x, scatter, fixed=(i,), explore=True)
        if fit.misfit(other, scatter) - best_cost >= ESTABLISHED:
            established.append(i)
        else:
            alternatives[i] = _compensating(fit, x, other, i) | _replacing(fit, x, i, scatter, best_cost + ESTABLISHED)

    groups: list[set[int]] = []
    for i, others in alternatives.items():
        # An established correction only adapts. If no other can replace i, its effect is part of an established one.
        group = {i} | (others.difference(established) or others)
        overlapping = [known for known in groups if known & group]
        groups = [known for known in groups if known not in overlapping] + [group.union(*overlapping)]

    grouped = set[int]().union(*groups)
    found = [i for i in established if i not in grouped]
    is_weak = deviation > MAX_POSTERIOR * fit.width
    margins = np.outer([-Z80, Z80], deviation)
    low, high = np.clip(x + margins, *fit.limits.T)
    names = [c.name for c in CORRECTIONS]
    return Identified(
        x=x,
        ranges={names[i]: (fit.value(names[i], low[i]), fit.value(names[i], high[i])) for i in found},
        groups=[tuple(names[i] for i in sorted(group)) for group in groups],
        undetermined=[names[i] for i in map(int, np.flatnonzero(is_weak)) if i not in grouped and i not in found],
    )


def _identify_nothing(fit: Fit, x: Array) -> Identified:
    """Return one group of all corrections that affect one or two runs, with the values of the fit."""
    effects = np.linalg.norm(fit.slopes(x, fit.logs(x)) * fit.width, axis=0)
    in_group = (effects > MIN_SHARE * effects.max()) | (np.abs(x - fit.start()) > MIN_SHARE * fit.width)
    names = [c.name for c in CORRECTIONS]
    return Identified(
        x=np.where(in_group, x, fit.start()),
        groups=[tuple(n for i, n in enumerate(names) if in_group[i])],
        undetermined=[n for i, n in enumerate(names) if not in_group[i]],
    )


def _median_error(fit: Fit, x: Array) -> float:
    return float(np.median(np.abs(fit.logs(x) - fit.y)))


def _drop_unneeded(fit: Fit, x: Array, scatter: float, max_error: float) -> Array:
    """Return the fit with the corrections set to their defaults, one after the other, that the runs do not need.

    The median error stays below `max_error`.
    """
    default = fit.start()
    needed = np.flatnonzero(x != default)
    x = fit.refit(x, scatter, free=needed)
    while len(needed):
        without = [np.where(np.arange(len(x)) == i, default, x) for i in needed]
        # The corrections that cost least when simply reset are tried first; the others adapt to the loss of one.
        order = np.argsort([fit.misfit(one, scatter) for one in without])
        cost = fit.misfit(x, scatter)
        for k in order:
            rest = np.delete(needed, k)
            tried = fit.refit(without[k], scatter, free=rest)
            if fit.misfit(tried, scatter) - cost < ESTABLISHED and _median_error(fit, tried) < max_error:
                needed, x = rest, tried
                break
        else:
            return x
    return x


def _deviations(fit: Fit, x: Array, scatter: float) -> Array:
    """Return the standard deviation of each correction while all others are free: Laplace's approximation."""
    logs = fit.logs(x)
    effects = fit.slopes(x, logs) * fit.width / scatter
    weights = 1 / (1 + ((logs - fit.y) / max(scatter, 0.1)) ** 2)
    information = effects.T @ (weights[:, None] * effects) + np.eye(len(x))
    return fit.width * np.sqrt(np.diag(np.linalg.inv(information)))


def _replacing(fit: Fit, x: Array, fixed: int, scatter: float, max_cost: float) -> set[int]:
    """Return the corrections that alone, in the place of the fixed one, explain the runs up to a cost."""
    default = fit.start()
    without = np.where(np.arange(len(x)) == fixed, default, x)
    used, unused = np.flatnonzero(without != default), [i for i in map(int, np.flatnonzero(x == default)) if i != fixed]
    rest = fit.refit(without, scatter, free=used) if len(used) else without
    if fit.misfit(rest, scatter) < max_cost:  # nothing has to replace it
        return set()
    refitted = {i: fit.refit(without, scatter, free=np.append(used, i)) for i in unused}
    return {i for i, other in refitted.items() if fit.misfit(other, scatter) < max_cost}


def _compensating(fit: Fit, x: Array, other: Array, fixed: int) -> set[int]:
    """Return the corrections whose changes from `x` to `other` replace the effect of the fixed one."""
    logs = fit.logs(other)
    effects = np.zeros(len(x))
    for i in np.flatnonzero(x != other):
        effects[i] = np.linalg.norm(logs - fit.logs(np.where(np.arange(len(x)) == i, x, other)))
    effects[fixed] = 0
    return {int(i) for i in np.flatnonzero(effects > MIN_SHARE * effects.max(initial=0))}
