"""Compare the planner with published runs of papers, vendors' pages and other software.

`python benchmarks/unseen_runs.py benchmarks/reference` prints every row of its `unseen.csv`, and a summary by source;
`benchmarks/planner_accuracy.py` prints the summary. Rows with a complete layout are part of the fit
(`benchmarks/left_out.py` holds them out); the others are not. `benchmarks/reference/README.md` lists the rows of a
source that are not included.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from superpod.errors import UserError
from superpod.planner import columns, hardware, legality, memory
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob
from superpod.planner.tables import published
from superpod.planner.timing import steptime

FACTS = published.Facts(hardware.load(Path(__file__).parent / "reference" / "hardware.toml"))
LEAST = 40
"""Minimum number of rows with a complete layout."""
WANTED = 0.08
"""Wanted median error of these rows."""
FAR = 0.25
"""Rows with a larger error must have a cause in the column `why`."""
BOUNDS = {
    "published runs of papers and other software, fitted": 0.05,
    "micro-batch or virtual stages not printed, not fitted: the planner's fastest": 0.14,
}
"""Title -> maximum median error: of rows with a complete layout, and of the others."""
MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
"""Values to try if a source does not print one."""
COUNTED: Mapping[str, Callable[[ModelShape, int], float]] = {
    "causal": lambda model, seq: model.flops_per_token(seq, causal=True),
    "full": lambda model, seq: model.flops_per_token(seq, causal=False),
    "recomputed": lambda model, seq: model.flops_per_token(seq, causal=False) * 4 / 3,
}
"""Convention of a source -> FLOPs per token: half of the scores, all of them, or also the recomputed forward pass."""


@dataclass(frozen=True)
class Run:
    """A published run and its prediction."""

    row: Mapping[str, str]
    job: PlannedJob
    published: float
    """Published step time in seconds."""
    planned: float
    """Predicted step time in seconds."""

    @property
    def error(self) -> float:
        """Signed relative error; positive = the prediction is too slow."""
        return self.planned / self.published - 1

    @property
    def has_layout(self) -> bool:
        """Whether the source prints the complete layout."""
        return not self.row["open"]


def main(reference: Path, *, every_row: bool = False) -> int:
    """Print the summary, with `every_row` after the rows; return 1 if a bound is exceeded or an error has no cause."""
    runs = read(reference / "unseen.csv")
    parts = [[run for run in runs if run.has_layout is side] for side in (True, False)]
    if every_row:
        print(*_rows(runs), sep="\n", end="\n\n")
    failed = len(parts[0]) < LEAST
    for (title, bound), members in zip(BOUNDS.items(), parts, strict=True):
        failed |= not members
        if members:
            print(*_summary(title, members, bound), sep="\n", end="\n\n")
            failed |= not median(members) <= bound
    print(f"off by more than {FAR:.0%}, by cause:", *_causes(runs), sep="\n")
    unexplained = [run.row["id"] for run in runs if abs(run.error) > FAR and not run.row["why"]]
    if unexplained:
        print(f"off by more than {FAR:.0%}, and `why` is empty: {', '.join(unexplained)}")
    return int(failed or bool(unexplained))


def read(path: Path) -> list[Run]:
    """Predict the rows of a table. Raises UserError if a row is illegal or not supported."""
    with path.open(newline="") as table:
        return [_predict_row(row) for row in csv.DictReader(table)]


def _predict_row(row: Mapping[str, str]) -> Run:
    """Predict a row; values that it does not print are those of the fastest layout that fits, else of the fastest."""
    jobs = list(_jobs(row))
    if not jobs:
        raise UserError(f"{row['id']} ({row['source']}) has no legal layout")
    fitting = [job for job in jobs if memory.fit(job) != "does not fit"] if row["open"] else jobs
    predicted = [(float(steptime.step(job, columns.from_job(job)).seconds), job) for job in fitting or jobs]
    seconds, job = min(predicted, key=lambda pair: pair[0])
    return Run(row, job, published_seconds(row, job), seconds)


def _jobs(row: Mapping[str, str]) -> Iterator[PlannedJob]:
    """Yield the legal jobs that a row can mean: one, unless it does not print a value."""
    left = row["open"].split()
    values = {"mbs": MICRO_BATCHES, "vp": VIRTUAL_STAGES}
    for chosen in itertools.product(*(values[key] for key in left)):
        try:
            job = published.job({**row, **{key: str(value) for key, value in zip(left, chosen, strict=True)}}, FACTS)
        except UserError:
            if not left:
                raise
            continue
        guessed = bool(left) and job.layout.chunks is not None  # unprinted stages are assumed to be even
        if not guessed and not legality.violations(job):
            yield job


def published_seconds(row: Mapping[str, str], job: PlannedJob) -> float:
    """Return the published step time in seconds, from time, tokens/s/GPU, or TFLOP/s in the convention `counted`."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    if row["tokens_per_s_per_gpu"]:
        return job.tokens / (float(row["tokens_per_s_per_gpu"]) * job.gpus)
    flops = COUNTED[row["counted"]](job.model, job.seq) * job.tokens
    return flops / (float(row["tflops"]) * 1e12 * job.gpus)


