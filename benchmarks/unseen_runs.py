"""How far the planner is from published runs of papers, vendors' pages and other software.

`python benchmarks/unseen_runs.py benchmarks/reference` prints every row of `unseen.csv` there, and the sums by source;
`benchmarks/planner_accuracy.py` prints the sums. Rows whose layout is printed in full are part of the fit
(`benchmarks/left_out.py` predicts them without it); the others are not. `benchmarks/reference/README.md` says which
rows of a source are left out.
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
"""Rows whose layout is printed whole, at least."""
WANTED = 0.08
"""Median error of these that is wanted."""
FAR = 0.25
"""An error above it has its cause in the column `why`."""
BOUNDS = {
    "published runs of papers and other software, fitted": 0.05,
    "micro-batch or virtual stages not printed, not fitted: the planner's fastest": 0.14,
}
"""Median errors that hold today: of rows whose layout is printed whole, and of the others."""
MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
"""What is tried for a value that a source does not print."""
COUNTED: Mapping[str, Callable[[ModelShape, int], float]] = {
    "causal": lambda model, seq: model.flops_per_token(seq, causal=True),
    "full": lambda model, seq: model.flops_per_token(seq, causal=False),
    "recomputed": lambda model, seq: model.flops_per_token(seq, causal=False) * 4 / 3,
}
"""FLOPs of a token by how a source counts them: half of the scores or all of them, or the second forward pass too."""


@dataclass(frozen=True)
class Run:
    """A published run and what is planned for it."""

    row: Mapping[str, str]
    job: PlannedJob
    published: float
    """s"""
    planned: float
    """s"""

    @property
    def error(self) -> float:
        """Relative, signed: above 0 is too slow."""
        return self.planned / self.published - 1

    @property
    def whole(self) -> bool:
        """Whether the source prints the whole layout."""
        return not self.row["open"]


def main(reference: Path, *, every_row: bool = False) -> int:
    """Print the sums, before them every row if asked. 1 when a bound is passed or a large error has no cause."""
    runs = read(reference / "unseen.csv")
    parts = [[run for run in runs if run.whole is side] for side in (True, False)]
    if every_row:
        print(*_rows(runs), sep="\n", end="\n\n")
    past = len(parts[0]) < LEAST
    for (title, bound), members in zip(BOUNDS.items(), parts, strict=True):
        past |= not members
        if members:
            print(*_sums(title, members, bound), sep="\n", end="\n\n")
            past |= not median(members) <= bound
    print(f"off by more than {FAR:.0%}, by cause:", *_causes(runs), sep="\n")
    unexplained = [run.row["id"] for run in runs if abs(run.error) > FAR and not run.row["why"]]
    if unexplained:
        print(f"off by more than {FAR:.0%}, and `why` is empty: {', '.join(unexplained)}")
    return int(past or bool(unexplained))


def read(path: Path) -> list[Run]:
    """The rows of a table, planned.

    Raises:
        UserError: a row that is illegal, or that the planner does not know.
    """
    with path.open(newline="") as table:
        return [_planned(row) for row in csv.DictReader(table)]


def _planned(row: Mapping[str, str]) -> Run:
    """A row as it is printed; what it leaves open is the planner's fastest that fits, or the fastest if none does."""
    jobs = list(_jobs(row))
    if not jobs:
        raise UserError(f"{row['id']} ({row['source']}) has no legal layout")
    fitting = [job for job in jobs if memory.fit(job) != "does not fit"] if row["open"] else jobs
    seconds, job = min(((_seconds(job), job) for job in fitting or jobs), key=lambda pair: pair[0])
    return Run(row, job, published_seconds(row, job), seconds)


def _jobs(row: Mapping[str, str]) -> Iterator[PlannedJob]:
    """The legal runs that a row may mean: one, unless it leaves something open."""
    left = row["open"].split()
    values = {"mbs": MICRO_BATCHES, "vp": VIRTUAL_STAGES}
    for chosen in itertools.product(*(values[key] for key in left)):
        try:
            job = published.job({**row, **{key: str(value) for key, value in zip(left, chosen, strict=True)}}, FACTS)
        except UserError:
            if not left:
                raise
            continue
        guessed = bool(left) and job.layout.chunks is not None  # stages that are not even were not guessed by anyone
        if not guessed and not legality.violations(job):
            yield job


def _seconds(job: PlannedJob) -> float:
    return float(steptime.step(job, columns.from_job(job)).seconds)


def published_seconds(row: Mapping[str, str], job: PlannedJob) -> float:
    """The step that a row prints: as time, as tokens/s/GPU, or as TFLOP/s by its source's own count (`counted`)."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    if row["tokens_per_s_per_gpu"]:
        return job.tokens / (float(row["tokens_per_s_per_gpu"]) * job.gpus)
    flops = COUNTED[row["counted"]](job.model, job.seq) * job.tokens
    return flops / (float(row["tflops"]) * 1e12 * job.gpus)


def median(runs: Sequence[Run]) -> float:
    """Median of the errors' sizes."""
    return float(np.median([abs(run.error) for run in runs]))


def source(run: Run) -> str:
    """The document of a row, without its commit and the place in it."""
    return run.row["source"].split(",")[0].split("@")[0].split(" ")[0].split(";")[0]


def _sums(title: str, runs: Sequence[Run], bound: float) -> Iterator[str]:
    """A table: rows, median, mean, the furthest too fast and too slow, by source and in all."""
    by_source = defaultdict(list)
    for run in runs:
        by_source[source(run), run.job.node.gpu.name].append(run)
    yield f"{title}: median wanted {WANTED:.0%}, held today {bound:.1%}"
    yield f"{'source':40} {'GPU':16} rows   median     mean  fastest  slowest"
    for (name, gpu), members in by_source.items():
        yield _sum(name, gpu, members)
    yield _sum("all", "", runs)
    oom = [run for run in runs if memory.fit(run.job) == "does not fit"]
    yield f"of these, which ran, the planner calls oom: {', '.join(run.row['id'] for run in oom) or 'none'}"


def _sum(name: str, gpu: str, runs: Sequence[Run]) -> str:
    errors = np.array([run.error for run in runs])
    sizes = f"{median(runs):8.1%} {np.abs(errors).mean():8.1%} {errors.min():+8.0%} {errors.max():+8.0%}"
    return f"{name:40} {gpu:16} {len(runs):4} {sizes}"


def _rows(runs: Sequence[Run]) -> Iterator[str]:
    """Every row under its source: what ran where, published, planned, error."""
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
    """The causes of the large errors: how many rows, from what to what, and what is known."""
    by_cause = defaultdict(list)
    for run in runs:
        if abs(run.error) > FAR:
            by_cause[run.row["why"]].append(run.error)
    for why, errors in sorted(by_cause.items(), key=lambda item: -max(abs(e) for e in item[1])):
        yield f"  {len(errors):3} rows, {min(errors):+.0%} to {max(errors):+.0%}: {why}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), every_row=True))
