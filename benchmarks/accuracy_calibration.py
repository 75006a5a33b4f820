"""How well `recipes calibrate` fits another software's machines: nanotron's runs of 1 and 2 nodes, scored on 4 and 8.

`python benchmarks/accuracy_calibration.py benchmarks/reference` reads `nanotron.csv` there. A group is a model on so
many GPUs: the time lost by taking the layout that is predicted fastest (regret), and Kendall's tau of the order.
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
"""GPUs at most of the rows that calibrate."""


@dataclass(frozen=True)
class Score:
    """How well a prediction of runs ranks their layouts, and how far off it is."""

    regret: float
    tau: float
    median: float


def main(reference: Path) -> int:
    """Print the scores. 1 when one is past its bound."""
    before, after, seen, scored = scores(reference / "nanotron.csv")
    print(f"calibrated on {seen} nanotron runs of up to {SEEN} GPUs, scored on {scored} of more:")
    print("              regret  Kendall tau  median error")
    for name, score in (("as shipped", before), ("calibrated", after)):
        print(f"{name:12} {score.regret:7.2%} {score.tau:12.3f} {score.median:13.1%}")
    print(f"{'wanted':12} {REGRET:7.0%} {TAU:12.1f} {MEDIAN:13.0%}")
    return int(not (after.regret <= REGRET and after.tau >= TAU and after.median <= MEDIAN))


def scores(path: Path) -> tuple[Score, Score, int, int]:
    """(as shipped, calibrated, rows that calibrated, rows that were scored)."""
    runs, _ = measured.read(path)
    seen = [run for run in runs if run.job.gpus <= SEEN]
    rest = [run for run in runs if run.job.gpus > SEEN]
    values = calibrate(seen).values
    shipped = score(rest, _predicted(rest, {}))
    return shipped, score(rest, _predicted(rest, values)), len(seen), len(rest)


def _predicted(runs: Sequence[MeasuredRun], values: dict[str, float]) -> Array:
    predictions = predict.many([apply_corrections(run.job, values) for run in runs])
    return np.array([prediction.step_time_s or np.nan for prediction in predictions])


def score(runs: Sequence[MeasuredRun], predicted: Array) -> Score:
    """The score of a prediction; groups of fewer than three layouts rank nothing."""
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
    """Pairs in the same order less pairs in the other, over all pairs."""
    i, j = np.triu_indices(len(a), 1)
    return float(np.sign((a[i] - a[j]) * (b[i] - b[j])).mean())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
