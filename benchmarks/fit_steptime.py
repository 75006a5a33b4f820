"""Fit the constants of the time model to published step times, and write `planner/data/calibration.toml`.

`python benchmarks/fit_steptime.py benchmarks/reference` (needs scipy; takes a minute). Minimizes the squared log of
predicted / measured time with a Cauchy loss, so that outliers have little weight, and a Gaussian prior per constant: a
constant that the rows do not determine stays at its prior. A constant is the product of factors: for all runs, a GPU
generation, a precision, a software release, a class of runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parent))

from accuracy_time import Result, is_scored
from published_runs import rows
from steptime_priors import BEGIN, COMMON, FACTORS, START

from superpod.planner import columns
from superpod.planner.calibration import calibration
from superpod.planner.timing import step_cost, steptime

Array = NDArray[np.float64]
NOISE = 0.03
"""Relative noise of published times and of the model."""
OUTLIER = 2.0
"""Multiple of the noise from which a row is an outlier."""


@dataclass(frozen=True)
class Factor:
    """A number to fit: the factor of a constant for the rows of a selector."""

    constant: str
    selector: str
    """One of `calibration.selectors`; "" = all rows."""
    width: float
    """Standard deviation of the prior of the factor's log; its mean is 0."""
    rows: Array
    """1 where it applies; of `power` the exponent."""


class Fit:
    """The rows and the factors to fit to them."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = [result for result in results if result.job]
        self.jobs = [result.job for result in self.results if result.job]
        self.step_cost = step_cost.stack([step_cost.from_job(job, columns.from_job(job)) for job in self.jobs])
        self.measured = np.array([result.measured for result in self.results])
        self.fitted = np.array([is_scored(result.row) for result in self.results])
        single = np.array(
            [result.row["release"] == "vTrain" and int(result.row["gpus"]) <= 8 for result in self.results]
        )
        self.weight = np.where(single, 0.5, 1.0)  # 534 rows of one machine, 470 of all others
        self.names = list(START)
        self.factors = list(self._create_factors())
        self.column = np.array([self.names.index(f.constant) for f in self.factors])
        self.masks = np.array([f.rows for f in self.factors])
        self.widths = np.array([f.width for f in self.factors])

    def _create_factors(self) -> Iterator[Factor]:
        """Yield the factors in COMMON and FACTORS."""
        for constant, width in COMMON.items():
            yield Factor(constant, "", width, np.ones(len(self.jobs)))
        chosen = [calibration.selectors(job) for job in self.jobs]
        for selector, widths in FACTORS.items():
            rows = np.array([selector in names for names in chosen], dtype=float)
            if selector == "power":
                rows = np.array([calibration.power(job.node.gpu) for job in self.jobs])
            for constant, width in widths.items():
                yield Factor(constant, selector, width, rows)

    def constants(self, x: Array, bumped: int = -1) -> dict[str, Array]:
        """Return name -> constant of each row; the log of constant `bumped` is increased by 1e-4, for derivatives."""
        values = {}
        for i, name in enumerate(self.names):
            mine = self.column == i
            log = np.log(START[name]) + x[mine] @ self.masks[mine] + (1e-4 if i == bumped else 0.0)
            values[name] = np.exp(log)
        return calibration.bounded(calibration.with_hops(values))

    def logs(self, x: Array, bumped: int = -1) -> Array:
        """Return the log of the predicted step time of each row."""
        return np.log(sum(steptime.price(self.step_cost, self.constants(x, bumped)).values()))

    def run(self, start: Array | None = None) -> Array:
        """Return the logs of the fitted factors: first with a soft loss, which converges, then with a Cauchy loss.

        The robust loss applies only to rows; priors are quadratic.
        """
        x = np.array([BEGIN.get((f.selector, f.constant), 0.0) for f in self.factors])
        stages = ((_soft, 25), (_cauchy, 120))
        if start is not None:
            x, stages = start, ((_cauchy, 6),)
        for loss, rounds in stages:
            x = least_squares(
                lambda x, loss=loss: self._residuals(x, loss)[0],
                x,
                jac=lambda x, loss=loss: self._jacobian(x, loss),  # type: ignore[arg-type]
                max_nfev=rounds,
            ).x
        return x

    def _residuals(self, x: Array, loss: Loss) -> tuple[Array, Array]:
        """Return (residuals of fitted rows and of priors, derivatives of the rows' loss)."""
        rows = (self.logs(x) - np.log(self.measured)) / NOISE * self.weight
        bent, slope = loss(rows[self.fitted] / OUTLIER)
        return np.concatenate([OUTLIER * bent, x / self.widths]), slope

    def _jacobian(self, x: Array, loss: Loss) -> Array:
        """Return the Jacobian of the residuals, from one evaluation per constant instead of one per factor."""
        start = self.logs(x)
        slopes = {i: (self.logs(x, i) - start) / 1e-4 for i in np.unique(self.column)}
        every = np.array([slopes[i] for i in self.column])
        rows = (self.masks * every * self.weight / NOISE).T[self.fitted]
        return np.vstack([rows * self._residuals(x, loss)[1][:, None], np.diag(1 / self.widths)])


Loss: TypeAlias = Callable[[Array], tuple[Array, Array]]
"""Returns (residuals whose squares are a robust loss, derivatives)."""


def _soft(z: Array) -> tuple[Array, Array]:
    """Return a loss that is quadratic near 0 and linear far away; see `Loss`."""
    root = np.sqrt(1 + z**2)
    bent = np.sqrt(2 * (root - 1))
    return np.copysign(bent, z), np.where(bent > 1e-6, np.abs(z) / root / np.maximum(bent, 1e-6), 1.0)


def _cauchy(z: Array) -> tuple[Array, Array]:
    """Return a loss that is quadratic near 0 and logarithmic far away; see `Loss`."""
    bent = np.sqrt(np.log1p(z**2))
    return np.copysign(bent, z), np.where(bent > 1e-6, np.abs(z) / (1 + z**2) / np.maximum(bent, 1e-6), 1.0)


def format_toml(fit: Fit, x: Array) -> str:
    """Return the text of `calibration.toml`, with the number of rows to which each factor was fitted."""
    logs = {(f.selector, f.constant): float(value) for f, value in zip(fit.factors, x, strict=True)}
    rows = {f.selector: int(((f.rows != 0) & fit.fitted).sum()) for f in fit.factors}
    lines = [*HEAD, "[constants]"]
    for name, start in START.items():
        source = "fitted" if ("", name) in logs else "prior"
        lines.append(f"{name} = {start * np.exp(logs.get(('', name), 0.0)):.4g}  # {source}")
    for selector, widths in FACTORS.items():
        lines += ["", f'[factors."{selector}"]  # {rows[selector]} rows']
        lines += [f"{name} = {np.exp(logs[selector, name]):.4g}" for name in widths]
    return "\n".join(lines) + "\n"


HEAD = (
    "# The constants of the time model. Written by benchmarks/fit_steptime.py; planner/timing/roofline.py and",
    "# planner/timing/steptime.py explain the names. All factors are fitted to published step times.",
    "",
)


def main(reference: Path) -> int:
    """Fit the constants to all rows, write them, and print the number of factors."""
    fit = Fit(rows(reference))
    calibration.FILE.write_text(format_toml(fit, fit.run()))
    print(f"{len(fit.factors)} factors, fitted to {int(fit.fitted.sum())} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
