"""Compare predicted with published step times, to which the constants are fitted: a line per group of rows.

`python benchmarks/accuracy_time.py FOLDER` reads `step_time.csv` of FOLDER (benchmarks/reference);
`benchmarks/planner_accuracy.py` prints this table and that of memory. `benchmarks/left_out.py` prints the errors on
models and sources that were held out of the fit.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import condense
import held_out

from superpod.errors import UserError
from superpod.planner import columns
from superpod.planner.planned_job import PlannedJob
from superpod.planner.tables import published
from superpod.planner.timing import steptime

FACTS = held_out.FACTS
BOUNDS = {
    "vTrain, one node": (0.055, 534),
    "vTrain, several nodes": (0.08, 21),
    "tuned, dense": (0.06, 222),
    "tuned, MoE": (0.125, 197),
    "tuned": (0.09, 419),
}
"""Group -> (maximum mean relative error, minimum number of rows), so that rows cannot leave the score unnoticed."""
MOST_IMPOSSIBLE = 6
"""Maximum number of rows with contradictory numbers, which are not scored."""
MOST_OF_PEAK = 0.9
"""MFU that no run reaches: the numbers of a row that does are contradictory."""
REGRET, TAU = (0.02, 0.04), (0.9, 0.85)
"""(wanted, bound) of rankings: maximum mean regret, minimum mean Kendall tau."""


@dataclass(frozen=True)
class Result:
    """A row with its measured and predicted value: step time in seconds, or memory in GiB."""

    row: Mapping[str, str]
    job: PlannedJob | None
    measured: float
    predicted: float | None
    """None = not covered."""

    @property
    def error(self) -> float:
        """Relative error; 1 for a row that is not covered."""
        return 1.0 if self.predicted is None else abs(self.predicted / self.measured - 1)


def main(reference: Path) -> int:
    """Print the tables; return 1 if a group exceeds its bound."""
    results, impossible = read(reference / "step_time.csv")
    print(f"{'step time':30} rows  covered     mean    worst   bound  one constant")
    failed = 0
    fixed = constant_baseline(results)
    for name, members in groups(results).items():
        bound, least = BOUNDS.get(name, (None, 0))
        if not members:
            failed = 1
            print(f"{name:30}    0")
            continue
        mean = float(np.mean([result.error for result in members]))
        failed |= not (bound is None or mean <= bound) or len(members) < least
        print(_format_line(name, members, bound, fixed))
    regret, tau = ranking([result for result in results if result.row["release"] == "vTrain"])
    failed |= not (regret <= REGRET[1] and tau >= TAU[1] and len(impossible) <= MOST_IMPOSSIBLE)
    print(f"vTrain, choosing a layout: mean regret {regret:.2%} (wanted {REGRET[0]:.0%}),", end=" ")
    print(f"mean Kendall tau {tau:.3f} (wanted {TAU[0]})")
    worst = sorted((result for result in results if result.predicted), key=lambda result: -result.error)[:8]
    print("worst:", *(f"  {result.error:4.0%}  {published.label(result.row)}" for result in worst), sep="\n")
    print("rows whose own numbers contradict each other:", *(f"  {name}" for name in impossible or ["none"]), sep="\n")
    missing = [published.label(result.row) for result in results if result.predicted is None]
    print("rows not covered:", *(f"  {name}" for name in missing or ["none"]), sep="\n")
    return int(failed)


def read(path: Path, *, predict: bool = True) -> tuple[list[Result], list[str]]:
    """Return the rows with a measured time and their predictions, and the labels of rows with contradictory numbers.

    Twins of fitted rows (`held_out.TWIN`) are omitted. Without `predict`, predictions are nan: `fit_steptime.py` fits
    the constants that they need.
    """
    results, impossible = [], []
    for row in condense.read(path):
        if row["held_out"] == held_out.TWIN:
            continue
        try:
            job = published.job(row, FACTS)
            measured = seconds(row, job)
            if measured is None or condense.contradicts(job) or steptime.mfu(job, measured) > MOST_OF_PEAK:
                impossible.append(published.label(row))
                continue
            predicted = float(steptime.step(job, columns.from_job(job)).seconds) if predict else float("nan")
            results.append(Result(row, job, measured, predicted))
        except published.Unsupported:
            results.append(Result(row, None, float("nan"), None))
        except UserError:
            impossible.append(published.label(row))
    return results, impossible


def seconds(row: Mapping[str, str], job: PlannedJob) -> float | None:
    """Return the measured step time of a row, from its time or throughput; None if it has neither."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    rate = float(row["tokens_per_s_per_gpu"] or 0)
    return job.tokens / (rate * job.gpus) if rate else None


