"""Predict the throughput on several numbers of GPUs, each with its best layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from superpod.errors import UserError
from superpod.planner import intervals, plans, predict
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob


@dataclass(frozen=True)
class Point:
    """The best layout on one number of GPUs. If none fits, `seconds` is None and `reason` has the message."""

    kind: str
    """strong = constant global batch size; weak = global batch size proportional to the number of GPUs."""
    gpus: int
    gbs: int
    seconds: float | None = None
    tokens_per_s: float = 0.0
    efficiency: float = 0.0
    """Tokens/s/GPU relative to the smallest number of GPUs that fits."""
    layout: Layout | None = None
    reason: str = ""
    precision: str = ""
    """The precision of the layout; with `--precision auto`, the fastest."""
    low_s: float | None = None
    """Lower end of the 80 % interval of `seconds`."""
    high_s: float | None = None
    extrapolation: str = ""
    """A warning if the run is outside the range of the fitted runs, else ""."""

    @property
    def step_time(self) -> str:
        """The step time in seconds with its interval, such as `14.4 (13.1-16.2)`."""
        return intervals.text(self.seconds or 0.0, self.low_s or 0.0, self.high_s or 0.0, unit="")


def table(job: PlannedJob, sizes: list[int], *, auto: bool = False) -> list[Point]:
    """Return the points of strong scaling, then of weak scaling, for numbers of GPUs in `sizes`.

    The global batch size is the job's, in weak scaling on the first size. With `auto`, each point has its fastest
    precision.
    """
    gbs = job.layout.gbs
    strong_points = [_best_point(job, "strong", size, gbs, auto=auto) for size in sizes]
    weak_points = [_best_point(job, "weak", size, gbs * size // sizes[0], auto=auto) for size in sizes]
    return _add_efficiency(strong_points) + _add_efficiency(weak_points)


def as_json(point: Point) -> dict[str, Any]:
    """Return the point as JSON data."""
    return asdict(point)


def _best_point(job: PlannedJob, kind: str, gpus: int, gbs: int, *, auto: bool) -> Point:
    """Search the best layout on `gpus` GPUs with a global batch of `gbs` samples."""
    try:
        best = plans.best(job.replace(gpus=gpus, layout=job.layout.replace(gbs=gbs)), auto=auto)
    except UserError as none:
        return Point(kind, gpus, gbs, reason=str(none))
    prediction = predict.one(best)
    seconds = prediction.step_time_s or 0.0
    return Point(
        kind,
        gpus,
        gbs,
        seconds,
        best.tokens / seconds,
        layout=best.layout,
        precision=best.precision,
        low_s=prediction.step_time_low_s,
        high_s=prediction.step_time_high_s,
        extrapolation=prediction.extrapolation,
    )


def _add_efficiency(points: list[Point]) -> list[Point]:
    """Return the points with their efficiency relative to the first that fits."""
    first = next((p.tokens_per_s / p.gpus for p in points if p.seconds is not None), 1.0)
    return [replace(p, efficiency=p.tokens_per_s / p.gpus / first) for p in points]
