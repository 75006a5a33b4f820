"""Fits a user's own machines: measured step times -> the few numbers of `corrections.py` that explain them.

Least squares of the log of predicted over measured seconds. Every number is held to what is shipped by its width, so
that a few rows move what they speak about and nothing else; Cauchy weights keep odd rows from bending the rest. How
much the rows are believed against the shipped values is chosen by leaving rows out and predicting them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from superpod.errors import UserError
from superpod.planner import columns, predict
from superpod.planner.calibration import calibration, corrections
from superpod.planner.calibration.corrections import ALLOCATED, CORRECTIONS
from superpod.planner.planned_job import PlannedJob
from superpod.planner.timing import step_cost, steptime

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
FEW = 12
"""Up to so many rows the fewest numbers are sought that explain them."""
BEAM = 6
"""Explanations that are tried with one number more."""
LEAST_NOISE = 1e-4
"""Relative; no closer are two step times the same."""
FOLDS = 6
"""Parts in which rows are left out."""
EXACT = 0.005
"""Relative error below which so few numbers explain so few rows for good; else every number may have its part."""
NOISES = (0.1, 0.03, 0.01)
"""Relative scatter of measured step times that is tried: the smaller, the more the rows count against the priors."""
MANY = 40
"""From so many rows on, only the first two: so many runs never agree better."""
DOUBT = 1.3
"""Each smaller noise has to leave an error smaller by so much: a few rows agree by chance."""
WORST = 0.7
"""A log error counts no more than this (a factor of 2) when fits are compared: one odd row says nothing of a fit."""
LEVELS = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
"""Of memory, from which on it may be full: a search finds the level only from near it."""
ALIKE = 0.98
"""Cosine of two numbers' effects on the rows from which on nothing tells them from each other."""
FELT = 0.5
"""Effect of a number on all rows, in units of the noise, below which they say nothing of it."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run and its measured step."""

    name: str
    """As messages name it: a run folder, or a row's id."""
    job: PlannedJob
    seconds: float
    """Of one step."""
    allocated_gib: float | None = None
    """Peak bytes in tensors of the fullest rank, where they were measured."""
    reserved_gib: float | None = None


@dataclass(frozen=True)
class Calibration:
    """What the runs say of one GPU."""

    gpu: str
    """Its name in hardware files."""
    values: dict[str, float]
    """By name of `corrections.CORRECTIONS`."""
    names: list[str]
    measured: Array
    """Seconds of every run's step."""
    shipped: Array
    """As predicted without calibration."""
    fitted: Array
    left_out: Array
    """As predicted by a calibration that did not see the run; equal to `shipped` where there is but one run."""
    noise: float
    alike: list[tuple[str, str]] = field(default_factory=list)
    """Pairs that these runs cannot tell from each other."""
    silent: list[str] = field(default_factory=list)
    """Numbers of which these runs say nothing, so that they stay as shipped."""

    def error(self, predicted: Array) -> float:
        """Median relative error of a prediction of these runs."""
        return float(np.median(np.abs(predicted / self.measured - 1)))


def calibrate(runs: Sequence[MeasuredRun]) -> Calibration:
    """The corrections that explain the runs best.

    Raises:
        UserError: no runs, runs of several GPUs, or a time that is none.
    """
    fit = _Fit(runs)
    simple = _simplest(fit) if len(runs) <= FEW else None
    chosen = simple if simple is not None and simple.noise < EXACT else _believed(fit)
    alike, silent = fit.doubts(chosen.x, chosen.noise)
    return Calibration(
        gpu=fit.gpu,
        values={c.name: fit.value(c.name, v) for c, v in zip(CORRECTIONS, chosen.x, strict=True)} | _bytes(runs),
        names=[run.name for run in runs],
        measured=np.exp(fit.y),
        shipped=np.exp(fit.logs(fit.start())),
        fitted=np.exp(fit.logs(chosen.x)),
        left_out=np.exp(chosen.left_out),
        noise=chosen.noise,
        alike=alike,
        silent=silent,
    )


