"""Fit the corrections of `corrections.py` to step times measured on a user's own machines.

The fit is a least-squares fit of log(predicted / measured). A prior keeps each correction near its default, so that a
few runs change only the corrections that they determine; Cauchy weights limit the influence of outliers. The weight of
the runs relative to the prior is chosen by cross-validation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from superpod.errors import UserError
from superpod.planner import columns, predict
from superpod.planner.calibration import calibration, corrections, identifiability, plausibility
from superpod.planner.calibration.corrections import ALLOCATED, CORRECTIONS
from superpod.planner.planned_job import PlannedJob
from superpod.planner.timing import step_cost, steptime

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]
MAX_SUBSET_RUNS = 12
"""Up to this number of runs, the smallest subset of corrections that explains them is searched."""
BEAM_WIDTH = 6
"""Number of subsets that the beam search extends by one correction."""
MIN_NOISE = 1e-4
"""Minimum relative scatter of step times that a fit assumes."""
FOLDS = 6
"""Number of folds of the cross-validation."""
SUBSET_TOLERANCE = 0.005
"""Maximum relative error at which a subset of the corrections is accepted; otherwise all corrections are fitted."""
NOISES = (0.1, 0.03, 0.01)
"""Relative scatters of the step times to try: a smaller one gives the runs more weight relative to the prior."""
MIN_MANY_RUNS = 40
"""From this number of runs on, only the first two of NOISES are tried: many runs never agree more closely."""
NOISE_PENALTY = 1.3
"""Factor by which each smaller noise has to reduce the error, because a few runs may agree by chance."""
MAX_LOG_ERROR = 0.7
"""Limit of log errors (a factor of 2) when fits are compared, so that outliers do not decide."""
LEVELS = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
"""Starting points for `full_from`, because the descent finds only a nearby optimum."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run with its measured step time and memory."""

    name: str
    """Name in messages: a run folder, or the ID of a row."""
    job: PlannedJob
    seconds: float
    """Step time."""
    allocated_gib: float | None = None
    """Peak allocated memory of the rank with the highest peak; None if not measured."""
    reserved_gib: float | None = None
    """Peak reserved memory of that rank; None if not measured."""


@dataclass(frozen=True)
class Calibration:
    """The corrections fitted for one GPU, and their errors on the runs."""

    gpu: str
    """Name of the GPU in hardware files."""
    values: dict[str, float]
    """Name in `corrections.CORRECTIONS` -> value."""
    names: list[str]
    """Names of the runs."""
    measured: Array
    """Measured step time of each run, in seconds."""
    default_times: Array
    """Step times predicted without calibration."""
    calibrated_times: Array
    """Step times predicted with the calibration."""
    held_out_times: Array
    """Step times predicted by calibrations fitted without the run; `default_times` if there is only one run."""
    noise: float
    """Relative scatter of the step times that the fit assumes."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Correction that these runs establish -> 80 % interval of its value."""
    groups: list[tuple[str, ...]] = field(default_factory=list)
    """Groups of corrections that these runs cannot tell apart."""
    undetermined: list[str] = field(default_factory=list)
    """Corrections that these runs do not determine; they keep their defaults."""

    def error(self, predicted: Array) -> float:
        """Return the median relative error of predicted step times (in seconds, per run)."""
        return float(np.median(np.abs(predicted / self.measured - 1)))


