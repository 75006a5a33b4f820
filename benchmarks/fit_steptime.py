"""Fit the constants of the time model to published step times, and write `planner/data/calibration/*.toml`.

`python benchmarks/fit_steptime.py benchmarks/reference` (needs scipy; a minute). Least squares of the log of
predicted over measured time, robust (Cauchy: an odd row does not bend the rest), every constant held to its prior by a
stated width: with 450 tuned rows for so many constants, a constant that the rows do not speak about stays where it
was. Rows of the hold-out are left out. A constant is the product of factors: for all, for a GPU generation, a GPU, a
precision, a software era, a class of runs; the files hold the products of one GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parent))

from accuracy_time import Result, read, trained
from condense import has_images
from steptime_priors import BEGIN, LEAST, START, Scope, scopes, widths

from superpod.planner import columns
from superpod.planner.calibration import calibration
from superpod.planner.timing import step_cost, steptime

Array = NDArray[np.float64]
NOISE = 0.03
"""Relative; of a published figure, and of the model."""
ODD = 2.0
"""From so many times the noise on, a row counts as odd."""


@dataclass(frozen=True)
class Factor:
    """One number to fit: a constant's factor for the rows of a scope."""

    constant: str
    scope: Scope
    width: float
    """Of the prior, in log; its mean is 0."""
    rows: Array
    """1 where it applies."""


class Fit:
    """The rows, the factors, and the model between them."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = [result for result in results if result.job]
        self.jobs = [result.job for result in self.results if result.job]
        self.step_cost = step_cost.stack([step_cost.from_job(job, columns.from_job(job)) for job in self.jobs])
        self.measured = np.array([result.measured for result in self.results])
        self.fitted = np.array([not (result.held or has_images(result.row)) for result in self.results])
        single = np.array(
            [result.row["release"] == "vTrain" and int(result.row["gpus"]) <= 8 for result in self.results]
        )
        self.weight = np.where(single, 0.5, 1.0)  # 534 of one machine beside 470 of all others
        self.names = list(START)
        self.factors = list(self._factors())
        self.column = np.array([self.names.index(f.constant) for f in self.factors])
        self.masks = np.array([f.rows for f in self.factors])
        self.widths = np.array([f.width for f in self.factors])

    def _factors(self) -> Iterator[Factor]:
        known: dict[Scope, list[int]] = {}
        for i, job in enumerate(self.jobs):
            for scope in scopes(job):
                known.setdefault(scope, []).append(i)
        for scope, members in known.items():
            rows = np.zeros(len(self.jobs))
            rows[members] = 1.0
            for constant, width in widths(scope).items():
                yield Factor(constant, scope, width, rows)

    def constants(self, x: Array, bumped: int = -1) -> dict[str, Array]:
        """The constants of every row; the log of one of them a little higher, for the derivative."""
        values = {}
        for i, name in enumerate(self.names):
            mine = self.column == i
            log = np.log(START[name]) + x[mine] @ self.masks[mine] + (1e-4 if i == bumped else 0.0)
            values[name] = np.clip(np.exp(log), LEAST.get(name, 0.0), calibration.upper_limit(name))
        return calibration.with_hops(values)

    def logs(self, x: Array, bumped: int = -1) -> Array:
        """The log of every row's predicted seconds."""
        return np.log(sum(steptime.price(self.step_cost, self.constants(x, bumped)).values()))

    def run(self) -> Array:
        """The factors' logs. From a wide loss, which finds the way, to a narrow one, which ignores odd rows.

        The loss is of the rows only: priors pull the harder the farther a factor goes.
        """
        x = np.array([BEGIN.get((f.scope.selector, f.constant), 0.0) for f in self.factors])
        for loss, rounds in ((_soft, 25), (_cauchy, 120)):
            x = least_squares(
                lambda x, loss=loss: self._residuals(x, loss)[0],
                x,
                jac=lambda x, loss=loss: self._jacobian(x, loss),  # type: ignore[arg-type]
                max_nfev=rounds,
            ).x
        return x

    def _residuals(self, x: Array, loss: Loss) -> tuple[Array, Array]:
        """Of the fitted rows and of the factors, in units of noise and of priors; the slope of the rows' loss."""
        rows = (self.logs(x) - np.log(self.measured)) / NOISE * self.weight
        bent, slope = loss(rows[self.fitted] / ODD)
        return np.concatenate([ODD * bent, x / self.widths]), slope

    def _jacobian(self, x: Array, loss: Loss) -> Array:
        """Each row depends on its own constants only: one evaluation per constant, not per factor."""
        start = self.logs(x)
        slopes = np.array([(self.logs(x, i) - start) / 1e-4 for i in range(len(self.names))])
        rows = (self.masks * slopes[self.column] * self.weight / NOISE).T[self.fitted]
        return np.vstack([rows * self._residuals(x, loss)[1][:, None], np.diag(1 / self.widths)])