def _bytes(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """The factor of memory, from the runs that measured it: the median, held a little to what is shipped."""
    logs = []
    for run in runs:
        if run.allocated_gib or run.reserved_gib:
            shipped = predict.one(_as_shipped(run.job))
            pairs = ((run.allocated_gib, shipped.allocated_gib_max), (run.reserved_gib, shipped.reserved_gib_max))
            logs.append(
                next((float(np.log(measured / planned)) for measured, planned in pairs if measured and planned), 0)
            )
    if not logs:
        return {}
    factor = np.exp(np.median(logs) * len(logs) / (len(logs) + 0.5))
    return {ALLOCATED.name: float(np.clip(factor, *ALLOCATED.limits))}


class _Chosen(NamedTuple):
    """A fit: its vector, the noise that it assumes, and the logs of rows as predicted without them."""

    x: Array
    noise: float
    left_out: Array


def _believed(fit: _Fit) -> _Chosen:
    """Many rows: all numbers at once, and as much belief in the rows as predicts those that were left out best."""
    count = len(fit.y)
    folds = np.arange(count) % FOLDS
    scored: list[tuple[float, _Chosen]] = []
    x = fit.start()
    for tried, noise in enumerate(NOISES[: 1 if count == 1 else 2 if count >= MANY else 3]):
        x = fit.solve(np.ones(count), noise, [x, *(() if scored else fit.starts())])
        left_out = fit.logs(fit.start())
        for fold in np.unique(folds) if count > 1 else ():
            without = fit.solve((folds != fold).astype(float), noise, [x])
            left_out = np.where(folds == fold, fit.logs(without), left_out)
        score = float(np.minimum(np.abs(left_out - fit.y), WORST).mean()) * DOUBT**tried
        scored.append((score, _Chosen(x, noise, left_out)))
    return min(scored, key=lambda entry: entry[0])[1]


def _simplest(fit: _Fit) -> _Chosen:
    """The fewest numbers that explain a few rows, by a criterion like Akaike's corrected one."""
    count = len(fit.y)
    everyone = np.ones(count)
    best = _scored(fit, everyone, (), fit.start())
    beam = [best]
    for _ in range(1, max(2, count - 1)):
        tried = {entry[1]: entry for start in beam for entry in _with_one_more(fit, everyone, start)}
        closest = sorted(tried.values(), key=lambda entry: entry[0])[:BEAM]
        beam = sorted((_refined(fit, everyone, entry) for entry in closest), key=lambda entry: entry[0])
        if not beam or beam[0][0] >= best[0]:
            break
        best = beam[0]
    _, chosen, x = best
    left_out = fit.logs(fit.start())
    for i in range(count) if count > 1 else ():
        without = np.where(np.arange(count) == i, 0.0, 1.0)
        kept = _refined(fit, without, (0.0, chosen[: max(0, count - 2)], fit.start()))
        left_out[i] = fit.logs(kept.x)[i]
    return _Chosen(x, max(LEAST_NOISE, fit.spread(everyone, x)), left_out)


class _Scored(NamedTuple):
    """A fit of a few of the numbers."""

    criterion: float
    chosen: tuple[int, ...]
    """Of `CORRECTIONS`."""
    x: Array


def _with_one_more(fit: _Fit, mask: Array, start: _Scored) -> Iterator[_Scored]:
    """Rough fits of what a fit has chosen and one number more, of those that the rows feel."""
    felt = np.abs(fit.slopes(start.x, fit.logs(start.x))).max(axis=0) > LEAST_NOISE / 10
    for i in np.flatnonzero(felt):
        if i not in start.chosen:
            yield _scored(fit, mask, tuple(sorted((*start.chosen, int(i)))), start.x, LEAST_NOISE)


def _refined(fit: _Fit, mask: Array, rough: _Scored | tuple[float, tuple[int, ...], Array]) -> _Scored:
    """The same subset, fitted as closely as its rows agree."""
    _, chosen, x = rough
    for noise in (0.03, 0.003, LEAST_NOISE):
        x = _scored(fit, mask, chosen, x, noise).x
    return _scored(fit, mask, chosen, x, LEAST_NOISE)


def _scored(fit: _Fit, mask: Array, chosen: tuple[int, ...], x: Array, noise: float = 0.03) -> _Scored:
    """The fit of a subset from a beginning; `noise` is the least that it assumes."""
    count, size = mask.sum(), len(chosen)
    if size:
        free = np.isin(np.arange(len(x)), chosen)
        x = fit.solve(mask, max(noise, 0.3 * fit.spread(mask, x)), [x], free)
    likely = -count * np.log(fit.spread(mask, x) + LEAST_NOISE) - fit.prior(x) / 2
    spent = 1.5 * size + size * (size + 1) / 2 / max(count - size - 1, 0.5)
    return _Scored(float(spent - likely), chosen, x)


class _Fit:
    """The rows, and the model between corrections and the log of their seconds. A vector holds logs of factors."""

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        if not runs:
            raise UserError("there is no measured run to calibrate from")
        wrong = next((run for run in runs if not 0 < run.seconds < np.inf), None)
        if wrong is not None:
            raise UserError(f"{wrong.name}: the step time must be finite and above 0 s, not {wrong.seconds:g}")
        jobs = [_as_shipped(run.job) for run in runs]
        gpus = sorted({job.node.gpu.name for job in jobs})
        if len(gpus) > 1:
            raise UserError(f"the runs are of several GPUs: {', '.join(gpus)}", "calibrate one GPU at a time")
        self.gpu = gpus[0]
        cost = step_cost.stack([step_cost.from_job(job, columns.from_job(job)) for job in jobs])
        measured = _bytes(runs)
        full = [step_cost.full(apply_corrections(job, measured), columns.from_job(job)).reshape(-1) for job in jobs]
        self.cost = replace(cost, full=np.concatenate(full))
        by_row = [calibration.constants(job) for job in jobs]
        self.constants = {name: np.array([constants[name] for constants in by_row]) for name in by_row[0]}
        self.y = np.log([run.seconds for run in runs])
        self.width = np.array([c.width for c in CORRECTIONS])
        self.logged = np.array([c.kind in ("time", "speed") for c in CORRECTIONS])
        limits = np.array([c.limits for c in CORRECTIONS])
        logged = self.logged[:, None]
        self.limits = np.where(logged, np.log(np.where(logged, limits, 1.0)), limits)

    def start(self) -> Array:
        """What is shipped."""
        return np.array([0.0 if c.kind in ("time", "speed") else c.shipped for c in CORRECTIONS])

    def starts(self) -> list[Array]:
        """Where other searches begin, which the way from the shipped values may miss: slow CPUs, nothing overlapped."""
        slow = {"launches": 2.0, "late_senders": 0.5, "tp_latency": 2.3}
        nothing = {c.name: 0.0 for c in CORRECTIONS if c.kind == "share"}
        full = [slow | {"alloc_retries": 0.5, "full_from": level} for level in LEVELS]
        return [
            np.array([begin.get(c.name, x) for c, x in zip(CORRECTIONS, self.start(), strict=True)])
            for begin in (slow, nothing, slow | nothing, *full)
        ]

    def value(self, name: str, x: float) -> float:
        """A number of the vector as `corrections` has it."""
        return float(np.exp(x)) if corrections.BY_NAME[name].kind in ("time", "speed") else float(x)

    def logs(self, x: Array) -> Array:
        """The log of every row's predicted seconds."""
        values = {c.name: self.value(c.name, v) for c, v in zip(CORRECTIONS, x, strict=True)}
        factors, additions = corrections.factors(values), corrections.additions(values)
        constants = {name: array * factors.get(name, 1.0) for name, array in self.constants.items()}
        constants |= {name: np.full(len(self.y), value) for name, value in additions.items()}
        return np.log(sum(steptime.price(self.cost, constants).values()))

    def slopes(self, x: Array, at: Array, free: Flags | None = None) -> Array:
        """Change of every row's log with every number that is free, [rows, numbers]; `at` = `logs(x)`."""
        slopes = np.zeros((len(self.y), len(x)))
        for i in range(len(x)) if free is None else np.flatnonzero(free):
            bump = -1e-3 if x[i] + 1e-3 > self.limits[i, 1] else 1e-3
            moved = x.copy()
            moved[i] += bump
            slopes[:, i] = (self.logs(moved) - at) / bump
        return slopes

    def spread(self, mask: Array, x: Array) -> float:
        """Root of the mean square of the rows' log errors; an odd row counts little more than `WORST`."""
        off = (self.logs(x) - self.y) / WORST
        return WORST * float(np.sqrt((mask * np.log1p(off**2)).sum() / mask.sum()))

    def prior(self, x: Array) -> float:
        """How far a vector is from what is shipped, in widths squared."""
        return float((((x - self.start()) / self.width) ** 2).sum())

    def solve(self, mask: Array, noise: float, begins: Sequence[Array], free: Flags | None = None) -> Array:
        """The best vector for the rows of a mask, from several beginnings; numbers that are not free stay."""
        moving = np.ones(len(self.width), bool) if free is None else free
        ends = [self._descend(mask, noise, begin, moving) for begin in begins]
        return min(ends, key=lambda end: end[0])[1]

    def _descend(self, mask: Array, noise: float, x: Array, moving: Flags) -> tuple[float, Array]:
        """Levenberg and Marquardt's descent; the scale beyond which a row is odd follows the residuals."""
        shipped, cost = self.start(), np.inf
        logs = self.logs(x)
        for _ in range(4):
            spread = 1.4826 * float(np.median(np.abs(logs - self.y)[mask > 0]))
            scale = max(noise, min(spread, 0.3))
            cost, damping = self._cost(logs, x, mask, noise, scale), 1e-2
            before = cost
            for _ in range(12):
                weight = mask / (1 + ((logs - self.y) / scale) ** 2) / noise**2
                slope = self.slopes(x, logs, moving)
                curve = slope.T @ (weight[:, None] * slope) + np.diag(1 / self.width**2)
                pull = slope.T @ (weight * (logs - self.y)) + (x - shipped) / self.width**2
                x, logs, new, damping = self._step(
                    x, logs, cost, damping, curve, np.where(moving, pull, 0), mask, noise, scale
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
        """One step downhill, shortened until it is one; numbers at their limits stay there."""
        for _ in range(6):
            free = ~(((x <= self.limits[:, 0]) & (pull > 0)) | ((x >= self.limits[:, 1]) & (pull < 0)))
            damped = curve + damping * np.diag(np.diag(curve))
            move = np.zeros_like(x)
            move[free] = np.linalg.solve(damped[np.ix_(free, free)], -pull[free])
            tried = np.clip(x + np.clip(move, -1.5, 1.5), self.limits[:, 0], self.limits[:, 1])
            tried_logs = self.logs(tried)
            new = self._cost(tried_logs, tried, mask, noise, scale)
            if new < cost:
                return tried, tried_logs, new, damping / 5
            damping *= 8
        return x, logs, cost, damping

    def _cost(self, logs: Array, x: Array, mask: Array, noise: float, scale: float) -> float:
        rows = mask * (scale / noise) ** 2 * np.log1p(((logs - self.y) / scale) ** 2)
        return float(rows.sum()) + self.prior(x)

    def doubts(self, x: Array, noise: float) -> tuple[list[tuple[str, str]], list[str]]:
        """Pairs of numbers whose effects on the rows are alike, and numbers without effect."""
        effect = self.slopes(x, self.logs(x)) * self.width / max(noise, 0.01)
        size = np.linalg.norm(effect, axis=0)
        names = [c.name for c in CORRECTIONS]
        felt = [i for i in range(len(names)) if size[i] >= FELT]
        cosines = (effect.T @ effect) / np.maximum(np.outer(size, size), 1e-12)
        alike = [(names[i], names[j]) for n, i in enumerate(felt) for j in felt[n + 1 :] if abs(cosines[i, j]) > ALIKE]
        return alike, [name for i, name in enumerate(names) if size[i] < FELT]


def _as_shipped(job: PlannedJob) -> PlannedJob:
    """The job without corrections that its hardware has already."""
    gpu = job.node.gpu
    base, own = corrections.decode(gpu.calibrated_as)
    if not own:
        return job
    return job.replace(node=job.node.replace(gpu=gpu.replace(calibrated_as="" if base == gpu.name else base)))


def apply_corrections(job: PlannedJob, values: dict[str, float]) -> PlannedJob:
    """The job on hardware so corrected."""
    gpu = _as_shipped(job).node.gpu
    corrected = replace(gpu, calibrated_as=corrections.encode(gpu.calibrated_as or gpu.name, values))
    return job.replace(node=job.node.replace(gpu=corrected))