def calibrate(runs: Sequence[MeasuredRun]) -> Calibration:
    """Fit the corrections of a GPU type to measured runs.

    Raises:
        UserError: there are no runs, they used several GPU types, a step time is not a positive number, or the fitted
            corrections are not plausible for any machine.
    """
    fit = Fit(runs)
    subset = _fit_smallest_subset(fit) if len(runs) <= MAX_SUBSET_RUNS else None
    chosen = subset if subset is not None and subset.noise < SUBSET_TOLERANCE else _fit_all(fit)
    identified = identifiability.identify(fit, chosen.x, chosen.left_out, is_fewest=chosen is subset)
    values = {c.name: fit.value(c.name, v) for c, v in zip(CORRECTIONS, identified.x, strict=True)}
    calibrated_times = np.exp(fit.logs(identified.x))
    plausibility.check(values, fit.constants, np.exp(fit.y) / calibrated_times)
    return Calibration(
        gpu=fit.gpu,
        values=values | _memory_factor(runs),
        names=[run.name for run in runs],
        measured=np.exp(fit.y),
        default_times=np.exp(fit.logs(fit.start())),
        calibrated_times=calibrated_times,
        held_out_times=np.exp(chosen.left_out),
        noise=chosen.noise,
        ranges=identified.ranges,
        groups=identified.groups,
        undetermined=identified.undetermined,
    )


