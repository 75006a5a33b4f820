"""Find which corrections the measured runs determine, and which ones the runs cannot tell apart.

Two standard methods, applied to the posterior of the fit (runs and prior):

- Laplace's approximation: the inverse of the information matrix at the optimum is the covariance of the corrections
  (Tarantola, Inverse Problem Theory, 2005, section 3.2). A correction whose standard deviation stays close to that of
  its prior is not determined by the runs.
- Profile likelihood (Raue et al., Bioinformatics 25, 2009): a correction is established if the runs cannot be explained
  without it, whatever the values of all others. This also holds for nonlinear effects: kernel launches have no effect
  while the GPU is slower than the CPU. The corrections that change in its place cannot be told apart from it.
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
"""A correction is established if the cost without it is higher by this: the 99 % quantile of chi-squared (1)."""
PREDICTIVE = 0.5
"""The runs need corrections if these reduce the median error of held-out runs below this share of the default error.

Three runs that all take 1.5 times the predicted time would not establish one: large residuals are weighted down.
"""
MIN_RUNS = 3
"""Minimum number of runs that can tell random variation from a systematic error; fewer establish no correction."""
Z80 = 1.2816
"""Half the width of an 80 % interval, in standard deviations."""
MAX_POSTERIOR = 0.5
"""The runs do not determine a correction whose standard deviation exceeds this share of the prior's."""
MIN_SHARE = 0.2
"""A correction is part of an alternative explanation if its effect exceeds this share of the largest effect."""


@dataclass(frozen=True)
class Identified:
    """Which corrections the runs determine. A correction in none of the fields is determined to be its default."""

    x: Array
    """The fitted corrections in the order of `CORRECTIONS`; those that the runs do not need have their defaults."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Established correction -> 80 % interval of its value."""
    groups: list[tuple[str, ...]] = field(default_factory=list)
    """Groups of corrections that these runs cannot tell apart: one or several members of a group are needed."""
    undetermined: list[str] = field(default_factory=list)
    """Corrections that these runs do not determine; they keep their defaults."""


def identify(fit: Fit, x: Array, left_out: Array, is_fewest: bool) -> Identified:
    """Find which corrections the runs of a fit determine.

    Args:
        fit: the measured runs and their prior.
        x: the fitted corrections.
        left_out: log of the step time that is predicted for each run when it is held out.
        is_fewest: whether `x` already has the fewest corrections that explain the runs.
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
    """Return one group of all corrections that affect the runs, with their fitted values; there are too few runs."""
    effects = np.linalg.norm(fit.slopes(x, fit.logs(x)) * fit.width, axis=0)
    in_group = (effects > MIN_SHARE * effects.max()) | (np.abs(x - fit.start()) > MIN_SHARE * fit.width)
    names = [c.name for c in CORRECTIONS]
    return Identified(
        x=np.where(in_group, x, fit.start()),
        groups=[tuple(n for i, n in enumerate(names) if in_group[i])],
        undetermined=[n for i, n in enumerate(names) if not in_group[i]],
    )


def _median_error(fit: Fit, x: Array) -> float:
    """Return the median absolute error of the log of the step time, with corrections `x`."""
    return float(np.median(np.abs(fit.logs(x) - fit.y)))


def _drop_unneeded(fit: Fit, x: Array, scatter: float, max_error: float) -> Array:
    """Reset corrections that the runs do not need to their defaults, one at a time; return the refitted corrections.

    `scatter` is the relative scatter of measured step times, `max_error` the maximum of the median error.
    """
    default = fit.start()
    needed = np.flatnonzero(x != default)
    x = fit.refit(x, scatter, free=needed)
    while len(needed):
        without = [np.where(np.arange(len(x)) == i, default, x) for i in needed]
        # Try first the corrections whose reset costs least before the others are refitted.
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
    """Return the standard deviation of each correction with all others free, by Laplace's approximation."""
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
    """Return the indices of corrections whose change from `x` to `other` replaces the effect of correction `fixed`."""
    logs = fit.logs(other)
    effects = np.zeros(len(x))
    for i in np.flatnonzero(x != other):
        effects[i] = np.linalg.norm(logs - fit.logs(np.where(np.arange(len(x)) == i, x, other)))
    effects[fixed] = 0
    return {int(i) for i in np.flatnonzero(effects > MIN_SHARE * effects.max(initial=0))}
