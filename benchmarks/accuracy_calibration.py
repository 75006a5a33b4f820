"""Measure `recipes calibrate` on other software: calibrate on nanotron's runs on 1 and 2 nodes, score on 4 and 8 nodes.

`python benchmarks/accuracy_calibration.py benchmarks/reference` reads its `nanotron.csv`. The scores of each group (a
model on a number of GPUs) are the regret, the time lost with the layout that is predicted fastest, and Kendall's tau.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from superpod.planner import predict
from superpod.planner.calibration.calibrate import MeasuredRun, apply_corrections, calibrate
from superpod.planner.tables import measured

Array = NDArray[np.float64]
REGRET, TAU, MEDIAN = 0.06, 0.7, 0.15
"""Bounds after calibration: mean regret, mean Kendall tau, median error."""
SEEN = 16
"""Maximum number of GPUs of the runs for calibration."""


@dataclass(frozen=True)
class Score:
    """Accuracy of predicted step times: regret and Kendall's tau of their ranking, and median relative error."""

    regret: float
    tau: float
    median: float


def main(reference: Path) -> int:
    """Print the scores, and return 1 if one exceeds its bound."""
    before, after, seen, scored = scores(reference / "nanotron.csv")
    print(f"calibrated on {seen} nanotron runs of up to {SEEN} GPUs, scored on {scored} of more:")
    print("              regret  Kendall tau  median error")
    for name, score in (("as shipped", before), ("calibrated", after)):
        print(f"{name:12} {score.regret:7.2%} {score.tau:12.3f} {score.median:13.1%}")
    print(f"{'wanted':12} {REGRET:7.0%} {TAU:12.1f} {MEDIAN:13.0%}")
    return int(not (after.regret <= REGRET and after.tau >= TAU and after.median <= MEDIAN))


def scores(path: Path) -> tuple[Score, Score, int, int]:
    """Return (score with the defaults, score after calibration, runs for calibration, scored runs)."""
    runs, _ = measured.read(path)
    seen = [run for run in runs if run.job.gpus <= SEEN]
    rest = [run for run in runs if run.job.gpus > SEEN]
    values = calibrate(seen).values
    shipped = score(rest, _predict_times(rest, {}))
    return shipped, score(rest, _predict_times(rest, values)), len(seen), len(rest)


def _predict_times(runs: Sequence[MeasuredRun], values: dict[str, float]) -> Array:
    """Return the step times in seconds that the planner predicts with corrections `values`."""
    predictions = predict.many([apply_corrections(run.job, values) for run in runs])
    return np.array([prediction.step_time_s or np.nan for prediction in predictions])


def score(runs: Sequence[MeasuredRun], predicted: Array) -> Score:
    """Score predicted step times; the ranking needs groups of at least three layouts."""
    seconds = np.array([run.seconds for run in runs])
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        job = run.job
        groups[job.model, job.gpus, job.seq, job.layout.gbs].append(i)
    ranked = [members for members in groups.values() if len(members) > 2]
    regrets = [seconds[g][predicted[g].argmin()] / seconds[g].min() - 1 for g in ranked]
    return Score(
        float(np.mean(regrets)),
        float(np.mean([kendall(predicted[g], seconds[g]) for g in ranked])),
        float(np.median(np.abs(predicted / seconds - 1))),
    )


def kendall(a: Array, b: Array) -> float:
    """Return Kendall's tau-a: (concordant - discordant pairs) / all pairs."""
    i, j = np.triu_indices(len(a), 1)
    return float(np.sign((a[i] - a[j]) * (b[i] - b[j])).mean())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