def _memory_factor(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Return the correction of allocated memory: median of measured / predicted, shrunk towards 1; {} if unmeasured."""
    logs = []
    for run in runs:
        if run.allocated_gib or run.reserved_gib:
            default = predict.one(_without_corrections(run.job))
            pairs = ((run.allocated_gib, default.allocated_gib_max), (run.reserved_gib, default.reserved_gib_max))
            logs.append(
                next((float(np.log(measured / planned)) for measured, planned in pairs if measured and planned), 0)
            )
    if not logs:
        return {}
    factor = np.exp(np.median(logs) * len(logs) / (len(logs) + 0.5))
    return {ALLOCATED.name: float(np.clip(factor, *ALLOCATED.limits))}


class _Chosen(NamedTuple):
    """The result of a fit."""

    x: Array
    """The fitted corrections (see `Fit`)."""
    noise: float
    """The relative scatter that the fit assumes."""
    left_out: Array
    """Log of each run's step time as predicted by a fit without that run."""


def _fit_all(fit: Fit) -> _Chosen:
    """Fit all corrections at once, with the noise that predicts held-out runs best."""
    count = len(fit.y)
    folds = np.arange(count) % FOLDS
    scored: list[tuple[float, _Chosen]] = []
    x = fit.start()
    for tried, noise in enumerate(NOISES[: 1 if count == 1 else 2 if count >= MIN_MANY_RUNS else 3]):
        x = fit.solve(np.ones(count), noise, [x, *(() if scored else fit.starts())])
        left_out = fit.logs(fit.start())
        for fold in np.unique(folds) if count > 1 else ():
            without = fit.solve((folds != fold).astype(float), noise, [x])
            left_out = np.where(folds == fold, fit.logs(without), left_out)
        score = float(np.minimum(np.abs(left_out - fit.y), MAX_LOG_ERROR).mean()) * NOISE_PENALTY**tried
        scored.append((score, _Chosen(x, noise, left_out)))
    return min(scored, key=lambda entry: entry[0])[1]


def _fit_smallest_subset(fit: Fit) -> _Chosen:
    """Fit the smallest subset of corrections that explains a few runs, by the corrected Akaike criterion (AICc)."""
    count = len(fit.y)
    everyone = np.ones(count)
    best = _fit_subset(fit, everyone, (), fit.start())
    beam = [best]
    for _ in range(1, max(2, count - 1)):
        tried = {entry[1]: entry for start in beam for entry in _extend(fit, everyone, start)}
        closest = sorted(tried.values(), key=lambda entry: entry[0])[:BEAM_WIDTH]
        beam = sorted((_refine(fit, everyone, entry) for entry in closest), key=lambda entry: entry[0])
        if not beam or beam[0][0] >= best[0]:
            break
        best = beam[0]
    _, chosen, x = best
    left_out = fit.logs(fit.start())
    for i in range(count) if count > 1 else ():
        without = np.where(np.arange(count) == i, 0.0, 1.0)
        kept = _refine(fit, without, (0.0, chosen[: max(0, count - 2)], fit.start()))
        left_out[i] = fit.logs(kept.x)[i]
    return _Chosen(x, max(MIN_NOISE, fit.spread(everyone, x)), left_out)


class _SubsetFit(NamedTuple):
    """A fit with a subset of the corrections."""

    criterion: float
    """AICc of the fit; smaller is better."""
    chosen: tuple[int, ...]
    """Indices in `CORRECTIONS`."""
    x: Array


def _extend(fit: Fit, mask: Array, start: _SubsetFit) -> Iterator[_SubsetFit]:
    """Yield a rough fit of the subset of `start` with one more correction, for each one that affects the runs."""
    affects = np.abs(fit.slopes(start.x, fit.logs(start.x))).max(axis=0) > MIN_NOISE / 10
    for i in np.flatnonzero(affects):
        if i not in start.chosen:
            yield _fit_subset(fit, mask, tuple(sorted((*start.chosen, int(i)))), start.x, MIN_NOISE)


def _refine(fit: Fit, mask: Array, rough: _SubsetFit | tuple[float, tuple[int, ...], Array]) -> _SubsetFit:
    """Fit the subset of `rough` again, with decreasing noise."""
    _, chosen, x = rough
    for noise in (0.03, 0.003, MIN_NOISE):
        x = _fit_subset(fit, mask, chosen, x, noise).x
    return _fit_subset(fit, mask, chosen, x, MIN_NOISE)


def _fit_subset(fit: Fit, mask: Array, chosen: tuple[int, ...], x: Array, noise: float = 0.03) -> _SubsetFit:
    """Fit a subset of the corrections, starting from `x`; `noise` is the lowest scatter that the fit may assume."""
    count, size = mask.sum(), len(chosen)
    if size:
        free = np.isin(np.arange(len(x)), chosen)
        x = fit.solve(mask, max(noise, 0.3 * fit.spread(mask, x)), [x], free)
    log_likelihood = -count * np.log(fit.spread(mask, x) + MIN_NOISE) - fit.prior(x) / 2
    penalty = 1.5 * size + size * (size + 1) / 2 / max(count - size - 1, 0.5)
    return _SubsetFit(float(penalty - log_likelihood), chosen, x)


class Fit:
    """Measured runs, and the model that predicts the log of their step times from a vector of corrections.

    The vector `x` has an entry per item of `CORRECTIONS`: the log of a factor, any other value itself.
    """

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        if not runs:
            raise UserError("there are no measured runs to calibrate from")
        wrong_run = next((run for run in runs if not 0 < run.seconds < np.inf), None)
        if wrong_run is not None:
            raise UserError(
                f"{wrong_run.name}: the step time must be finite and greater than 0 s, not {wrong_run.seconds:g}"
            )
        jobs = [_without_corrections(run.job) for run in runs]
        gpus = sorted({job.node.gpu.name for job in jobs})
        if len(gpus) > 1:
            raise UserError(f"the runs used several GPU types: {', '.join(gpus)}", "calibrate one GPU type at a time")
        self.gpu = gpus[0]
        cost = step_cost.stack([step_cost.from_job(job, columns.from_job(job)) for job in jobs])
        memory_factor = _memory_factor(runs)
        full = [
            step_cost.full(apply_corrections(job, memory_factor), columns.from_job(job)).reshape(-1) for job in jobs
        ]
        self.cost = replace(cost, full=np.concatenate(full))
        by_row = [calibration.unbounded(job) for job in jobs]
        self.constants = {name: np.array([constants[name] for constants in by_row]) for name in by_row[0]}
        self.y = np.log([run.seconds for run in runs])
        self.width: Array = np.array([c.width for c in CORRECTIONS])
        self.logged = np.array([c.kind in ("time", "speed") for c in CORRECTIONS])
        limits = np.array([c.limits for c in CORRECTIONS])
        logged = self.logged[:, None]
        self.limits = np.where(logged, np.log(np.where(logged, limits, 1.0)), limits)

    def start(self) -> Array:
        """Return the vector of default corrections."""
        return np.array([0.0 if c.kind in ("time", "speed") else c.default for c in CORRECTIONS])

    def starts(self) -> list[Array]:
        """Return more starting vectors, for optima that a descent from the defaults may miss: slow CPUs, no overlap."""
        slow_cpus = {"launches": 2.0, "late_senders": 0.5, "tp_latency": 2.3}
        no_overlap = {c.name: 0.0 for c in CORRECTIONS if c.kind == "share"}
        full = [slow_cpus | {"alloc_retries": 0.5, "full_from": level} for level in LEVELS]
        return [
            np.array([begin.get(c.name, x) for c, x in zip(CORRECTIONS, self.start(), strict=True)])
            for begin in (slow_cpus, no_overlap, slow_cpus | no_overlap, *full)
        ]

    def value(self, name: str, x: float) -> float:
        """Convert an entry of the vector to the value of correction `name`."""
        return float(np.exp(x)) if corrections.CORRECTIONS_BY_NAME[name].kind in ("time", "speed") else float(x)

    def logs(self, x: Array) -> Array:
        """Return the log of the step time of each run that corrections `x` predict."""
        values = {c.name: self.value(c.name, v) for c, v in zip(CORRECTIONS, x, strict=True)}
        factors, additions = corrections.factors(values), corrections.additions(values)
        constants = calibration.bounded(
            {name: array * factors.get(name, 1.0) for name, array in self.constants.items()}
        )
        constants |= {name: np.full(len(self.y), value) for name, value in additions.items()}
        return np.log(sum(steptime.price(self.cost, constants).values()))

    def slopes(self, x: Array, at: Array, free: Flags | None = None) -> Array:
        """Return the derivatives of `logs` by corrections, [runs, corrections]; 0 if not `free`. `at` is `logs(x)`."""
        slopes = np.zeros((len(self.y), len(x)))
        for i in range(len(x)) if free is None else np.flatnonzero(free):
            bump = -1e-3 if x[i] + 1e-3 > self.limits[i, 1] else 1e-3
            shifted = x.copy()
            shifted[i] += bump
            slopes[:, i] = (self.logs(shifted) - at) / bump
        return slopes

    def spread(self, mask: Array, x: Array) -> float:
        """Return the root mean square of the log errors of masked runs, robust to outliers beyond `MAX_LOG_ERROR`."""
        off = (self.logs(x) - self.y) / MAX_LOG_ERROR
        return MAX_LOG_ERROR * float(np.sqrt((mask * np.log1p(off**2)).sum() / mask.sum()))

    def prior(self, x: Array) -> float:
        """Return the prior's penalty: the squared distance of corrections `x` from the defaults, in prior widths."""
        return float((((x - self.start()) / self.width) ** 2).sum())

    def misfit(self, x: Array, scatter: float) -> float:
        """Return the objective of corrections `x` over all runs: squared errors / scatter, plus the prior's penalty."""
        return self._cost(self.logs(x), x, np.ones(len(self.y)), scatter, max(scatter, 0.1))

    def refit(
        self, x: Array, scatter: float, free: Indices | None = None, fixed: tuple[int, ...] = (), explore: bool = False
    ) -> Array:
        """Return the corrections that minimize `misfit`, starting at `x`, and with `explore` at `starts` as well.

        Corrections that are not in `free`, or are in `fixed` (both indices), have their defaults.
        """
        chosen = np.ones(len(x), bool) if free is None else np.isin(np.arange(len(x)), free)
        chosen[list(fixed)] = False
        begins = [np.where(chosen, begin, self.start()) for begin in (x, *(self.starts()[:3] if explore else ()))]
        return self.solve(np.ones(len(self.y)), scatter, begins, chosen)

    def solve(self, mask: Array, noise: float, begins: Sequence[Array], free: Flags | None = None) -> Array:
        """Return the best corrections for the masked runs, from several starting vectors; only `free` ones change."""
        free = np.ones(len(self.width), bool) if free is None else free
        ends = [self._descend(mask, noise, begin, free) for begin in begins]
        return min(ends, key=lambda end: end[0])[1]

    def _descend(self, mask: Array, noise: float, x: Array, free: Flags) -> tuple[float, Array]:
        """Minimize by Levenberg-Marquardt, and return (objective, x); the scale of outliers follows the residuals."""
        default, cost = self.start(), np.inf
        logs = self.logs(x)
        for _ in range(4):
            spread = 1.4826 * float(np.median(np.abs(logs - self.y)[mask > 0]))
            scale = max(noise, min(spread, 0.3))
            cost, damping = self._cost(logs, x, mask, noise, scale), 1e-2
            before = cost
            for _ in range(12):
                weight = mask / (1 + ((logs - self.y) / scale) ** 2) / noise**2
                slope = self.slopes(x, logs, free)
                curve = slope.T @ (weight[:, None] * slope) + np.diag(1 / self.width**2)
                pull = slope.T @ (weight * (logs - self.y)) + (x - default) / self.width**2
                x, logs, new, damping = self._step(
                    x, logs, cost, damping, curve, np.where(free, pull, 0), mask, noise, scale
                )
                done, cost = cost - new < 1e-4 * max(cost, 1e-9), new
                if done:
                    break
            if before - cost < 1e-3 * max(cost, 1e-9):
                break
        return self._cost(logs, x, mask, noise, max(noise, 0.1)), x

    def _step(
        self, x: Array, logs: Array, cost: float, damping: float, curve: Array, pull: Array,
        mask: Array, noise: float, scale: float,
    ) -> tuple[Array, Array, float, float]:  # fmt: skip
        """Take a step that reduces the objective, shortened if necessary; corrections at their limits stay there.

        Returns (x, logs, objective, damping).
        """
        for _ in range(6):
            free = ~(((x <= self.limits[:, 0]) & (pull > 0)) | ((x >= self.limits[:, 1]) & (pull < 0)))
            damped = curve + damping * np.diag(np.diag(curve))
            move = np.zeros_like(x)
            move[free] = np.linalg.solve(damped[np.ix_(free, free)], -pull[free])
            tried = np.clip(x + np.clip(move, -1.5, 1.5), self.limits[:, 0], self.limits[:, 1])
            tried_logs = self.logs(tried)
            new_cost = self._cost(tried_logs, tried, mask, noise, scale)
            if new_cost < cost:
                return tried, tried_logs, new_cost, damping / 5
            damping *= 8
        return x, logs, cost, damping

    def _cost(self, logs: Array, x: Array, mask: Array, noise: float, scale: float) -> float:
        """Return the objective: Cauchy-weighted squared log errors in units of `noise`, plus the prior's penalty."""
        rows = mask * (scale / noise) ** 2 * np.log1p(((logs - self.y) / scale) ** 2)
        return float(rows.sum()) + self.prior(x)


def _without_corrections(job: PlannedJob) -> PlannedJob:
    """Return the job on the same GPU without a user's corrections."""
    gpu = job.node.gpu
    base, own = corrections.decode(gpu.calibrated_as)
    if not own:
        return job
    return job.replace(node=job.node.replace(gpu=gpu.replace(calibrated_as="" if base == gpu.name else base)))


def apply_corrections(job: PlannedJob, values: dict[str, float]) -> PlannedJob:
    """Return the job on its GPU with corrections (name -> value) instead of its own."""
    gpu = _without_corrections(job).node.gpu
    corrected_gpu = replace(gpu, calibrated_as=corrections.encode(gpu.calibrated_as or gpu.name, values))
    return job.replace(node=job.node.replace(gpu=corrected_gpu))