def is_scored(row: Mapping[str, str]) -> bool:
    """Return whether a row is a tuned run of a supported model; verification cards mark untuned, functional runs."""
    return "not tuned" not in row["notes"] and not condense.has_images(row)


def groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return group -> its rows; a row can be in several groups."""
    table: dict[str, list[Result]] = {name: [] for name in BOUNDS}
    for result in results:
        if result.row["release"] == "vTrain":
            table["vTrain, one node" if int(result.row["gpus"]) <= 8 else "vTrain, several nodes"].append(result)
            continue
        if not is_scored(result.row):
            name = "vision-language, text planned" if condense.has_images(result.row) else "functional runs, not tuned"
            table.setdefault(name, []).append(result)
            continue
        moe = result.job is None or result.job.model.is_moe
        table["tuned, MoE" if moe else "tuned, dense"].append(result)
        table["tuned"].append(result)
        table.setdefault(f"  {result.row['gpu'] or 'h100-80gb'}, {'MoE' if moe else 'dense'}", []).append(result)
    return table


def constant_baseline(results: Sequence[Result]) -> dict[str, float]:
    """Return row ID -> error of the best constant MFU per GPU, precision, dense or MoE, and framework."""
    rates = defaultdict(list)
    for result in results:
        if result.job:
            rates[_baseline_class(result.job)].append(float(steptime.mfu(result.job, result.measured)))
    errors = {}
    for result in results:
        if result.job:
            guess = np.exp(np.median(np.log(rates[_baseline_class(result.job)])))
            errors[result.row["id"]] = abs(float(steptime.mfu(result.job, result.measured)) / guess - 1)
    return errors


def _baseline_class(job: PlannedJob) -> tuple[str, str, bool, bool]:
    """Return the class of runs that share a constant MFU in the baseline."""
    return job.node.gpu.name, job.precision, job.model.is_moe, job.options.framework == "deepspeed"


def ranking(results: Sequence[Result]) -> tuple[float, float]:
    """Return (mean regret of the layout predicted fastest, mean Kendall tau) over runs of one model, size and batch."""
    alike = defaultdict(list)
    for result in results:
        if result.predicted:
            alike[tuple(result.row[k] for k in ("layers", "hidden", "gpus", "gbs"))].append(result)
    regrets, taus = [], []
    for members in alike.values():
        chosen = min(members, key=lambda result: result.predicted or 0)
        regrets.append(chosen.measured / min(result.measured for result in members) - 1)
        if len(members) > 2:
            taus.append(kendall([e.measured for e in members], [e.predicted or 0 for e in members]))
    return float(np.mean(regrets)), float(np.mean(taus))


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Kendall's tau-b: (concordant - discordant pairs) / untied pairs."""
    x, y = (np.sign(np.subtract.outer(v, v))[np.triu_indices(len(v), 1)] for v in (a, b))
    return float((x * y).sum() / np.sqrt((x != 0).sum() * (y != 0).sum()))


def _format_line(name: str, members: Sequence[Result], bound: float | None, fixed: Mapping[str, float]) -> str:
    """Format the line of a group."""
    covered = [result for result in members if result.predicted is not None]
    mean, worst = np.mean([e.error for e in members]), max(e.error for e in members)
    base = np.mean([fixed[e.row["id"]] for e in covered]) if covered else float("nan")
    limit = f"{bound:7.1%}" if bound else " " * 7
    return f"{name:30} {len(members):4}  {len(covered):7} {mean:8.2%} {worst:8.0%} {limit}  {base:12.0%}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