def median(runs: Sequence[Run]) -> float:
    """Return the median of the absolute relative errors."""
    return float(np.median([abs(run.error) for run in runs]))


def source(run: Run) -> str:
    """Return the document of a row, without commit and location."""
    return run.row["source"].split(",")[0].split("@")[0].split(" ")[0].split(";")[0]


def _summary(title: str, runs: Sequence[Run], bound: float) -> Iterator[str]:
    """Yield the lines of a table of errors by source and in total: rows, median, mean, minimum, maximum."""
    by_source = defaultdict(list)
    for run in runs:
        by_source[source(run), run.job.node.gpu.name].append(run)
    yield f"{title}: median wanted {WANTED:.0%}, held today {bound:.1%}"
    yield f"{'source':40} {'GPU':16} rows   median     mean  fastest  slowest"
    for (name, gpu), members in by_source.items():
        yield _summary_line(name, gpu, members)
    yield _summary_line("all", "", runs)
    oom = [run for run in runs if memory.fit(run.job) == "does not fit"]
    yield f"of these, which ran, the planner calls oom: {', '.join(run.row['id'] for run in oom) or 'none'}"


def _summary_line(name: str, gpu: str, runs: Sequence[Run]) -> str:
    """Format a line of the summary."""
    errors = np.array([run.error for run in runs])
    sizes = f"{median(runs):8.1%} {np.abs(errors).mean():8.1%} {errors.min():+8.0%} {errors.max():+8.0%}"
    return f"{name:40} {gpu:16} {len(runs):4} {sizes}"


def _rows(runs: Sequence[Run]) -> Iterator[str]:
    """Yield each source, followed by its rows: run, published and predicted step time, error."""
    for place, members in itertools.groupby(runs, key=lambda run: run.row["source"]):
        yield place
        for run in members:
            x, job = run.job.layout, run.job
            named = f"{run.row['model']} {job.model.layers} layers" if run.row["layers"] else run.row["model"]
            what = f"{named}, {job.gpus} {job.node.gpu.name} {job.precision}, seq {job.seq}, gbs {x.gbs}"
            degrees = f"TP{x.tp} PP{x.pp} VP{x.vp or 1} CP{x.cp} EP{x.ep} mbs {x.mbs}"
            guessed = "*" if run.row["open"] else " "
            yield (
                f"  {run.row['id']} {what:66} {degrees:28}{guessed}"
                f"{run.published:8.2f} s {run.planned:8.2f} s {run.error:+7.1%}"
            )
    yield "* micro-batch or virtual stages are not printed: the planner's fastest"


def _causes(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line per cause of large errors: number of rows, range of errors, cause."""
    by_cause = defaultdict(list)
    for run in runs:
        if abs(run.error) > FAR:
            by_cause[run.row["why"]].append(run.error)
    for why, errors in sorted(by_cause.items(), key=lambda item: -max(abs(e) for e in item[1])):
        yield f"  {len(errors):3} rows, {min(errors):+.0%} to {max(errors):+.0%}: {why}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), every_row=True))
