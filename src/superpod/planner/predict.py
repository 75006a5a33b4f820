"""Predict memory and step time of one or many runs, with a verdict for each.

>>> from superpod.planner import predict
>>> predict.one(job).verdict
'ok'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from superpod.planner import columns, intervals, legality, memory
from superpod.planner.arrays import Array, Column
from superpod.planner.columns import Stages
from superpod.planner.hardware import GIB
from superpod.planner.layout import Layout
from superpod.planner.models import Split
from superpod.planner.planned_job import PlannedJob
from superpod.planner.timing import steptime

Verdict = Literal["ok", "oom", "illegal", "unsupported"]


@dataclass(frozen=True)
class Prediction:
    """Predicted memory and time of a run; without figures if its verdict is `illegal` or `unsupported`.

    `oom` = the run does not fit in memory; `ok` = it fits or is tight (`memory.capacity.classify`).
    """

    verdict: Verdict
    reason: str = ""
    """All violated rules, or the excess of memory; warnings if the verdict is `ok`."""
    fit: memory.Fit | None = None
    """Whether the run fits in memory; None without figures."""
    step_time_s: float | None = None
    step_time_low_s: float | None = None
    """Lower end of the 80 % interval (`intervals.py`)."""
    step_time_high_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    limit_gib: float = 0.0
    """Memory that a rank may reserve."""
    allocated_gib_first: float | None = None
    allocated_gib_last: float | None = None
    allocated_gib_max: float | None = None
    allocated_low_gib: float | None = None
    """Lower end of the 80 % interval of `allocated_gib_max`."""
    allocated_high_gib: float | None = None
    reserved_gib_max: float | None = None
    extrapolation: str = ""
    """A warning if the run is outside the range of the fitted runs (`intervals.extrapolation`), else ""."""
    terms_s: Mapping[str, float] = field(default_factory=dict)
    """Term of the step time -> seconds; the sum is `step_time_s`."""
    owners_gib: Mapping[str, float] = field(default_factory=dict)
    """Category of memory -> GiB on the rank with the highest peak; the sum is `allocated_gib_max`."""

    @property
    def short_gib(self) -> float:
        """GiB by which the rank with the highest peak exceeds the limit; at most 0 if it does not."""
        return (self.reserved_gib_max or 0.0) - self.limit_gib

    @property
    def step_time(self) -> str:
        """The step time with its 80 % interval, such as `14.4 s (13.1-16.2)`."""
        return intervals.text(self.step_time_s or 0.0, self.step_time_low_s or 0.0, self.step_time_high_s or 0.0)

    @property
    def tight(self) -> bool:
        """Whether the run fits only without fragmentation."""
        return self.fit == "tight"

    @property
    def outcome(self) -> str:
        """The verdict, or `tight`."""
        return "tight" if self.tight else self.verdict


class Run(NamedTuple):
    """One of many runs to predict, which may share a setting."""

    setting: PlannedJob
    """A job whose layout and number of GPUs are ignored; runs with the same setting should share the object."""
    layout: Layout
    """Its gbs is ignored."""
    gpus: int
    gbs: int
    note: str = ""
    """A note that is appended to `reason` of the prediction."""

    @classmethod
    def from_job(cls, job: PlannedJob) -> Run:
        """Create the run of a job."""
        return cls(job, job.layout, job.gpus, job.layout.gbs)

    @property
    def job(self) -> PlannedJob:
        """The complete job."""
        return self.setting.replace(layout=self.layout.replace(gbs=self.gbs), gpus=self.gpus)


def one(job: PlannedJob) -> Prediction:
    """Predict memory and step time of one job."""
    return many([job])[0]


def many(jobs: Sequence[PlannedJob]) -> list[Prediction]:
    """Predict many jobs, in order; jobs that differ only in layout and number of GPUs are computed together."""
    return runs([Run.from_job(job) for job in jobs])


def runs(runs: Sequence[Run]) -> list[Prediction]:
    """Predict many runs, in order; runs with the same setting are computed together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    of_setting: dict[int, list[int]] = {}
    for i, run in enumerate(runs):
        places = of_setting.get(id(run.setting))
        if places is None:
            places = of_setting[id(run.setting)] = groups.setdefault(_setting(run.setting), [])
        places.append(i)
    predictions: dict[int, Prediction] = {}
    for places in groups.values():
        predictions.update(zip(places, _predict_group([runs[i] for i in places]), strict=True))
    return [predictions[i] for i in range(len(runs))]


