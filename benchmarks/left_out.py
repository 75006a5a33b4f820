"""Measure the errors of the time model on held-out models and sources: `python benchmarks/left_out.py FOLDER`.

The constants are fitted to all published rows (`step_time.csv`, and the rows of `unseen.csv` with a complete layout).
Then each model in turn is held out, the constants are fitted to the other rows, and its rows are predicted; likewise
each source. The planner's intervals (`planner/data/intervals.toml`, written with `--write`) are quantiles of these
errors.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import accuracy_memory
from condense import read
from fit_steptime import Array, Fit
from published_runs import kind, model, rows, source

from superpod.planner import intervals

WANTED = {"dense": 0.06, "experts": 0.10, "fine-tuning": 0.09, "other software": 0.13}
"""Class of runs -> wanted mean relative error on held-out runs."""


def left_out_errors(fit: Fit, start: Array, groups: Mapping[str, list[int]]) -> dict[int, float]:
    """Return row index -> signed relative error, with constants that were fitted without the group of the row."""
    everything = fit.fitted.copy()
    errors = {}
    for members in groups.values():
        fit.fitted = everything.copy()
        fit.fitted[members] = False
        logs = fit.logs(fit.run(start))
        for i in members:
            errors[i] = float(np.exp(logs[i]) / fit.measured[i] - 1)
    fit.fitted = everything
    return errors


def grouped(fit: Fit, by: str) -> dict[str, list[int]]:
    """Return model or source (`by`) -> indices of its rows."""
    name = {"model": model, "source": source}[by]
    groups = defaultdict(list)
    for i, result in enumerate(fit.results):
        if kind(result):
            groups[name(result)].append(i)
    return groups


def summary(fit: Fit, errors: Mapping[int, float], title: str) -> Iterator[str]:
    """Yield the lines of a table with the mean and median error of each class."""
    yield f"{title:28} rows    mean   median   wanted"
    for name, wanted in WANTED.items():
        sizes = [abs(error) for i, error in errors.items() if kind(fit.results[i]) == name]
        yield f"{name:28} {len(sizes):4} {np.mean(sizes):7.1%}  {np.median(sizes):7.1%}  {wanted:7.0%}"


def main(reference: Path, *, write: bool = False) -> int:
    """Print the errors of fitted rows, held-out models and held-out sources; with `write`, write the intervals."""
    fit = Fit(rows(reference))
    x = fit.run()
    inside = {i: float(e) for i, e in enumerate(np.exp(fit.logs(x)) / fit.measured - 1)}
    print(f"{len(fit.factors)} fitted numbers, {int(fit.fitted.sum())} rows")
    print(*summary(fit, inside, "fitted"), sep="\n")
    left_out = {}
    for by in ("model", "source"):
        errors = left_out[by] = left_out_errors(fit, x, grouped(fit, by))
        print(*summary(fit, errors, f"left out by {by}"), sep="\n")
        print(*_groups(fit, errors, by), sep="\n")
    residuals = time_residuals(fit, left_out["model"], left_out["source"])
    memory = memory_residuals(reference)
    print(*coverage(residuals, "step time"), *coverage(memory, "allocated memory"), sep="\n")
    if write:
        intervals.FILE.write_text(table(fit, residuals, memory))
    return 0


Residuals = dict[str, list[tuple[str, float]]]
"""Class of `intervals.class_name` -> (group, log of measured / predicted) of its held-out runs."""
SHARE = 0.8
"""Share of the measurements that an interval contains."""


def time_residuals(fit: Fit, by_model: Mapping[int, float], by_source: Mapping[int, float]) -> Residuals:
    """Return the residuals of step times: of held-out sources, for unknown models also of held-out models."""
    residuals: Residuals = defaultdict(list)
    for known, errors, group in ((True, by_source, source), (False, by_model, model), (False, by_source, source)):
        for i, error in errors.items():
            result = fit.results[i]
            name = intervals.class_name(fit.jobs[i], known)
            if kind(result) == "other software":
                name = "other software"
            residuals[name].append((group(result), -float(np.log1p(error))))
    return residuals


def memory_residuals(reference: Path) -> Residuals:
    """Return the residuals of allocated memory, on covered rows; few constants of memory are fitted."""
    residuals: Residuals = defaultdict(list)
    for row in read(reference / "memory.csv"):
        result = accuracy_memory.compare(row) if row["allocated_gib"] else None
        if result is None or result.predicted is None:
            continue
        of_group = accuracy_memory.group(row)
        name = "other software" if of_group.startswith("other") else "megatron"
        group = f"{of_group} {row['model']} {row['hidden']}"
        residuals[name].append((group, float(np.log(result.measured / result.predicted))))
    return residuals


def interval(members: Sequence[tuple[str, float]]) -> tuple[float, float]:
    """Return the interval of measured / predicted that contains `SHARE` of the runs.

    The weight of a group is the square root of its number of rows, because rows of one page are similar.
    """
    groups = Counter(group for group, _ in members)
    values = np.array([value for _, value in members])
    weights = np.array([groups[group] ** -0.5 for group, _ in members])
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    tail = (1 - SHARE) / 2
    low = values[order][np.searchsorted(reached, tail)]
    high = values[order][min(np.searchsorted(reached, 1 - tail), len(values) - 1)]
    return float(np.exp(low)), float(np.exp(high))


def coverage(residuals: Residuals, title: str) -> Iterator[str]:
    """Yield the lines of a table with the share of runs in the interval that the other groups determine."""
    yield f"{title:34} runs  groups  covered   interval"
    total = []
    for name, members in residuals.items():
        inside = []
        for group in {group for group, _ in members}:
            others = [member for member in members if member[0] != group]
            low, high = np.log(interval(others)) if others else (0.0, 0.0)
            inside += [low <= value <= high for of_group, value in members if of_group == group]
        total += inside
        low, high = interval(members)
        groups = len({group for group, _ in members})
        yield f"{name:34} {len(members):4}  {groups:6}  {np.mean(inside):7.0%}   {low - 1:+.0%} to {high - 1:+.0%}"
    yield f"{'all':34} {len(total):4}          {np.mean(total):7.0%}"


def table(fit: Fit, residuals: Residuals, memory: Residuals) -> str:
    """Return the text of `intervals.toml`."""
    scored = [i for i, result in enumerate(fit.results) if kind(result)]
    models = sorted({fit.jobs[i].model.name for i in scored} - {"gpt", "moe", "given"})
    lines = ["# The 80 % intervals of planner/intervals.py. Written by benchmarks/left_out.py --write.", ""]
    lines += ["models = [  # of the fit", *(f'    "{name}",' for name in models), "]", "", "[largest]  # of the fit"]
    lines += [f"gpus = {max(fit.jobs[i].gpus for i in scored)}", f"seq = {max(fit.jobs[i].seq for i in scored)}"]
    for part, classes in (("time", residuals), ("memory", memory)):
        for name, members in classes.items():
            low, high = interval(members)
            known = classes.get(name.replace("unknown", "known"), members)
            low, high = min(low, interval(known)[0]), max(high, interval(known)[1])  # never narrower for unknown models
            lines += ["", f'[{part}."{name}"]  # {len(members)} runs', f"low = {low:.3f}", f"high = {high:.3f}"]
    return "\n".join(lines) + "\n"


def _groups(fit: Fit, errors: Mapping[int, float], by: str) -> Iterator[str]:
    """Yield a line with the error of each group and class."""
    for name, members in sorted(grouped(fit, by).items()):
        for of_kind in WANTED:
            mine = np.array([errors[i] for i in members if kind(fit.results[i]) == of_kind])
            if len(mine):
                mean, bias = np.abs(mine).mean(), mine.mean()
                yield f"   {name:40} {of_kind:15} {len(mine):3} mean {mean:6.1%} bias {bias:+6.1%}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), write="--write" in sys.argv))