Loss: TypeAlias = Callable[[Array], tuple[Array, Array]]
"""Residuals bent so that their squares are a robust loss, and the slope of that."""


def _soft(z: Array) -> tuple[Array, Array]:
    """Squares near 0, distances far away."""
    root = np.sqrt(1 + z**2)
    bent = np.sqrt(2 * (root - 1))
    return np.copysign(bent, z), np.where(bent > 1e-6, np.abs(z) / root / np.maximum(bent, 1e-6), 1.0)


def _cauchy(z: Array) -> tuple[Array, Array]:
    """Squares near 0, logarithms far away."""
    bent = np.sqrt(np.log1p(z**2))
    return np.copysign(bent, z), np.where(bent > 1e-6, np.abs(z) / (1 + z**2) / np.maximum(bent, 1e-6), 1.0)


def write(fit: Fit, x: Array, folder: Path) -> int:
    """Write the file of every GPU; how many numbers of them were fitted."""
    fitted = {f.constant for f, value in zip(fit.factors, x, strict=True) if abs(value) > 0.02 * f.width}
    gpus = {job.node.gpu.name: job.node.gpu.generation for job in fit.jobs}
    logs = {(f.scope, f.constant): float(value) for f, value in zip(fit.factors, x, strict=True)}
    for gpu, generation in gpus.items():
        mine = _of_gpu(logs, gpu, generation)
        title = f"{gpu}: what it and its software reach of the nominal, for the time model"
        (folder / f"{gpu}.toml").write_text(_toml(title, mine, fitted))
    _generic(logs, folder, fitted)
    return sum(abs(value) > 0.02 * f.width for f, value in zip(fit.factors, x, strict=True))


def _of_gpu(logs: dict[tuple[Scope, str], float], gpu: str, generation: str) -> dict[str, dict[str, float]]:
    """The factors' logs by the selector of the file ("" = the constants); those of other GPUs left out."""
    tables: dict[str, dict[str, float]] = {"": {name: float(np.log(value)) for name, value in START.items()}}
    for (scope, constant), value in logs.items():
        if scope.gpu in ("", gpu) and scope.generation in ("", generation):
            table = tables.setdefault(scope.selector, {})
            table[constant] = table.get(constant, 0.0) + value
    return tables


def _generic(logs: dict[tuple[Scope, str], float], folder: Path, fitted: set[str]) -> None:
    """A GPU that no row was measured on: what holds for all of them."""
    shared = {key: value for key, value in logs.items() if not key[0].gpu and not key[0].generation}
    title = "A GPU without a file of its own: what holds for all those of the published rows"
    (folder / "generic.toml").write_text(_toml(title, _of_gpu(shared, "-", "-"), fitted))


def _toml(title: str, tables: dict[str, dict[str, float]], fitted: set[str]) -> str:
    lines = [f"# {title}.", *HEAD, "[constants]"]
    lines += [f"{name} = {np.exp(v):.4g}  # {_mark(name, fitted)}" for name, v in tables[""].items()]
    lines += ["", "[least]  # (chosen) no product of factors goes below"]
    lines += [f"{name} = {value:.4g}" for name, value in LEAST.items()]
    for selector in sorted(key for key in tables if key):
        factors = {name: v for name, v in tables[selector].items() if abs(v) > 0.002}
        if factors:
            lines += ["", f'[factors."{selector}"]', *(f"{name} = {np.exp(v):.4g}" for name, v in factors.items())]
    return "\n".join(lines) + "\n"


HEAD = (
    "# Written by fit_steptime.py; the names are explained in roofline.py and steptime.py.",
    "# (fitted) to published step times, hold-out left out; (prior) left where it was. All factors are fitted.",
    "",
)


def _mark(name: str, fitted: Iterable[str]) -> str:
    return "(fitted)" if name in fitted else "(prior)"


def main(reference: Path) -> int:
    """Fit, write, say how well."""
    results, impossible = read(reference / "step_time.csv", predict=False)
    fit = Fit(results)
    print(f"{int(fit.fitted.sum())} rows to fit, {int((~fit.fitted).sum())} held out, {len(impossible)} impossible")
    x = fit.run()
    count = write(fit, x, calibration.FOLDER)
    print(f"{len(fit.factors)} factors, {count} of them moved by the rows")
    error = dict(zip(map(id, fit.results), np.abs(np.exp(fit.logs(x)) / fit.measured - 1), strict=True))
    for name, members in trained(fit.results).items():
        fitted, held = (np.mean([error[id(r)] for r in members if r.held is side]) for side in (False, True))
        print(f"{name}: fit {fitted:.2%}, hold-out {held:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