def _predict_group(runs: list[Run]) -> list[Prediction]:
    """Predict runs with the same setting, in order."""
    gpus = [run.gpus for run in runs]
    values = columns.fields([run.layout for run in runs], gpus, [run.gbs for run in runs])
    values["gpus"] = np.array(gpus)
    messages = _find_illegal(runs, values)
    predictions = {i: Prediction("illegal", why) for i, why in messages.items()}
    legal = [i for i in range(len(runs)) if i not in messages]
    if legal:
        legal_values = {name: column[legal] for name, column in values.items()}
        predictions.update(zip(legal, _predict_legal([runs[i] for i in legal], legal_values), strict=True))
    return [predictions[i] for i in range(len(runs))]


def _find_illegal(runs: list[Run], values: Mapping[str, Column]) -> dict[int, str]:
    """Return index -> message of each illegal run; `values` are `columns.fields` and `gpus`.

    `legality.legal_mask` checks all runs at once; only those that may be illegal are checked again, with messages.
    """
    checked = {name: values[name] for name in legality.FIELDS if name in values and name != "dp"}
    count_columns = [column for name, column in checked.items() if name not in ZERO_OR_MORE]
    below_one = np.logical_or.reduce([column < 1 for column in count_columns])
    layers = runs[0].setting.model.layers
    given_chunks, odd = (
        np.array([test(run.layout, layers) for run in runs]) for test in (_has_valid_chunks, _needs_full_check)
    )
    checked = {name: np.where(below_one, 1, column) for name, column in checked.items()}
    mask = legality.legal_mask(runs[0].setting, checked, given_chunks)
    suspects = np.flatnonzero(~mask | below_one | odd).tolist()
    messages = {i: "; ".join(violation.message for violation in legality.violations(runs[i].job)) for i in suspects}
    return {i: message for i, message in messages.items() if message}


def _has_valid_chunks(x: Layout, layers: int) -> bool:
    """Return whether the layout has chunks that add up to `layers`, and no other field that partitions them."""
    if x.chunks is None or x.embedding_as_layer or x.loss_as_layer or _has_ends(x):
        return False
    return len(x.chunks) == x.pp * (x.vp or 1) and sum(x.chunks) == layers


def _has_ends(x: Layout) -> bool:
    """Return whether the layout sets the layers of the first or the last stage."""
    return x.first_layers is not None or x.last_layers is not None


def _needs_full_check(x: Layout, layers: int) -> bool:
    """Return whether `legality.legal_mask` does not support the layout."""
    chunks = x.chunks is not None and (not _has_valid_chunks(x, layers) or x.recompute_layers > 1)
    return chunks or _has_ends(x) or 0 in (x.vp, x.etp)


ZERO_OR_MORE = (
    *("sp", "recompute", "recompute_block", "modules", "sharding"),
    *("embedding_as_layer", "loss_as_layer"),
)
"""Columns that may be 0; all others must be at least 1."""


def _setting(job: PlannedJob) -> tuple[object, ...]:
    """Return a key of the job for grouping: all fields except layout and number of GPUs."""
    return (job.model, job.node, job.fabric, job.seq, job.precision, job.task, job.options)


def _predict_legal(runs: list[Run], values: Mapping[str, Column]) -> list[Prediction]:
    """Predict legal runs with the same setting, in order; `values` are `columns.fields` and `gpus`."""
    job, count = runs[0].setting, len(runs)
    ways: dict[tuple[Any, ...], int] = {}
    way = np.array([ways.setdefault(_split_key(run.layout), len(ways)) for run in runs])
    table = Stages(job.model, [Split(**dict(zip(SPLIT_FIELDS, split, strict=True))) for split in ways]).columns(
        way, values
    )
    step = steptime.step(job, table)
    peak, limit = memory.peak(job, table), memory.limit(job)
    is_held = table.weight > 0  # entries of weight 0 only pad the table
    at = np.arange(count), np.where(is_held, peak.allocated, 0).argmax(axis=1)  # the rank with the highest peak
    seconds = np.broadcast_to(step.seconds, count)
    interval = intervals.from_job(job)
    low, high = interval.time_factors(values["gpus"])
    extrapolated = np.broadcast_to(interval.is_extrapolated(values["gpus"]), count).tolist()
    rate = values["gbs"] * job.seq / values["gpus"] / seconds
    _, needed, reserved = peak.highest(is_held)
    fits = [memory.FIT[code] for code in memory.classify(job, needed, reserved).tolist()]
    figures = {
        "step_time_s": seconds,
        "step_time_low_s": seconds * low,
        "step_time_high_s": seconds * high,
        "tokens_per_s_per_gpu": rate,
        "mfu": rate * steptime.mfu(job, job.tokens / job.gpus),
        "allocated_gib_first": np.where(table.first & is_held, peak.allocated, 0).max(axis=1) / GIB,
        "allocated_gib_last": np.where(table.last & is_held, peak.allocated, 0).max(axis=1) / GIB,
        "allocated_gib_max": peak.allocated[at] / GIB,
        "allocated_low_gib": peak.allocated[at] / GIB * interval.memory[0],
        "allocated_high_gib": peak.allocated[at] / GIB * interval.memory[1],
        "reserved_gib_max": reserved / GIB,
    }
    terms = _rows({key: np.broadcast_to(part, count) for key, part in step.terms.items()})
    by_owner = _rows({key: part[at] / GIB for key, part in peak.owners.items()})
    return [
        Prediction(
            verdict="oom" if fit == "does not fit" else "ok",
            reason="; ".join(filter(None, [_describe_memory(fit, wants / GIB, holds / GIB, limit / GIB), run.note])),
            fit=fit,
            limit_gib=limit / GIB,
            **figures,
            extrapolation=intervals.extrapolation(run.job) if is_extrapolated else "",
            terms_s=spent,
            owners_gib=owned,
        )
        for run, is_extrapolated, fit, wants, holds, figures, spent, owned in zip(
            runs, extrapolated, fits, needed.tolist(), reserved.tolist(), _rows(figures), terms, by_owner, strict=True
        )
    ]


def _describe_memory(fit: memory.Fit, needed: float, reserved: float, limit: float) -> str:
    """Return why a run does not fit or is tight, or "" if it fits; sizes in GiB."""
    if fit == "does not fit":
        over = max(needed, reserved) - limit
        return f"{over:.1f} GiB more than the {limit:.1f} GiB of usable memory"
    return f"tight: {reserved:.1f} GiB reserved of {limit:.1f} GiB usable" if fit == "tight" else ""


def _rows(table: Mapping[str, Array]) -> list[dict[str, float]]:
    """Convert a dict of columns to a list of dicts, one per row."""
    lists = [column.tolist() for column in table.values()]
    return [dict(zip(table, row, strict=True)) for row in zip(*lists, strict=True)]


SPLIT_FIELDS = ("pp", "vp", "embedding_as_layer", "loss_as_layer", "first_layers", "last_layers", "chunks")
"""Fields of a layout that determine the layers of each pipeline rank."""


def _split_key(x: Layout) -> tuple[Any, ...]:
    """Return the values of SPLIT_FIELDS."""
    return (x.pp, x.vp or 1, x.embedding_as_layer, x.loss_as_layer, x.first_layers, x.last_layers, x.chunks)
